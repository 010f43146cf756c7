"""A profile for a device that is not there: the roofline model.

Each kernel takes the longer of computing and moving its data, and a launch:

    time = max(flops / (peak * efficiency), bytes / (bandwidth * efficiency)) + launch

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. Peaks and efficiencies come from the
cluster file, FLOPs and what the backward keeps from rules.py. The backward's input part makes the
gradients of values, its weight part those of parameters (and of views of parameters): a product has one
product of the same size per gradient; attention 2.5 times the forward's (five products for two:
FlashAttention, 2205.14135, appendix B); recurrent layers have one for all values and one for all parameters,
as if the steps of a sequence were one product: a GPU takes longer where batches are small; the rest moves
what it keeps, the gradient that comes and the one that it makes. Views cost nothing, but the gradient of a
slice, of parts or of an expanded tensor is written whole.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from ..ir.cluster import Device, is_cpu
from ..ir.errors import ConfigError
from ..ir.graph import DTYPE_BYTES, Op, OpGraph, Parameter, Value, made_of_state, storages, tensor_bytes
from ..ir.profile import OpCost, Profile, batch_text
from .gradient_order import AT_ONCE, attention_scores, gradient_order
from .rules import (
    RULES,
    VIEW,
    Rule,
    attention_flops,
    base_name,
    convolution_flops,
    einsum_flops,
    matmul_flops,
    recurrent_flops,
    rule_of,
)


def roofline(graph: OpGraph, device: Device) -> Profile:
    """Estimate the costs of every op of a graph on a device.

    Ops that the tables do not know count as elementwise; a warning names them, and so do the profile's notes.
    Raises: ConfigError if the device has no rates.
    """
    require_rates(device)
    estimate = _Estimate(graph, device)
    rules = [(op, RULES.get(base_name(op.target))) for op in graph.ops if not op.view]
    unknown = sorted({op.target for op, rule in rules if rule is None})
    odd_widths = {w for op, rule in rules if rule for w in _Operands(estimate, op, rule).odd_widths}
    widths = {width for width in odd_widths if width >= WORTH_PADDING}
    notes: tuple[str, ...] = ()
    if unknown:
        notes = (f"estimated as elementwise: {', '.join(unknown)}",)
    if widths:
        odd = ", ".join(f"{width:,}" for width in sorted(widths))
        notes += (
            f"products in 16 bits with rows of {odd} numbers, no multiple of 8, take "
            f"{1 / UNALIGNED:.1f} times as long on GPUs: pad them, such as a vocabulary",
        )
    for note in notes:
        warnings.warn(f"roofline profile of {graph.name}: {note}", stacklevel=2)
    return Profile(
        device=device.name,
        source="roofline",
        graph=graph.fingerprint,
        batch=batch_text(graph.inputs),
        costs={op.name: estimate.op(op) for op in graph.ops},
        notes=notes,
    )


def require_rates(device: Device) -> None:
    """Raises: ConfigError if the device has no rates."""
    if device.memory_bytes_per_s <= 0 or not device.flops_per_s:
        raise ConfigError(
            f"device {device.name} has no flops_per_s or no memory_bytes_per_s, so times cannot be estimated",
            hint="add both to its table in the cluster file, or measure on the device",
        )


def kernel_seconds(device: Device, flops: float, moved_bytes: float, kind: str, dtype: str) -> float:
    """The roofline itself, for one kernel of a kind of `Rule`."""
    share = device.efficiency.get(kind, device.efficiency.get("default", 1.0))
    rates = device.flops_per_s
    peak = rates.get(dtype) or rates.get("float32") or max(rates.values())
    return max(flops / (peak * share), moved_bytes / (device.memory_bytes_per_s * share)) + device.launch_s


def product_flops(graph: OpGraph) -> float:
    """Operations of matrix products, convolutions and attention in a forward and a backward, nothing of which
    is made twice."""
    estimate = _Estimate(graph, Device(name="any", memory_bytes=1))
    products = [_Operands(estimate, op, rule_of(op.target)) for op in graph.ops]
    products = [each for each in products if each.rule.kind in PRODUCTS]
    kernels = ([_Work(each.flops)] + each.backward()[0] + each.backward()[1] for each in products)
    return sum((kernel.flops for works in kernels for kernel in works), 0.0)


UNALIGNED = 0.18
"""Share of a product's rate that is left to GPUs in 16 bits if rows do not begin at multiples of 16 bytes, as
those of GPT-2's 50,257 words: 120 TFLOP/s of 660 measured on an H200, with PyTorch 2.11."""

PRODUCTS = ("matmul", "recurrent", "convolution", "attention")
"""Kinds of ops whose floating-point operations count for how well a device is used."""

WORTH_PADDING = 1000
"""Shorter rows than that are not told of, such as those of a few classes."""

COLUMN_SUMS = 0.27
"""Share of a normalisation's rate that sums over rows reach on GPUs, the gradients of biases: 15 us for 14 MB
measured there."""


@dataclass(frozen=True)
class _Work:
    """What one kernel does: floating-point operations and bytes moved.

    kind: of a `Rule`, where it is not the op's own.  share: of that kind's rate.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kind: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class _Estimate:
    graph: OpGraph
    device: Device

    def op(self, op: Op) -> OpCost:
        rule = VIEW if op.view else rule_of(op.target)
        grads = any(v.needs_grad for v in op.outputs)
        operands = _Operands(self, op, rule)
        saves, extra = operands.kept() if grads else ((), 0)
        input_grad, weight_grad = operands.backward() if grads else ([], [])
        forward = [] if rule.kind == "free" else [operands.forward()]
        order = gradient_order(op, self.graph, self.base, saves) if grads else AT_ONCE
        dtype, kind = op.outputs[0].dtype, "matmul" if rule.kind == "recurrent" else rule.kind
        return OpCost(
            forward_s=self.seconds(forward, kind, dtype),
            input_grad_s=self.seconds(input_grad, kind, dtype),
            weight_grad_s=self.seconds(weight_grad, kind, dtype),
            saves=saves,
            extra_saved_bytes=extra,
            transient_bytes=operands.scratch(),
            grad_transient_bytes=operands.grad_scratch() if grads else 0,
            passes=operands.passed() if grads else (),
            **order._asdict(),
        )

    def seconds(self, works: list[_Work], kind: str, dtype: str) -> float:
        def of(work: _Work) -> float:
            flops, moved = work.flops / work.share, work.bytes / work.share
            return kernel_seconds(self.device, flops, moved, work.kind or kind, dtype)

        return sum(map(of, works), 0.0)

    @cached_property
    def base(self) -> dict[str, str]:
        return storages(self.graph)

    @cached_property
    def state(self) -> frozenset[str]:
        return made_of_state(self.graph)


@dataclass(frozen=True)
class _Operands:
    of: _Estimate
    op: Op
    rule: Rule

    @cached_property
    def values(self) -> list[Value]:
        return [self.of.graph.value[name] for name in self.op.inputs]

    @cached_property
    def params(self) -> list[Parameter]:
        return [self.of.graph.parameter[name] for name in self.op.params]

    @cached_property
    def flops(self) -> int:
        shapes = [v.shape for v in self.values] + [p.shape for p in self.params]
        out = self.op.outputs[0].shape
        name = base_name(self.op.target)
        if not shapes:
            return 0
        if name == "einsum":
            return einsum_flops(shapes, self.op.attributes)
        if self.rule.kind == "matmul":
            return matmul_flops(name, shapes, out)
        if self.rule.kind == "recurrent":
            return recurrent_flops(shapes, [p.shape for p in self.params])
        if self.rule.kind == "convolution":
            return convolution_flops(name, shapes, out)
        if self.rule.kind == "attention":
            # On the CPU a causal mask saved nothing up to 512 tokens, and a quarter at 1024 (measured).
            return attention_flops(shapes, out, "" if self.on_cpu else self.op.attributes)
        return prod(out)

    def forward(self) -> _Work:
        """A table that is looked up is not read whole: its rows are as long as the result."""
        looked_up = base_name(self.op.target) in ("embedding", "index", "index_select", "gather")
        written = self.op.output_bytes
        read = written if looked_up else sum(v.bytes for v in self.values) + sum(p.bytes for p in self.params)
        return _Work(self.flops, read + written, share=self._product_share)

    def backward(self) -> tuple[list[_Work], list[_Work]]:
        """(gradients of values, gradients of parameters); of products a kernel for each, else one for all."""
        arriving = sum(v.bytes for v in self.op.outputs if v.needs_grad)
        operands = [(v.shape, v.bytes, v.name in self.of.state) for v in self.values if v.needs_grad]
        operands += [(p.shape, p.bytes, True) for p in self.params if p.trainable]
        found: tuple[list[_Work], list[_Work]] = [], []
        for shape, size, learns in operands:
            if (work := self._gradient(shape, size, arriving)) is not None:
                found[learns].append(work)
        if self.rule.kind == "attention" and found[False]:
            found[False][:] = [_Work(2.5 * self.flops, 2 * self.forward().bytes)]
        if self.rule.kind == "recurrent":
            for works in found:
                works[:] = [_Work(self.flops, sum(w.bytes for w in works))] if works else []
        elif self.rule.kind not in ("matmul", "convolution"):
            for works in found:
                works[:] = [_Work(sum(w.flops for w in works), sum(w.bytes for w in works))] if works else []
        return found

    @property
    def odd_widths(self) -> set[int]:
        """Of a product the lengths of rows that do not lie as a GPU's matrix units read them."""
        if self.rule.kind != "matmul" or self.on_cpu:
            return set()
        tensors: tuple[Value | Parameter, ...] = (*self.values, *self.op.outputs, *self.params)
        halves = [t.shape for t in tensors if t.dtype in ("bfloat16", "float16")]
        return {shape[-1] for shape in halves if len(shape) > 1 and shape[-1] % 8}

    @property
    def _product_share(self) -> float:
        return UNALIGNED if self.odd_widths else 1.0

    def _passes(self, shape: tuple[int, ...]) -> bool:
        """Whether the gradient of an operand of this shape is that of the output."""
        out = self.op.outputs[0].shape
        if self.rule.kind == "free":
            return len(self.op.outputs) == 1 and prod(shape) == prod(out)
        return self.rule.passes and prod(shape) == prod(out)

    def passed(self) -> tuple[str, ...]:
        """The inputs whose gradient is the output's own."""
        output_dtype = self.op.outputs[0].dtype
        values = [(v.name, v.shape, v.dtype) for v in self.values if v.needs_grad]
        values += [(p.name, p.shape, p.dtype) for p in self.params if p.trainable]
        return tuple(name for name, shape, dtype in values if dtype == output_dtype and self._passes(shape))

    def _gradient(self, shape: tuple[int, ...], size: int, arriving: int) -> _Work | None:
        """The gradient of one operand; None if it is that of the output."""
        if self._passes(shape) and size == self.op.outputs[0].bytes:  # that of a cast is cast back
            return None
        if self.rule.kind == "free":
            return _Work(0, size + arriving)
        if self.rule.kind == "matmul" and len(shape) == 1 and not self.on_cpu:  # a bias
            return _Work(0, arriving + size, "normalisation", COLUMN_SUMS)
        product = self.rule.kind in ("matmul", "convolution") and len(shape) > 1
        kept = sum(v.bytes for v in self.values) if self.rule.keeps != "nothing" else 0
        return _Work(self.flops if product else 0, arriving + kept + size, share=self._product_share)

    def kept(self) -> tuple[tuple[str, ...], int]:
        """(values that the backward needs, by the storage they live in; bytes of what else it keeps)."""
        names = dict.fromkeys(self.of.base[name] for name in self._kept_names() if name not in self.of.state)
        return tuple(names), self._extra_bytes()

    def _kept_names(self) -> list[str]:
        op, keeps = self.op, self.rule.keeps
        if keeps == "input":
            return list(op.inputs[:1])
        if keeps == "inputs":
            return list(op.inputs)
        if keeps == "output":
            return [op.outputs[0].name]
        if keeps == "divisor":
            return [*op.inputs[-1:], *(op.inputs if self._learns(op.inputs[-1:]) else ())]
        if keeps == "indices":
            return self._names(floating=False) + [v.name for v in op.outputs if not _is_floating(v)]
        if keeps == "queries":
            if self.unfused:
                return [] if self._copies_values else [self.values[2].name]
            return [*self._names(floating=True), op.outputs[0].name]
        if keeps == "factors":
            factors = op.inputs if self.rule.kind == "elementwise" else self._names(floating=True)
            return [name for name in factors if self._another_learns(name)]
        return []

    def _names(self, *, floating: bool) -> list[str]:
        return [v.name for v in self.values if _is_floating(v) == floating]

    def _learns(self, names: tuple[str, ...]) -> bool:
        return any(self.of.graph.value[name].needs_grad for name in names)

    def _another_learns(self, name: str) -> bool:
        """Whether a gradient flows to a factor besides `name`, or to its second copy; biases do not count."""
        weights = any(p.trainable and len(p.shape) > 1 for p in self.params)
        scales = self.rule.kind == "elementwise" and any(p.trainable for p in self.params)
        others = tuple(other for other in self.op.inputs if other != name)
        distinct = len(self.op.inputs) + len(self.op.params) + len(self.op.buffers)
        twice = self.op.attributes.split("{")[0].count("%") > distinct
        return weights or scales or self._learns(others) or (twice and self._learns((name,)))

    @property
    def _first(self) -> Value:
        """The first input that has numbers to differentiate; the output if there is none."""
        return next((v for v in self.values if _is_floating(v)), self.op.outputs[0])

    def _extra_bytes(self) -> int:
        out = self.op.outputs[0]
        first = self._first
        rows = prod(first.shape[:-1])
        channels = first.shape[1] if len(first.shape) > 1 else 1
        gates = sum(p.shape[0] for p in self.params if len(p.shape) > 1)
        return {
            "nothing": 0,
            "mask": prod(out.shape),
            "noise": out.bytes,
            "statistics": 2 * rows * DTYPE_BYTES["float32"],
            "channel statistics": 2 * channels * DTYPE_BYTES["float32"],
            "positions": tensor_bytes(out.shape, "int64"),
            "places": tensor_bytes(out.shape, "int64") if all(map(_is_floating, self.op.outputs)) else 0,
            "probabilities": first.bytes + DTYPE_BYTES["float32"],
            "gates": tensor_bytes((rows, gates), out.dtype),
            "attention": self._attention_bytes() if self.rule.kind == "attention" else 0,
        }[self.rule.extra]

    @property
    def unfused(self) -> bool:
        """Whether attention runs as separate products: on the CPU with dropout or a mask that learns."""
        learns = any(v.needs_grad for v in self.values[3:])
        return self.on_cpu and (self.op.random or learns)

    @property
    def on_cpu(self) -> bool:
        return is_cpu(self.of.device.name)

    @property
    def _copies_values(self) -> bool:
        """Whether attention in separate products copies V: if batch and heads do not lie together."""
        values = self.values[min(2, len(self.values) - 1)]
        order = values.order or tuple(range(len(values.shape)))
        places = [order.index(d) for d in range(len(order) - 2) if values.shape[d] > 1]
        together = all(b == a + 1 for a, b in pairwise(places))
        return len(self.values) < 3 or not together

    @cached_property
    def _scores(self) -> Value:
        return attention_scores(self.op, self.of.graph)

    def _attention_bytes(self) -> int:
        """Fused: a float32 per row, and a boolean mask as numbers. Else copies of Q and K, of V if it has to
        be copied, and what softmax and dropout make of the scores."""
        query = self.values[0]
        if self.unfused:
            copies = sum(v.bytes for v in self.values[: 3 if self._copies_values else 2])
            dropped = self._scores.bytes + prod(self._scores.shape) if self.op.random else 0
            return copies + self._scores.bytes + dropped
        masks = sum(tensor_bytes(v.shape, query.dtype) for v in self.values[3:] if v.dtype == "bool")
        return tensor_bytes(query.shape[:-1], "float32") + masks

    def scratch(self) -> int:
        """Scratch of the forward: of attention in separate products the scores twice, before the values are
        copied and multiplied."""
        if self.rule.kind != "attention" or not self.unfused:
            return 0
        return max(
            0, self._scores.bytes - self.values[min(2, len(self.values) - 1)].bytes - self.op.output_bytes
        )

    def grad_scratch(self) -> int:
        """Scratch of the backward: by rule, and where a gradient is summed over broadcast dimensions."""
        out = self.op.outputs[0]
        by_rule = int(self.rule.scratch * self._first.bytes)
        learning = [v.shape for v in self.values if v.needs_grad]
        learning += [p.shape for p in self.params if p.trainable]
        summed = (
            self.rule.kind == "elementwise"
            and self.rule.keeps in ("factors", "divisor")
            and any(shape != out.shape for shape in learning)
        )
        scores_bytes = self._scores.bytes if self.rule.kind == "attention" and self.unfused else 0
        return max(by_rule, out.bytes if summed else 0, scores_bytes)


def _is_floating(value: Value) -> bool:
    return "float" in value.dtype or "complex" in value.dtype

"""OpGraph: the captured forward pass, from batch to loss, as data.

An `Op` is one functional ATen call of the forward graph (with the `getitem`s that unpack it). It reads
values, parameters and buffers by name, and makes values. Ops are listed in a topological order.
Parameters and buffers keep the fully qualified names (FQNs) of the user's module; a tied parameter
appears once, with its other names as aliases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from .errors import CaptureError

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor.

    >>> tensor_bytes((4, 128), "bfloat16")
    1024

    Raises: CaptureError for another dtype than those of `DTYPE_BYTES`.
    """
    if dtype not in DTYPE_BYTES:
        raise CaptureError(
            f"a tensor {list(shape)} is {dtype}, and pipeloom does not know the bytes of that dtype",
            hint=f"use one of {', '.join(DTYPE_BYTES)}",
        )
    return prod(shape) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor made by an op, or an input of the batch.

    `needs_grad`: a gradient of the loss with respect to this value flows in the backward pass.
    `order`: its dimensions as they lie in memory, the one of the largest steps first; () if as they are
    numbered. A value that crosses to another stage, and its gradient, lie there so, too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool = False
    order: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class UpdateBytes:
    """What an optimizer takes for one parameter.

    state: bytes that it keeps.  step: scratch of an update.
    together: it is updated at once with others (`foreach`), so that their scratch adds up.
    master: of a copy of the parameter in a higher precision, in which its gradients are summed and it is
        updated; 0 if there is none.
    """

    state: int
    step: int
    together: bool = False
    master: int = 0


def step_bytes(updates: Iterable[UpdateBytes]) -> int:
    """Scratch of one step of an optimizer.

    >>> one, two = UpdateBytes(state=0, step=8), UpdateBytes(state=0, step=6)
    >>> step_bytes([one, two]), step_bytes([replace(one, together=True), replace(two, together=True)])
    (8, 14)
    """
    alone, together = 0, 0
    for update in updates:
        if update.together:
            together += update.step
        else:
            alone = max(alone, update.step)
    return max(alone, together)


@dataclass(frozen=True, kw_only=True)
class PartRows:
    """Rows [start, stop) of a parameter that has `of` rows, by its FQN."""

    whole: str
    start: int
    stop: int
    of: int


LOWER_PRECISION = ("bfloat16", "float16")
"""Dtypes of parameters that have masters where these are asked for, in float32."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter under its first FQN; `aliases` are the other names of a tied one.

    trainable: it requires a gradient, and one of the loss reaches it.
    given_update: what the job's optimizer takes for it; None if no optimizer is known.
    rows: of the model's own parameter, where this is a part of one: it is called `lm_head.weight[0:16000]`
        then, and its aliases are those of the whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    given_update: UpdateBytes | None = None
    rows: PartRows | None = None

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)

    @property
    def kept_bytes(self) -> int:
        """With its master."""
        return self.bytes + self.update.master

    @property
    def gradient_bytes(self) -> int:
        return self.update.master or self.bytes

    @property
    def own_name(self) -> str:
        """The name that it, or what it is a part of, has in the user's model."""
        return self.name if self.rows is None else self.rows.whole

    @property
    def update(self) -> UpdateBytes:
        """What the optimizer takes for it; if none is known, the state of Adam and one copy as scratch."""
        return self.given_update or UpdateBytes(state=2 * self.bytes, step=self.bytes)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer by FQN. One that is not persistent is rebuilt, never checkpointed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One call of the forward graph.

    inputs: names of the values it reads, each once, in order of first use.
    params, buffers: FQNs it reads.  updates: FQNs of buffers whose next state it makes.
    attributes: the call's other arguments as text; with `target` and the shapes of what it reads this
        makes the signature by which equal ops are measured once.
    module: FQN of the innermost user module that it comes from, "" at the top.
    random: draws random numbers.  view: its output shares its input's storage.
    cheap: deterministic, reads no parameter, needs no gradient and costs little: it may be cloned into
        each stage that uses it, so that its output is never sent.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    attributes: str = ""
    module: str = ""
    random: bool = False
    view: bool = False
    cheap: bool = False

    @property
    def output_bytes(self) -> int:
        return sum(v.bytes for v in self.outputs)


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """A whole forward pass: batch inputs -> ops -> loss. Immutable; `to_json` serialises it."""

    name: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    loss: str
    fallback: str = field(default="")
    """Why export failed, when the ops are whole modules instead of ATen calls; else empty."""
    whole: tuple[tuple[str, ...], ...] = ()
    """Ops that no planner separates, group by group: a module's, where cuts are between whole modules."""

    @cached_property
    def op(self) -> Mapping[str, Op]:
        """Op by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def value(self) -> Mapping[str, Value]:
        """Value by name, batch inputs included."""
        made = {v.name: v for op in self.ops for v in op.outputs}
        return {v.name: v for v in self.inputs} | made

    @cached_property
    def producer(self) -> Mapping[str, str]:
        """Value name -> name of the op that makes it. Batch inputs have none."""
        return {v.name: op.name for op in self.ops for v in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """Value name -> names of the ops that read it."""
        users: dict[str, list[str]] = {name: [] for name in self.value}
        for op in self.ops:
            for name in op.inputs:
                users[name].append(op.name)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def together(self) -> Mapping[str, tuple[str, ...]]:
        """Buffer that the forward updates -> the ops that read or update it, which no cut may separate.

        The next micro-batch must see the update, and could not if another stage had made it. An op that only
        counts, as of batches seen, goes with the next op of its module: in evaluation mode it is not there,
        and a stage of nothing else would have nothing to do.
        """
        users: dict[str, list[str]] = {}
        read = {name for op in self.ops for name in op.inputs}
        for at, op in enumerate(self.ops):
            counts = op.updates and not any(value.name in read for value in op.outputs)
            later = (o.name for o in self.ops[at + 1 :] if o.module == op.module and not o.cheap)
            beside = next(later, None) if counts else None
            for name in dict.fromkeys((*op.buffers, *op.updates)):
                users.setdefault(name, []).append(op.name)
                if beside is not None:
                    users[name].append(beside)
        updated = {name for op in self.ops for name in op.updates}
        return {name: tuple(dict.fromkeys(ops)) for name, ops in users.items() if name in updated}

    @cached_property
    def parameter(self) -> Mapping[str, Parameter]:
        return {p.name: p for p in self.parameters}

    @cached_property
    def rows(self) -> Mapping[str, PartRows]:
        """Part of a parameter -> the rows that it holds."""
        return {p.name: p.rows for p in self.parameters if p.rows is not None}

    def with_updates(self, updates: Mapping[str, UpdateBytes]) -> OpGraph:
        """The graph with what an optimizer takes for its parameters, by FQN."""
        known = tuple(replace(p, given_update=updates.get(p.name, p.given_update)) for p in self.parameters)
        return replace(self, parameters=known)

    @property
    def state_ratio(self) -> float:
        """Bytes of optimizer state per byte of gradients, over the whole model."""
        trained = [p for p in self.parameters if p.trainable]
        return sum(p.update.state for p in trained) / max(1, sum(p.gradient_bytes for p in trained))

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the structure (ops, wiring, parameters), independent of the batch's size.

        A plan carries it, so that a plan made for another model is refused.
        """
        h = hashlib.sha256()
        for op in self.ops:
            outputs = tuple(v.name for v in op.outputs)
            h.update(repr((op.name, op.target, op.inputs, outputs, op.params, op.buffers)).encode())
        for p in self.parameters:
            h.update(repr((p.name, p.shape, p.trainable)).encode())
        return h.hexdigest()[:16]


CAST = "aten._to_copy.default"
"""`Op.target` of a change of dtype."""


def storages(graph: OpGraph) -> dict[str, str]:
    """Value -> the value whose storage it shares in the end: itself, unless a view made it."""
    base = {value.name: value.name for value in graph.inputs}
    for op in graph.ops:  # in order, so what an op reads is there already
        parent = op.inputs[0] if op.view and op.inputs else None  # views of a parameter have none
        for value in op.outputs:
            base[value.name] = value.name if parent is None else base[parent]
    return base


def made_of_state(graph: OpGraph) -> frozenset[str]:
    """Values that are views or casts of parameters and buffers: a backward makes them anew of these."""
    held = storages(graph)
    updated = {fqn for op in graph.ops for fqn in op.updates}
    casts = {op.name for op in graph.ops if op.target == CAST and not updated.intersection(op.buffers)}
    roots = {
        v.name for op in graph.ops if not op.inputs and (op.view or op.name in casts) for v in op.outputs
    }
    return frozenset(name for name, base in held.items() if base in roots)

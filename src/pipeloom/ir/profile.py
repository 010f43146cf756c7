"""Profile: what each op costs on one kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .graph import Value


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """Costs of one op for one micro-batch. Times in seconds, sizes in bytes.

    input_grad_s, weight_grad_s: the two parts of the backward pass (zero where no gradient flows).
    saves: names of the values (its inputs or outputs) that autograd keeps for its backward, views
        named by the value whose storage they share; a value kept by several ops is stored once.
    extra_saved_bytes: kept for backward and neither an input nor an output (softmax statistics, masks).
    transient_bytes: most bytes of scratch memory alive at once while it runs, outputs not counted.
    grad_transient_bytes: the same of its backward, gradients not counted.
    passes: names of the inputs whose gradient is that of the output itself, and no new tensor.
    adds: names of the parameters whose gradient is a matrix product, which is added to their sum while it is
        made: no new tensor.
    lets_go: of `saves`, one that its backward is done with before it makes the rest of the gradients; "" if
        there is none.  grad_first_bytes: most bytes that it has made at once until then.  grad_rest_bytes:
        the same afterwards, all gradients that are still there counted; 0 if it makes them all at once.
    """

    forward_s: float
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    saves: tuple[str, ...] = ()
    extra_saved_bytes: int = 0
    transient_bytes: int = 0
    grad_transient_bytes: int = 0
    passes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    lets_go: str = ""
    grad_first_bytes: int = 0
    grad_rest_bytes: int = 0

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    def scaled(self, forward: float, backward: float) -> OpCost:
        """The same with other times.

        >>> half = OpCost(forward_s=2.0, input_grad_s=1.0, weight_grad_s=4.0).scaled(0.5, 0.75)
        >>> half.forward_s, half.input_grad_s, half.weight_grad_s
        (1.0, 0.75, 3.0)
        """
        return replace(
            self,
            forward_s=self.forward_s * forward,
            input_grad_s=self.input_grad_s * backward,
            weight_grad_s=self.weight_grad_s * backward,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of every op of one graph on one device.

    source: "measured" or "roofline".  graph: fingerprint of the OpGraph that was profiled.
    batch: shapes of the batch inputs, "name[shape]dtype" each, for which the costs hold.
    notes: what a reader of the costs should know, such as ops that were only guessed.
    compiled: of costs of functions that torch.compile made, how they compare with those of eager ops; else
        empty.
    """

    device: str
    source: str
    graph: str
    batch: tuple[str, ...]
    costs: Mapping[str, OpCost]
    notes: tuple[str, ...] = ()
    compiled: str = ""


def batch_text(inputs: Iterable[Value]) -> tuple[str, ...]:
    """The shapes of a batch's inputs as `Profile.batch` has them.

    >>> batch_text([Value(name="ids", shape=(4, 128), dtype="int64")])
    ('ids[4,128]int64',)
    """
    return tuple(f"{v.name}[{','.join(map(str, v.shape))}]{v.dtype}" for v in inputs)

"""In which order a backward makes gradients, and what it is done with in between.

Autograd makes the gradients of an op's operands one after another. That of the last factor of a product comes
first; once it is there, the first factor is read no more, and is gone before the other gradient is made:

    x * y     g * x, without x g * y; then both are summed over broadcast dimensions
    x @ y     x.T @ g, which becomes part of the sum at once if y is a parameter; without x g @ y.T
    x / y     x / y, without x (x / y) / y, -g, their product, g / y
    x ** n    x ** (n - 1), without x n * x ** (n - 1), g times that; and rsqrt with its result for x

Attention in separate products makes the gradients of the values and of what softmax made; without the values
and the first of these that of the scores; what comes then needs less.

A product with a bias makes that of its first factor first: then all gradients are there at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..ir.graph import Op, OpGraph, Parameter, Value
from .rules import RULES, base_name


class GradientOrder(NamedTuple):
    """These fields of `ir.profile.OpCost`."""

    lets_go: str = ""
    grad_first_bytes: int = 0
    grad_rest_bytes: int = 0
    adds: tuple[str, ...] = ()


AT_ONCE = GradientOrder()


def gradient_order(op: Op, graph: OpGraph, base: Mapping[str, str], saves: Sequence[str]) -> GradientOrder:
    """The order in the backward of an op through which gradients flow.

    base: value -> the one whose storage it shares.  saves: storages that the op keeps.
    """
    rule = RULES.get(base_name(op.target))
    if op.view or rule is None:
        return AT_ONCE
    adds = _added(op, graph)
    if rule.order == "at once":
        return GradientOrder(adds=adds)
    size = op.outputs[0].bytes
    if rule.order == "scores":
        return _attention(op, graph) if op.outputs[0].name not in saves else AT_ONCE
    if rule.order == "power":
        return GradientOrder(saves[0], size, 2 * size) if len(saves) == 1 else AT_ONCE
    factors = _factors(op, graph)
    if len(factors) != 2 or isinstance(factors[0], Parameter):
        return GradientOrder(adds=adds)
    kept, last = base[factors[0].name], factors[1]
    lets_go = kept if kept in saves and kept != base.get(last.name) else ""
    if rule.kind == "matmul":
        batch, other = factors[0].shape[:-2], last.shape[:-2]
        if len(factors[0].shape) < 2 or len(last.shape) < 2 or other not in ((), batch):
            return AT_ONCE
        if adds:
            return GradientOrder(lets_go, 0, factors[0].bytes, adds)
        return GradientOrder(lets_go, last.bytes, factors[0].bytes + (0 if op.params else last.bytes))
    if op.params:  # which of the two is the first is not known
        return AT_ONCE
    return GradientOrder(lets_go, size, (3 if rule.order == "divisor" else 2) * size)


def _added(op: Op, graph: OpGraph) -> tuple[str, ...]:
    """The matrices whose gradient is the product of two others, in their own precision."""
    if base_name(op.target) not in ("linear", "mm", "matmul", "addmm"):
        return ()
    params = [graph.parameter[name] for name in op.params]
    return tuple(
        p.name for p in params if p.trainable and len(p.shape) == 2 and p.dtype == op.outputs[0].dtype
    )


def attention_scores(op: Op, graph: OpGraph) -> Value:
    """What attention applies softmax to: a number per query and key."""
    query, key = graph.value[op.inputs[0]], graph.value[op.inputs[min(1, len(op.inputs) - 1)]]
    return Value(name="scores", shape=(*query.shape[:-1], key.shape[-2]), dtype=query.dtype)


def _attention(op: Op, graph: OpGraph) -> GradientOrder:
    """Attention in separate products, which saves only copies of its own."""
    operands = [graph.value[name] for name in op.inputs[:3]]
    if len(operands) < 3 or not all(v.needs_grad for v in operands):
        return AT_ONCE
    size = attention_scores(op, graph).bytes
    return GradientOrder("", operands[2].bytes + size, 2 * size)


def _factors(op: Op, graph: OpGraph) -> tuple[Value | Parameter, ...]:
    """The operands in their order, if gradients of the result's precision flow to all of them; else none."""
    values = tuple(graph.value[name] for name in op.inputs)
    params = tuple(graph.parameter[name] for name in op.params)
    factors: tuple[Value | Parameter, ...] = (*values, *params)
    learn = all(v.needs_grad for v in values) and all(p.trainable for p in params)
    alike = all(factor.dtype == op.outputs[0].dtype for factor in factors)
    places = op.attributes.split("{")[0].count("%")
    return factors if learn and alike and places in (0, len(factors)) else ()

"""A bound below every plan's step: the gap that a search prints is to this."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ...schedules import registry
from ..request import Request, profile_of


def bound_s(request: Request, names: Iterable[str]) -> float:
    """No step is shorter: the work of all ranks together; the largest op, of which two ranks may have
    replicas, for all micro-batches; where the pipeline drains, the longest path of one micro-batch."""
    graph = request.graph
    costs = [profile_of(request.profile, d.name, graph).costs for d in request.cluster.devices]
    ops = [op.name for op in graph.ops if not op.cheap]
    kinds = list({id(cost): cost for cost in costs}.values())
    seconds = {id(own): [own[name].forward_s + own[name].backward_s for name in ops] for own in kinds}
    directions = 2 if any(registry.entry(name).place == "both ways" for name in names) else 1
    # Rank r needs W(r) for a whole micro-batch and t(o, r) for op o. Of op o in all n = `microbatches`
    # of a step of T seconds it does the share x(o, r); the shares of an op add up to 1:
    #
    #     T >= n sum_o x(o, r) t(o, r);   over W(r), and summed over the ranks:
    #     T sum_r 1 / W(r) >= n sum_o sum_r x(o, r) t(o, r) / W(r) >= n sum_o min_r t(o, r) / W(r)
    #
    # The sum on the right is 1 if devices differ by one factor in all ops.
    whole = {key: sum(own) for key, own in seconds.items()}
    rate = sum(1 / whole[id(own)] if whole[id(own)] else inf for own in costs)
    shares = [[s / whole[key] for s in own] for key, own in seconds.items() if whole[key]]
    work = sum(map(min, zip(*shares, strict=True)))
    least = [min(each) for each in zip(*seconds.values(), strict=True)]
    path: dict[str, float] = {}
    for name in ops:
        before = (path.get(graph.producer.get(value, ""), 0.0) for value in graph.op[name].inputs)
        path[name] = max(before, default=0.0) + min(
            own[name].forward_s + own[name].input_grad_s for own in kinds
        )
    most, count = max(least, default=0.0), request.microbatches
    longest = max(path.values(), default=0.0) if request.updates is None else 0.0
    return max(count * work / rate if rate < inf else 0.0, most * count / directions, longest)

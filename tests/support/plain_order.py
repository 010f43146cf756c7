"""A plain list scheduler to compare the library's with: it looks at everything at every moment.

Stages are a chain. An idle rank takes the smallest key among what it could run; a forward takes a place of
its rank, and the last part of the backward (B or W) gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from pipeloom.ir.action import Action, F, I, Kind, W


def plain_order(
    placement: Sequence[int],
    microbatches: int,
    kinds: str,
    key: Callable[[Action], object],
    may_open: Callable[[Action, Sequence[int]], bool],
    seconds: dict[Kind, float],
) -> tuple[float, list[int]]:
    """When the last rank ends, and the most places that each rank has taken.

    may_open: whether a forward may run, from the open micro-batches of each stage.
    Raises: RuntimeError if nothing can run any more.
    """
    ranks, last = range(max(placement) + 1), len(placement) - 1
    back, closes = Kind(kinds[1]), Kind(kinds[-1])
    todo = [
        {Action(s, Kind(k), b) for s in own for k in kinds for b in range(microbatches)}
        for own in ([s for s, at in enumerate(placement) if at == r] for r in ranks)
    ]
    end: dict[Action, float] = {}
    free = [0.0 for _ in ranks]
    taken = [0] * len(placement)
    most = [0 for _ in ranks]
    moments, closing = [0.0], list[tuple[float, int]]()

    def needs(a: Action) -> list[Action]:
        if a.kind == F:
            return [Action(a.stage - 1, F, a.microbatch)] if a.stage else []
        if a.kind == W:
            return [Action(a.stage, I, a.microbatch)]
        behind = [Action(a.stage + 1, back, a.microbatch)] if a.stage < last else []
        return [Action(a.stage, F, a.microbatch), *behind]

    def could(a: Action, now: float) -> bool:
        return all(end.get(n, now + 1) <= now for n in needs(a)) and (a.kind != F or may_open(a, taken))

    while moments:
        now = heappop(moments)
        for entry in [entry for entry in closing if entry[0] <= now]:
            closing.remove(entry)
            taken[entry[1]] -= 1
        for rank in ranks:
            ready = [a for a in todo[rank] if could(a, now)] if free[rank] <= now else []
            if ready:
                chosen = min(ready, key=key)  # type: ignore[arg-type, return-value]
                todo[rank].remove(chosen)
                free[rank] = end[chosen] = now + seconds[chosen.kind]
                moments.append(free[rank])
                heapify(moments)
                if chosen.kind == F:
                    taken[chosen.stage] += 1
                    held = sum(n for s, n in enumerate(taken) if placement[s] == rank)
                    most[rank] = max(most[rank], held)
                if chosen.kind == closes:
                    heappush(closing, (free[rank], chosen.stage))
    if any(todo):
        raise RuntimeError(f"nothing can run any more: {[len(row) for row in todo]} actions are left")
    return max(end.values()), most

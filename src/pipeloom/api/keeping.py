"""Plans that are checked before they are given out.

Planners weigh stages by a table of what each kind of op keeps and needs. Stages run as graphs that are traced
from them, and those have the last word: a rank whose stages pass its cap is refused. So the stages of a plan
are traced first (`traced.py`), and where one passes its cap, planning goes on under a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError
from ..ir.plan import Plan
from ..ir.units import format_bytes

TRIES = 7
"""Plans that are made at most, all but the first under lower caps."""

FAR_BELOW = 0.25
"""Plans that hold no more than this share of each cap are not traced. Stages with ops that the table does not
know, such as `lstm`, were found to hold 2.5 times what was planned."""


def keeping_caps(
    make: Callable[[Cluster], Plan], cluster: Cluster, traced: Callable[[Plan], Sequence[int]]
) -> Plan:
    """The first plan whose traced stages keep the devices' memory.

    make: plans under the memory of a cluster.  traced: bytes that each rank of a plan holds.
    Raises: as `make` under the true caps; InfeasibleError if no plan was found whose traced stages keep them.
    """
    caps = [device.memory_bytes for device in cluster.devices]
    tighter = list(caps)
    first: tuple[int, ...] = ()
    for _ in range(TRIES):
        devices = [replace(d, memory_bytes=cap) for d, cap in zip(cluster.devices, tighter, strict=True)]
        try:
            plan = make(replace(cluster, devices=tuple(devices)))
        except InfeasibleError:
            if not first:
                raise
            break
        plan = replace(plan, caps=tuple(caps[: len(plan.caps)]))
        held = _held(plan, traced)
        first = first or held
        over = [rank for rank, size in enumerate(held) if size > caps[rank]]
        if not over:
            return plan
        for rank in over:
            unseen = held[rank] - plan.peaks[rank]
            tighter[rank] = max(1, min(tighter[rank] - 1, caps[rank] - unseen))
    rank, most = max(enumerate(first), key=lambda pair: pair[1] - caps[pair[0]])
    raise InfeasibleError(
        f"as planned, all fits, but rank {rank} holds {format_bytes(most)} when its stage is traced, and its "
        f"device's cap is {format_bytes(caps[rank])}; planning for less found no plan that keeps it"
    )


def _held(plan: Plan, traced: Callable[[Plan], Sequence[int]]) -> tuple[int, ...]:
    """What is planned, where that is far below the caps."""
    far = all(peak <= FAR_BELOW * cap for peak, cap in zip(plan.peaks, plan.caps, strict=True))
    return plan.peaks if far else tuple(traced(plan))

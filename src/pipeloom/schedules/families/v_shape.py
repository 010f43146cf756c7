"""V schedules: two chunks per rank, placed there and back, so that every rank holds equally much.

All are one recipe: a clock in which a micro-batch travels at some pace, and a memory limit. The slower the
pace, the more is held and the fewer bubbles there are. Each works for any placement, DAG and times.

Sources: ZB-V in arXiv 2401.10241; V-Half, V-Min and 1F1B-V in arXiv 2405.15362. Peaks in micro-batches for p
ranks: ZB-V p, V-Half p // 2 + 1, V-Min (p + 4) // 3, 1F1B-V the next above 2p / 3.

Blocks are for any times: one period of each rank, without a gap, that repeats.
A rank of a V runs six actions per micro-batch: F and I and W of two chunks. In the steady state it repeats
them in some cyclic order, shifted in time from rank to rank. Order and shift decide how long a micro-batch
takes from rank to rank, so how long residuals live, so how much is held; a gap is never needed as long as
the memory suffices. The best orders are a shortest path over the ranks: a state is one of the 5! cyclic
orders, an edge is the shift that makes one of the four hops between two ranks as short as it can be.

Published blocks (arXiv 2405.15362) are for F = I = W; there they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...ir.action import Action, F, I, Kind, W
from ...ir.columns import Floats
from ..language.placements import wave
from ..language.recipe import Recipe, timings
from ..language.shape import Periodic, Shape, options, path_clock
from ..list_scheduler.choose import as_published
from ..list_scheduler.tables import EPS

Pace: TypeAlias = tuple[str, tuple[float, ...], tuple[float, ...], tuple[float, float, float]]
"""Which forwards may run early, and the forward, backward and turns of `path_clock`."""


def recipes(s: Shape, memory: float, paces: Sequence[Pace], **rules: str) -> list[Recipe]:
    """A recipe for each pace; with uneven times also one with slots as long as the actions. Unless the family
    has a rule for W: first of all a block made for these times, and W that keeps to its place in the order
    until the drain."""
    memory = options(s, memory=memory)["memory"]
    candidates: list[Recipe] = []
    tuned = not s.even and "fill" not in rules
    block = block_clock(s, memory) if tuned else None
    if block is not None:
        tuned_recipe = Recipe(kinds="FIW", clock=block, memory=memory, fill="", drain="W", patience=0.5)
        candidates += [
            tuned_recipe,
            replace(tuned_recipe, early="warm"),
            replace(tuned_recipe, fill="W", overlap=0.5),
        ]
    for early, forward, backward, turns in paces:
        for real in (False,) if s.even or block is not None else (False, True):
            clock = path_clock(s, forward, backward, turns=turns, real=real)
            recipe = Recipe(kinds="FIW", clock=clock, memory=memory, early=early, **rules)  # type: ignore[arg-type]
            candidates += timings(s, recipe)
            if tuned:
                placed = clock if real else _w_in_free_slots(s, clock)
                candidates += [
                    replace(recipe, clock=placed, fill="", drain="W", patience=p) for p in (0.5, 1.0)
                ]
                if not real:
                    candidates.append(replace(recipe, clock=placed, patience=1.0))
    return candidates


def _patient(s: Shape, clocks: Sequence[Recipe]) -> list[Recipe]:
    paces = (((1.0, 2.0), (2.0, 1.0), (2.0, 0.0, 2.0)), ((2.0, 1.0), (2.0, 1.0), (0.0, 3.0, 1.0)))
    made = (path_clock(s, forward, backward, turns=turns) for forward, backward, turns in paces)
    patient = [Recipe(kinds="FIW", clock=clock, memory=clocks[0].memory, patience=1.0) for clock in made]
    return [] if s.even else patient


def _w_in_free_slots(s: Shape, clock: Periodic) -> Periodic:
    """A clock of equal slots with each W in the first slot after its I that no F or I of its rank has."""
    period = round(clock.period)
    at: dict[int, float] = {}
    for own in s.rank_stages:
        taken = {round(clock(stage, kind, 0)) % period for stage in own for kind in (F, I)}
        for stage in sorted(own, key=lambda stage: clock(stage, I, 0)):
            free = (round(clock(stage, I, 0)) + 1 + i for i in range(period))
            at[stage] = next((slot for slot in free if slot % period not in taken), clock(stage, W, 0))
            taken.add(round(at[stage]) % period)
    return Periodic({**clock.first, **{(stage, W): slot for stage, slot in at.items()}}, clock.period)


def zb_v(s: Shape) -> list[Recipe]:
    return zb_v_recipes(s, options(s, memory=s.depth)["memory"])


def zb_v_recipes(s: Shape, memory: float) -> list[Recipe]:
    """The pattern of ZB-V; with less memory than it takes, or on another placement, clocks."""
    pattern = Recipe(kinds="FIW", rows=lambda rank: _zb_v_row(s, rank), memory=memory)
    patterns = timings(s, pattern) if all(len(own) == 2 for own in s.rank_stages) else []
    if patterns and not s.even:
        patterns += [replace(pattern, overlap=overlap) for overlap in ((1.0, 0.0), (0.0, 0.75))]
        patterns += [replace(pattern, level=True, overlap=(share, 0.0)) for share in (0.0, 0.1)]
    if patterns and memory >= s.depth:
        return patterns
    clocks = recipes(
        s,
        memory,
        [
            ("warm", (4,), (4,), (0, 0, 2)),
            ("all", (1, 2), (1, 2), (0, 0, 0)),
            ("warm", (2,), (2,), (0, 0, 0)),
        ],
    )
    return [*patterns, *clocks]


def _zb_v_row(s: Shape, rank: int) -> Iterator[Action]:
    """2p - 1 forwards, the later ones in turn from both chunks; then F and I of the second chunk until
    the first I of the first chunk is near; then both chunks in turn. W fills the gaps."""
    first, second = s.rank_stages[rank]
    p, m = s.depth, s.microbatches
    if p < s.ranks:  # ranks side by side: how far the second chunk is from the end, in a V the rank's number
        rank = min(s.ahead[second], p - 1)
    down, up, back, out = (
        iter([Action(c, k, b) for b in range(m)])
        for c, k in ((first, F), (second, F), (second, I), (first, I))
    )
    order = [down] * (2 * (p - rank) - 1) + [up, down] * rank
    order += [up, back] * (p - 1 - rank) + [up, back, down, out] * 2 * m
    return (action for turn in order for action in islice(turn, 1))


def v_half(s: Shape) -> list[Recipe]:
    clocks = recipes(
        s,
        s.depth // 2 + 1,
        [
            ("warm", (1, 2), (2, 1), (2, 0, 2)),
            ("all", (1.5, 2), (1.5, 2), (0, 0, 0)),
            ("all", (2,), (2,), (0, 0, 0)),
            ("none", (2, 1), (2, 1), (0, 3, 1)),
        ],
    )
    return [*clocks, *_patient(s, clocks), *as_published(s, v_half)]


def v_min(s: Shape) -> list[Recipe]:
    rest = 2.0 if s.depth % 3 == 0 else 0.0
    clocks = recipes(
        s,
        (s.depth + 4) // 3,
        [
            ("none", (1,), (1,), (0, rest, 0)),
            ("all", (1,), (1,), (0, rest, 0)),
            ("all", (1, 2), (1, 2), (0, 0, 0)),
        ],
    )
    return [*clocks, *_patient(s, clocks), *as_published(s, v_min)]


def one_f_one_b_v(s: Shape) -> list[Recipe]:
    """1F1B-V: two thirds of the memory of 1F1B; W right after its I, so no gradient waits for its turn."""
    return recipes(
        s,
        -(-2 * s.depth // 3),
        [
            ("all", (1, 2), (2, 1), (0, 0, 0)),
            ("all", (1.5, 2), (1.5, 2), (0, 0, 0)),
            ("all", (2,), (2,), (0, 0, 0)),
            ("warm", (2,), (2,), (0, 0, 0)),
            ("none", (2,), (2,), (0, 0, 0)),
        ],
        fill="",
    )


# A hop is how a micro-batch goes on from one rank to the next. Its wait is the time from the start of its
# action on one rank to the start of the same action on the other: at least the action and its message, and
# beyond that what is left up to the moment that the other rank's cyclic order has for it.
#
#     rank r      |Fd|..|..|..|..|..|Fd|          Fd: F down, at position 0 of its order
#     rank r + 1    shift + |..|..|Fd|            wait = least + (position + shift - least) mod period
#
# So orders and shifts between neighbours decide all waits; whatever they are, no rank has a gap.

ORDERS = np.array([(0, *rest) for rest in permutations(range(1, 6))])
"""All cyclic orders of the six actions: F down, F up, I down, I up, W of I down, W of I up. Down is from the
first rank to the last; the first chunk is run down in the forward and up in the backward."""

SLACK = 1e-7
"""Share of a period by which a hop may seem too short from rounding."""


@dataclass(frozen=True)
class MeanTimes:
    """Mean seconds of F, I, W and a transfer; seconds from one micro-batch to the next; ranks."""

    forward: float
    back: float
    weight: float
    transfer: float
    period: float
    ranks: int

    def wait(self, gap: Floats, least: float) -> Floats:
        """The shortest wait of at least `least` that is `gap` up to whole periods."""
        slack = SLACK * self.period
        return least + np.mod(gap - least + slack, self.period) - slack


def block_clock(s: Shape, memory: float) -> Periodic | None:
    """A clock that repeats the best block; None if it holds more than `memory` micro-batches on a rank, or
    if the shape is no V of a chain."""
    if s.placement != wave(s.ranks) or s.ranks < 2 or len(s.stages.between) != 2 * s.ranks - 1:
        return None
    count = len(s.placement)
    means = [sum(s.seconds(c, k) for c in range(count)) / count for k in (F, I, W)]
    hops = [s.delay_s(a, b) for a, b in s.stages.between]
    transfer = sum(hops) / max(1, sum(hop > 0 for hop in hops))
    forward, back, weight_grad = means
    times = MeanTimes(forward, back, weight_grad, transfer, s.period_s, s.ranks)
    for weight in (1.0, 0.75, 1.25):
        start = _starts(times, weight)
        if _peak(times, start) <= memory + EPS:
            at: dict[tuple[int, Kind], float] = {}
            for rank, (a, b) in enumerate(s.rank_stages):
                actions = ((a, F), (b, F), (b, I), (a, I), (b, W), (a, W))
                at.update(zip(actions, map(float, start[rank]), strict=True))
            return Periodic(at, times.period)
    return None


def _starts(times: MeanTimes, weight: float) -> Floats:
    """[rank, action] when micro-batch 0 runs. weight: of the outer hops (F down, I up) against the inner."""
    seconds = np.array([times.forward] * 2 + [times.back] * 2 + [times.weight] * 2)
    position = np.zeros((len(ORDERS), 6))
    ends = np.cumsum(seconds[ORDERS], axis=1)
    np.put_along_axis(position, ORDERS, ends - seconds[ORDERS], axis=1)
    cost, shift = _hops(times, position, weight)
    path = _path(times, position, cost)
    phase = np.concatenate([[0.0], np.cumsum([shift[a, b] for a, b in zip(path, path[1:], strict=False)])])
    return _unrolled(times, phase[:, None] + position[path])


def _hops(times: MeanTimes, position: Floats, weight: float) -> tuple[Floats, Floats]:
    """[order of a rank, order of the next] the least sum of the four hops between them, and the shift."""
    own, following = position[:, None, :], position[None, :, :]
    sign = np.array([1.0, -1.0, 1.0, -1.0])  # down: to the next rank; up: from it
    gap = sign * (following - own)[..., :4]
    least = np.array([times.forward, times.forward, times.back, times.back]) + times.transfer
    share = np.array([weight, 2 - weight, 2 - weight, weight])
    cost = np.full(gap.shape[:2], np.inf)
    shift = np.zeros_like(cost)
    # As a function of the shift the sum of waits is made of straight pieces with jumps, each jump where one
    # hop waits no longer than it must. So it is least at one of these four shifts.
    for hop in range(4):
        move = sign[hop] * (least[hop] - gap[..., hop])
        hops = [share[h] * times.wait(gap[..., h] + sign[h] * move, float(least[h])) for h in range(4)]
        total = np.sum(hops, axis=0)
        better = total < cost - SLACK * times.period
        cost[better], shift[better] = total[better], move[better]
    return cost, shift


def _path(times: MeanTimes, position: Floats, cost: Floats) -> list[int]:
    """The order of each rank, so that the sum of all hops and turns is least. A late W costs a little."""
    down, up, back_down, back_up, w_down, w_up = position.T
    late = 0.01 * (times.wait(w_down - back_down, times.back) + times.wait(w_up - back_up, times.back))
    # total[o] = least sum of the ranks up to this one, if it has the order o; a step costs 120 x 120 sums.
    total = times.wait(back_down - up, times.forward) + late  # the turn on the first rank
    came: list[NDArray[np.int64]] = []
    for _ in range(times.ranks - 1):
        sums = total[:, None] + cost
        came.append(sums.argmin(axis=0))
        total = sums.min(axis=0) + late
    total = total + times.wait(up - down, times.forward) + times.wait(back_up - back_down, times.back)
    path = [int(total.argmin())]
    for step in reversed(came):
        path.append(int(step[path[-1]]))
    return path[::-1]


def _unrolled(times: MeanTimes, at: Floats) -> Floats:
    """Times within a period -> times of one micro-batch on its way down, up, down and up."""
    ranks, transfer = times.ranks, times.transfer
    found = np.array(at)

    def follow(rank: int, action: int, ready: float) -> float:
        found[rank, action] = ready + times.wait(at[rank, action] - ready, 0.0)
        return float(found[rank, action])

    down, up = range(ranks), range(ranks - 1, -1, -1)
    now = float(at[0, 0])
    for action, way in enumerate((down[1:], up, down, up)):
        turn = times.back if action == 3 else times.forward
        length = times.forward if action < 2 else times.back
        for i, rank in enumerate(way):
            alone = action > 0 and i == 0  # the turn stays on its rank
            now = follow(rank, action, now + (turn if alone else length + transfer))
    for rank in range(ranks):
        for weight, back in ((4, 2), (5, 3)):
            follow(rank, weight, float(found[rank, back]) + times.back)
    return found


def _peak(times: MeanTimes, start: Floats) -> float:
    """Most micro-batches that a rank holds: each chunk counts half, from F to the end of W."""
    # Begun and not ended, one per period since the first F and since the end of the first W. The number rises
    # only where an F begins, so that these moments are enough.
    peak = 0.0
    for own in start:
        for moment in own[:2]:
            begun = np.floor((moment - own[[0, 1]]) / times.period + SLACK)
            ended = np.floor((moment - own[[5, 4]] - times.weight) / times.period + SLACK)
            peak = max(peak, float((begun - ended).sum()) / 2)
    return peak

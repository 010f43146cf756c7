"""The axes of the joint search: each a function from a candidate to what it becomes by moves of one kind.

A new axis is a function and a line of `AXES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import compress, islice

import numpy as np

from ...ir.errors import PlanError, ScheduleError
from ..refusals import scale_caps
from ..request import are_alike
from ..search.problem import Cuts
from ..stage_cost.tensors import Indices
from ..strategies.graphpipe import shallow_cuts
from .estimates import ClosedForm, Estimate, climb, neighbours
from .search import FAR, PROPOSED, Axis, JointSearch, Judged, Point

SIMULATED, BESIDE, EVERY = 3, 5, 130
"""Cuts of one climb that are simulated, and of one move, as estimates are not exact; cuts up to which all
are."""

NEAR = 0.01
"""By which share of the best step the estimate of a moved cut may be longer."""

SLACKS = (1, 2)
"""Micro-batches in flight beyond the depth of a stage that are tried."""

ARRANGED = 24
"""Orders of devices up to which all are tried; of more, those that differ by two devices."""


def moved_cuts(search: JointSearch, line: Judged) -> Iterator[Point]:
    """Cuts moved as long as an estimate by the candidate's own order falls, or so that the fullest rank holds
    less; again from what was found. Where that brings nothing, from the cuts that the search began with, too:
    the order for equal times may have led astray."""
    in_order = not line.point.order and not line.point.search.model.readers.order
    starts = search.level.get(line.point.request.layout, ()) if in_order else ()
    while True:
        if search.cut_times(line.point.request, line.point.search).possible_cuts <= EVERY:
            near = _every(search.estimate_of(line))
        else:
            near = _better(search, line) if line.fits else list(_relieved(line))
        asked = line.point.request.search()  # these cuts may have been given less, others need not be
        free = replace(line.point.search, caps=asked.caps, in_flight=asked.in_flight)
        for cuts in near:
            yield replace(line.point, search=free, cuts=cuts)
        if search.best_of[line.point.way].key >= line.key:
            for cuts in starts:
                yield replace(line.point, search=free, cuts=cuts)
            starts = ()
        best = search.best_of[line.point.way]
        if best.key >= line.key:
            return
        line = best


def _every(estimate: Estimate) -> list[Cuts]:
    """All cuts, the fastest by an estimate first. Those of which it says that a stage does not fit, too: with
    less freed elsewhere, or later in the step, it may."""
    cuts = estimate.cuts.every_cut()
    return [estimate.cuts.cut(cuts[index]) for index in np.argsort(estimate.steps(cuts), kind="stable")]


def _better(search: JointSearch, line: Judged) -> list[Cuts]:
    estimate = search.estimate_of(line)
    here = estimate.cuts.places(line.found.cuts)
    places = _promising(search, line, estimate, here)
    return [estimate.cuts.cut(row) for row in places if (row != here).any()]


def _promising(search: JointSearch, line: Judged, estimate: Estimate, here: Indices) -> list[Indices]:
    """Places of the cuts that are best by an estimate, and where it weighs what is freed, which is often less
    in the end, also by one that does not."""
    places = [*climb(estimate, here)[:SIMULATED], *neighbours(estimate, here, BESIDE)]
    limit_s = (line if search.best is None else search.best).step_s * (1 + NEAR)
    if isinstance(estimate, ClosedForm):  # of another scale
        limit_s = float(estimate.steps(here[None])[0])
    near = [*compress(places, estimate.steps(np.array(places)) <= limit_s)] if places else []
    if estimate.cuts.weighed:
        estimate.cuts.weighed = False
        near += climb(estimate, here)[:SIMULATED]
    return near


def _relieved(line: Judged) -> Iterator[Cuts]:
    """Cuts that leave less to the rank that passes its cap by most, or to every rank."""
    found, layout = line.found, line.point.request.layout
    fullest = max(range(layout.ranks), key=found.over.__getitem__)
    places = found.search.model.cut_points.tolist()
    at = [places.index(cut) for cut in found.cuts]
    for stage in dict.fromkeys(layout.held[fullest]):
        for cut, side in ((stage, 1), (stage + 1, -1)):
            for step in (1, 2, 4):
                to = at[cut] + side * step
                if 0 < cut < len(at) - 1 and at[cut - 1] < to < at[cut + 1]:
                    yield (*found.cuts[:cut], places[to], *found.cuts[cut + 1 :])
    if not found.search.large:
        kept = replace(line.point.search, treatments=())
        shared = scale_caps(kept, 1 / max(map(len, layout.held)))
        yield from filter(None, (kept.smallest()[1], shared.fastest()[1]))


def other_schedules(search: JointSearch, line: Judged) -> Iterator[Point]:
    """The same cuts in other schedules that put stages in the same places."""
    best_s = line.step_s if search.best is None else search.best.step_s
    ranked: list[tuple[float, int, Point]] = []
    for number, name in enumerate(search.names):
        try:
            request = search.way(name, line.point.order)
            if name == line.point.request.schedule or request.layout != line.point.request.layout:
                continue
            request = replace(request, slack=line.point.request.slack)
            own = line.point.search
            of_way = replace(request.search(), treatments=own.treatments, by_depth=own.by_depth)
            if own.model.readers.order:
                of_way = replace(of_way, model=own.model, known=own.known, borders=own.borders)
            estimate = search.estimate(request, of_way)
        except (PlanError, ScheduleError):
            continue
        seconds = float(estimate.steps(estimate.cuts.places(line.point.cuts)[None])[0])
        if seconds <= best_s * (1 + FAR) or not own.large:
            ranked.append((seconds, number, Point(request, of_way, line.point.cuts, line.point.order)))
    for _, _, point in sorted(ranked, key=lambda one: one[:2])[:SIMULATED]:
        yield point


def copying_schedules(search: JointSearch, line: Judged) -> Iterator[Point]:
    """Schedules that offload, where caps cost something."""
    for name in search.copying if search.pressed else ():
        try:
            way = search.way(name, line.point.order)
            own = way.search()
        except (PlanError, ScheduleError):
            continue
        if way.layout == line.point.request.layout:
            yield Point(way, own, line.point.cuts, line.point.order)


def freed(search: JointSearch, line: Judged) -> Iterator[Point]:
    """Other ways to free residuals."""
    allowed = line.point.request.treatments
    ways = dict.fromkeys(((), tuple(t for t in allowed if t != "offload"), allowed))
    for treatments in ways:
        if treatments != line.found.search.treatments and search.pressed:
            yield replace(line.point, search=replace(line.point.search, treatments=treatments))


def branches(search: JointSearch, line: Judged) -> Iterator[Point]:
    """Stages side by side, in several orders of branches; and with more micro-batches in flight. Of several
    stages on a rank, which are a chain, the order of branches alone."""
    request = line.point.request
    if not request.branched:
        yield from search.cuts_in_branch_orders(line.point)
        return
    orders, stages = request.orders_to_try, request.layout.stages
    alone = search.alone  # then there is time for more
    for order in request.branch_orders(stages) if alone and orders else orders:
        treatments = request.treatments if search.pressed else ()
        own = replace(request.search(order), by_depth=True, treatments=treatments)
        proposed = islice(shallow_cuts(own), None if alone else PROPOSED)
        yield from _and_moved(
            search, [replace(line.point, search=own, cuts=cuts) for cuts in proposed], alone
        )
    best = search.best_of[line.point.way]
    if orders and best.found.depth < stages:
        own = replace(best.point.search, by_depth=True)
        for slack in dict.fromkeys((*SLACKS, stages)):
            if slack <= stages:
                deeper = replace(best.point, request=replace(request, slack=slack), search=own)
                yield from _and_moved(search, [deeper], alone)


def _and_moved(search: JointSearch, points: list[Point], moved: bool) -> Iterator[Point]:
    """Some points, and the cuts of the best of them moved, though it be slower than others."""
    yield from points
    judged = filter(None, (search.tried.get(point.key) for point in points))
    if moved and (best := min(judged, key=lambda one: one.key, default=None)) is not None:
        yield from moved_cuts(search, best)


def device_orders(search: JointSearch, line: Judged) -> Iterator[Point]:
    """Unlike devices in other orders, with cuts whose ranks take equally long."""
    devices = search.request.cluster.devices
    kind = [next(k for k, d in enumerate(devices) if are_alike(d, device)) for device in devices]
    if len(set(kind)) == 1:
        return
    now = line.point.order or tuple(range(len(devices)))
    for order in _orders(kind, now):
        try:
            request = search.way(line.point.request.schedule, order)
            own = replace(request.search(), treatments=line.point.search.treatments)
        except (PlanError, ScheduleError):
            continue
        for cuts in search.level_cuts(ClosedForm(search.cut_times(request, own)))[:1]:
            yield Point(request, own, cuts, order)


def _orders(kind: list[int], now: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other orders of devices of some kinds: all if there are few, else those that swap two.

    >>> list(_orders([0, 0, 1], (0, 1, 2)))
    [(0, 2, 1), (2, 0, 1)]
    """
    rows = _arrangements(tuple(sorted(kind)), ARRANGED + 1)
    if len(rows) > ARRANGED:
        pairs = ((a, b) for a in range(len(now)) for b in range(a) if kind[now[a]] != kind[now[b]])
        for a, b in pairs:
            swapped = list(now)
            swapped[a], swapped[b] = now[b], now[a]
            yield tuple(swapped)
        return
    for row in rows:
        free: dict[int, list[int]] = {k: [i for i, own in enumerate(kind) if own == k] for k in set(kind)}
        order = tuple(free[k].pop(0) for k in row)
        if order != tuple(now):
            yield order


def _arrangements(kinds: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """Different rows of some kinds, ascending, up to so many."""
    if not kinds:
        return [()]
    found: list[tuple[int, ...]] = []
    for index, kind in enumerate(kinds):
        if index and kinds[index - 1] == kind:
            continue
        rest = kinds[:index] + kinds[index + 1 :]
        found += [(kind, *row) for row in _arrangements(rest, most - len(found))]
        if len(found) >= most:
            return found[:most]
    return found


AXES: Mapping[str, Axis] = {
    "cuts": moved_cuts,
    "branches": branches,
    "schedules": other_schedules,
    "devices": device_orders,
    "treatments": freed,
    "copies": copying_schedules,
}

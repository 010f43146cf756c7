"""Candidates whose stages form a DAG, and what they gain over stages one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from .candidate import Candidate
from .infeasible import scale_caps
from .request import Request
from .search.cut_search import Search
from .search.polish import polish_cuts
from .search.problem import Cuts

Propose = Callable[[Search], Iterator[Cuts]]


NEARLY_FULL = 0.8
"""Share of its cap that a rank holds with every residual kept from which on freeing some is tried, too."""


def shallow_candidates(request: Request, propose: Propose, lowered: Sequence[float]) -> list[Candidate]:
    """Of the cuts that a planner proposes, in several orders of branches, those that keep their caps in their
    simulated step. Where none does: of what it proposes under lower caps.

    Residuals are freed only where caps are tight: weighing a stage takes longer then.
    lowered: shares of the caps.
    """
    stages = len(request.cluster.devices)
    orders = request.branch_orders(stages)
    searches = [replace(request.search(order), by_depth=True) for order in orders]
    kept = _that_fit(request, [replace(search, treatments=()) for search in searches], propose, (1.0,))
    if any(search.optimises for search in searches) and not any(map(_has_room, kept)):
        kept += _that_fit(request, searches, propose, (1.0, *lowered))
    return kept or _that_fit(
        request, [replace(search, treatments=()) for search in searches], propose, lowered
    )


def _has_room(candidate: Candidate) -> bool:
    """Whether no rank is nearly full."""
    timeline, caps = candidate.timeline, candidate.search.caps
    return all(timeline.peak_bytes(rank) < NEARLY_FULL * cap for rank, cap in enumerate(caps))


def _that_fit(
    request: Request, searches: Sequence[Search], propose: Propose, shares: Sequence[float]
) -> list[Candidate]:
    """What keeps the caps of what is proposed under the first of some shares of them where anything does."""
    for share in shares:
        candidates = [
            Candidate(request, search, cuts)
            for search in searches
            for cuts in propose(scale_caps(search, share))
        ]
        if kept := [found for found in candidates if found.fits and found.tighter() is None]:
            return kept
    return []


ALIKE = 1e-6
"""Share of the step below which two steps are as fast; the shallower pipeline then wins, which holds less."""

HUGE = 4_000
"""Ops beyond which a plan for a DAG of stages is made in seconds: of cuts at a few places, in one order of
branches, none of them moved by the simulated step."""

SLACKS = (1, 2, 4)
"""Micro-batches in flight beyond the depth of a stage that are tried."""

POLISHED, MANY_POLISHED, SMALL = 4, 12, 32
"""Candidates whose cuts are moved by the simulated step; many while there are at most `SMALL` ops."""


def with_slack(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best few candidates with more micro-batches in flight, where that keeps the caps."""
    few = sorted(candidates, key=lambda found: found.timeline.step_s)[:POLISHED]
    more = (
        Candidate(replace(found.request, slack=slack), replace(found.search, by_depth=True), found.cuts)
        for found in few
        if found.depth < len(found.parts)
        for slack in (*SLACKS, len(found.parts))
        if slack <= len(found.parts)
    )
    return [found for found in more if found.fits and found.tighter() is None]


def fastest_of_few(request: Request, search: Search, propose: Propose) -> Candidate | None:
    """The fastest that keeps its caps of what a planner proposes, and of the best chain, for a huge graph."""
    searches = [(search, iter([search.fastest_of_few()]))]
    if request.options.branches:
        by_depth = replace(search, by_depth=True, treatments=())
        searches.append((by_depth, islice(propose(by_depth), 2)))
    candidates = [Candidate(request, each, cuts) for each, some in searches for cuts in some if cuts]
    kept = [found for found in candidates if found.fits and found.tighter() is None]
    if request.options.branches:
        kept += with_slack(kept)
    return min(kept, key=lambda found: found.timeline.step_s, default=None)


def polish_some(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of what becomes of the best few, each polished in its own op order."""
    different: dict[tuple[Cuts, Cuts], Candidate] = {}
    for found in sorted(candidates, key=lambda found: found.timeline.step_s):
        different.setdefault((found.search.model.readers.order, found.cuts), found)
    few = list(different.values())[: MANY_POLISHED if len(candidates[0].search.model) <= SMALL else POLISHED]
    return min((polish_cuts([found], found.search) for found in few), key=lambda found: found.timeline.step_s)


def faster_of(dag: Candidate | None, row: Candidate | None) -> Candidate | None:
    """The faster of the best candidate and the best one whose stages run one after another.

    Its notes say what both take, for whoever wants to see what branches gain: seconds, bytes of the rank that
    holds most, and stages on the longest path; and seconds of the latter as a sequential pipeline.
    """
    if dag is None or row is None:
        return dag or row
    best = dag if dag.timeline.step_s <= row.timeline.step_s * (1 + ALIKE) else row
    if best.depth < len(best.parts):
        sequential = {"no_branches.sequential_step_s": repr(row.sequential_step_s())}
        best.notes = {
            **best.notes,
            **_figures("branches", best),
            **_figures("no_branches", row),
            **sequential,
        }
    return best


def _figures(what: str, candidate: Candidate) -> dict[str, str]:
    timeline = candidate.timeline
    peak = max(timeline.peak_bytes(rank) for rank in range(timeline.ranks))
    return {
        f"{what}.step_s": repr(timeline.step_s),
        f"{what}.peak_bytes": str(peak),
        f"{what}.depth": str(candidate.depth),
    }

"""The library of schedules: name -> how its rows are made. A family decides only the order; the rest is done
here, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..checks.schedules import check
from ..checks.weight_versions import weight_versions
from ..ir.action import Action
from ..ir.columns import AWAIT_, B_, F_, RELOAD_, W_, Rows as Table, columns_of
from ..ir.costs import StageCost, equal_costs
from ..ir.errors import DeadlockError, ScheduleError, of_type, shown
from ..ir.schedule import Pair, Schedule
from ..ir.stages import StageGraph, chain, replicate
from ..ir.steady import SteadyStep, steady_step
from ..ir.user_code import own_errors_told
from ..ir.weight_policies import FLUSH, Updates
from .copies import Copies, place_copies
from .families import bidirectional as two_ways, interleaved, one_f_one_b, v_shape as vee, zero_bubble as zb
from .formats import read_schedule
from .language.names import (
    ALIASES,
    CHUNKS,
    FIT,
    LIMIT,
    OFFLOAD,
    ScheduleName,
    canonical,
    load_user_schedule,
    parse_name,
)
from .language.placements import RankTable, both_ways, loop, spread, wave
from .language.recipe import Recipe, slips_refused
from .language.shape import Shape, options
from .list_scheduler.choose import fastest

Rows: TypeAlias = Iterable[Iterable[Action]]

PLACES = ("line", "loop", "wave", "both ways", "table")
MEANT = {
    "line": "one stage on each rank",
    "loop": "stages in a loop, stage s on rank s mod p",
    "wave": "stages there and back, as in a V",
    "both ways": "two replicas in opposite directions",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A schedule in the library: either recipe (in the language, for any times), or rows (from a `Shape`; a
    Schedule where it has pairs or slices).

    place: where its stages go unless the user says otherwise, see `PLACES`.
    table: number of ranks -> for each stage its rank, or the ranks that it spans.
    stages: the graph that a table is for, a chain unless given.
    copied: the recipe for rows into which copies are placed, if another one.
    offload: of how many stages of each rank residuals are copied, unless the name says it.
    held: (shape, that number) -> the most that a rank is to hold then, in residuals of one micro-batch on one
        stage.
    lacks: what a runtime must have to run it and has not.  weights: its policy of updates.
    """

    recipe: Callable[[Shape], Recipe | Sequence[Recipe]] | None = None
    rows: Callable[[Shape], Rows | Schedule] | None = None
    place: str = "line"
    about: str = ""
    table: Callable[[int], RankTable] | None = None
    stages: StageGraph | None = None
    copied: Callable[[Shape], Recipe | Sequence[Recipe]] | None = None
    offload: Callable[[Shape], int] | None = None
    held: Callable[[Shape, int], float] | None = None
    lacks: str = ""
    weights: str = FLUSH

    def __post_init__(self) -> None:
        if (self.place == "table") != (self.table is not None) or self.place not in PLACES:
            raise ScheduleError(
                f"a schedule with place={self.place!r} and {'a' if self.table else 'no'} table",
                hint=f"the places are {', '.join(PLACES)}; give a table with place='table', and only then",
            )

    def make(self, shape: Shape, *, copied: bool = False) -> tuple[Rows, int, tuple[Pair, ...]]:
        """The rows, slices of a micro-batch, and pairs. copied: copies will be placed into the rows."""
        if self.rows is not None:
            rows = self.rows(shape)
            return (rows.rows, rows.slices, rows.pairs) if isinstance(rows, Schedule) else (rows, 1, ())
        recipe = self.copied if copied and self.copied is not None else self.recipe
        assert recipe is not None
        if own := [p.name for p in signature(recipe).parameters.values() if p.default is not p.empty]:
            options(shape, **dict.fromkeys(own, 0.0))  # refuses others
            numbers = shape.options.items()
            recipe = partial(recipe, **{name: int(x) if x == int(x) else x for name, x in numbers})
        scheduled = fastest(shape, recipe)
        return scheduled.rows, scheduled.recipe.slices, scheduled.pairs

    def copies(self, name: ScheduleName, shape: Shape) -> Copies | None:
        """What the options of a name ask to be copied to the host; None for nothing.

        offload: how many stages of each rank, those whose residuals are kept longest.  limit: the most
        residuals of a rank, in those of one micro-batch on its largest stage.  fit: 1 for as many copies as
        it takes until each rank has room for what stays; where no room is known, ranks hold as little as they
        can.
        """
        options, text = name.options, name.written
        stages = options.get(OFFLOAD, 0.0 if self.offload is None else float(self.offload(shape)))
        limit = options.get(LIMIT)
        if stages != int(stages) or not 0 <= stages <= shape.chunks:
            raise ScheduleError(
                f"{text} offloads {stages:g} of the {shape.chunks} stages of a rank",
                hint=f"give a whole number from 0 to {shape.chunks}",
            )
        if fit := options.get(FIT, 0.0):
            if fit != 1 or limit is not None:
                both = "" if limit is None else f" and limits a rank to {limit:g} residuals"
                raise ScheduleError(
                    f"{text} fits its caps with fit={fit:g}{both}",
                    hint="write fit=1, and leave out `limit`, which the caps say",
                )
            return Copies(stages=int(stages), room=shape.room_bytes or (0.0,) * shape.ranks)
        if limit is None:
            if not stages:
                return None
            held = None if self.held is None else self.held(shape, int(stages))
            return Copies(stages=int(stages), held=held)
        if not limit > 0:
            raise ScheduleError(
                f"{text} limits a rank to {limit:g} residuals",
                hint="give a number above 0, of stages' residuals",
            )
        return Copies(stages=int(stages), held=limit, strict=True)


MOST_STAGES = 1 << 16
SLICES = "sequence slices"
_OFFLOADS: Any = {"place": "loop", "copied": interleaved.po_joined, "held": interleaved.po_held}

FAMILIES: dict[str, Entry] = {
    "forward_only": Entry(rows=one_f_one_b.forward_only, about="forwards, for evaluation"),
    "gpipe": Entry(rows=one_f_one_b.gpipe, about="all forwards, then all backwards"),
    "1f1b": Entry(rows=one_f_one_b.one_f_one_b, about="one forward, one backward"),
    "eager_1f1b": Entry(recipe=one_f_one_b.eager_1f1b, about="1F1B with twice the warm-up"),
    "interleaved_1f1b": Entry(recipe=interleaved.interleaved_1f1b, place="loop", about="1F1B over chunks"),
    "looped_bfs": Entry(recipe=interleaved.looped_bfs, place="loop", about="GPipe over chunks"),
    "async_1f1b": Entry(recipe=one_f_one_b.async_1f1b, about="1F1B without a flush", weights="stash"),
    "zb_h1": Entry(recipe=zb.zb_h1, about="W fills gaps, memory of 1F1B"),
    "zb_h2": Entry(recipe=zb.zb_h2, about="W fills gaps, twice the memory"),
    "zb_1p": Entry(recipe=zb.zb_h1, about="zb_h1, `memory` may be set"),
    "zb_2p": Entry(recipe=zb.zb_h2, about="zb_h2, `memory` may be set"),
    "zb_v": Entry(recipe=vee.zb_v, place="wave", about="V with no bubble, memory of 1F1B"),
    "v_half": Entry(recipe=vee.v_half, place="wave", about="V with half the memory"),
    "v_min": Entry(recipe=vee.v_min, place="wave", about="V with a third of the memory"),
    "1f1b_v": Entry(recipe=vee.one_f_one_b_v, place="wave", about="V with two thirds of the memory"),
    "dualpipe": Entry(
        recipe=two_ways.dualpipe, place="both ways", about="two directions, F and B in pairs unless `pairs=0`"
    ),
    "dualpipev": Entry(
        recipe=two_ways.dualpipev, place="wave", about="dualpipe cut in half, in pairs unless `pairs=0`"
    ),
    "chimera": Entry(recipe=two_ways.chimera, place="both ways", about="two directions"),
    "hanayo": Entry(recipe=two_ways.hanayo, place="wave", about="waves"),
    "gis": Entry(recipe=interleaved.gis, place="loop", about="interleaved with the memory of 1F1B"),
    "gis_g": Entry(recipe=interleaved.gis_g, place="loop", about="gis in groups of `group`"),
    "gis_h": Entry(recipe=interleaved.gis_h, place="loop", about="gis with the smallest groups"),
    "po": Entry(
        recipe=interleaved.po,
        about="uniform repeating; `offload` stages of each rank on the host",
        **_OFFLOADS,
    ),
    "po_h": Entry(
        recipe=interleaved.po_joined,
        about="po with half of the stages offloaded",
        offload=lambda s: -(-s.chunks // 2),
        **_OFFLOADS,
    ),
    "po_f": Entry(
        recipe=interleaved.po_joined,
        about="po with all stages offloaded",
        offload=lambda s: s.chunks,
        **_OFFLOADS,
    ),
    "seq1f1b": Entry(recipe=one_f_one_b.seq1f1b, about="1F1B over sequence slices", lacks=SLICES),
}

LIBRARY = frozenset(FAMILIES)
"""Names that mean the same in every process; `register` adds others."""


def names() -> tuple[str, ...]:
    return tuple(FAMILIES)


def register(name: str, known: Entry) -> None:
    """Make a schedule known by a name in small letters. Raises: ScheduleError if the name is taken."""
    key = str(parse_name(name))
    if key in FAMILIES:
        raise ScheduleError(f"a schedule named {key!r} exists already", hint="choose another name")
    FAMILIES[key] = known


def entry(name: str) -> Entry:
    """What the library knows of a schedule. Raises: ScheduleError if the name is unknown."""
    parsed = parse_name(name)
    if parsed.lists_actions or parsed.given.endswith(".json"):  # which is refused
        return _from_file(Path(name))
    found: Any = load_user_schedule(parsed) if parsed.in_python else FAMILIES.get(parsed.family)
    if found is None:
        known = [*FAMILIES, *(alias.lower() for others in ALIASES.values() for alias in others)]
        near = [canonical(one) for one in get_close_matches(parsed.family, known, n=1)]
        meant = f"did you mean {near[0]}? " if near else ""
        if parsed.family == "auto":
            meant = "leave the schedule out, and planner auto chooses one; "
        raise ScheduleError(
            f"no schedule is named {shown(parsed.given)}",
            hint=f"{meant}the schedules are {', '.join(names())}",
        )
    if isinstance(found, Entry):
        return found
    if not callable(found):
        raise ScheduleError(
            f"{parsed.given} is {of_type(found)} and not a schedule",
            hint="name a function that takes a Shape and returns a Recipe",
        )
    return Entry(recipe=slips_refused(found), about="your own")


def build(
    name: str,
    stages: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    split_backward: bool = False,
    **given: Any,
) -> Schedule:
    """Build a schedule by name and check it.

    name: see `names` and `ALIASES`; capitals and `-` for `_` are fine; options follow a colon, as in
        "gis_g:group=3"; any schedule takes `offload`, `limit` and `fit`, see `Entry.copies`.
    placement: the rank of each stage.  split_backward: every B becomes I and then W.
    given: further fields of the `Shape`, such as `costs`, for schedules in the language, which order by time.
    Raises: ScheduleError if the name is unknown, the placement does not fit, or a rule is broken.

    >>> from pipeloom.ir.stages import chain
    >>> print(build("1f1b", chain(2), (0, 1), 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    library_entry, parsed = entry(name), parse_name(name)
    shape = shape_of(stages=stages, placement=placement, microbatches=microbatches, **given)
    shape = replace(shape, options={**shape.options, **parsed.family_options})
    try:
        with own_errors_told(f"{parsed.written} fails"):
            copies = library_entry.copies(parsed, shape)
            made, slices, pairs = library_entry.make(shape, copied=copies is not None)
        if split_backward and pairs:
            raise ScheduleError(
                f"{parsed.written} runs pairs such as {pairs[0][0]}&{pairs[0][1]}, which a split backward "
                "would tear apart",
                hint='leave out the split; or use kinds="FIW" in your own recipe, pairs=0 with DualPipe',
            )
        rows = made if isinstance(made, Table) else tuple(map(tuple, made))
        if split_backward:
            rows = Table(columns_of(rows).split_backward())
        if copies is not None:
            rows = place_copies(rows, shape, copies, pairs=pairs)
        schedule = Schedule(
            name=str(parsed),
            microbatches=microbatches,
            placement=placement,
            rows=rows,
            slices=slices,
            pairs=pairs,
        )
        check(schedule, stages)
        return schedule
    except DeadlockError as error:
        if parsed.in_file:
            raise
        meant, ranks = MEANT.get(library_entry.place, library_entry.place), ", ".join(map(str, placement))
        within = "" if shape.limit_bytes is None else " within the limits"
        if parsed.family_options:
            raise ScheduleError(
                f"the order of {parsed.written} stops on ranks {ranks}{within}: {error.message}",
                hint=f"give its options other numbers, or leave them out; it is for {meant}",
            ) from None
        raise ScheduleError(
            f"this schedule is for {meant}; with stages on ranks {ranks}{within} its order stops: "
            f"{error.message}",
            hint="place the stages as it is meant, or use one for any placement: 1f1b, gpipe, or what "
            "`pipeloom schedule search` finds",
        ) from None


def build_steady(
    name: str,
    stages: StageGraph,
    placement: tuple[int, ...],
    updates: Updates,
    *,
    split_backward: bool = False,
    **given: Any,
) -> SteadyStep:
    """The steady step of a schedule without a flush, for weights that are updated every `updates.every`
    micro-batches; built for as many steps as fill the pipeline, and a few more.

    Raises: ScheduleError if it does not repeat, or if a micro-batch needs a version of the weights that is
        not made yet, or no longer kept; and as `build` does.

    >>> from pipeloom.ir.stages import chain
    >>> print(build_steady("1f1b", chain(2), (0, 1), Updates(policy="2bw", every=2)))
    0F2 0B1 0F3 0B2
    1F2 1B2 1F3 1B3
    """

    def built(every: int) -> SteadyStep:
        steps = 2 * -(-2 * len(placement) // every) + 4
        long = build(name, stages, placement, steps * every, split_backward=split_backward, **given)
        return steady_step(long, every)

    def runs_with(every: int) -> bool:
        with suppress(ScheduleError):
            weight_versions(built(every).unrolled, stages, replace(updates, every=every))
            return True
        return False

    body = built(updates.every)
    check(body.unrolled, stages)
    try:
        weight_versions(body.unrolled, stages, updates)
    except ScheduleError as error:
        enough = next(filter(runs_with, range(updates.every + 1, 2 * len(placement) + 1)), None)
        if enough is None:
            raise
        raise ScheduleError(
            error.message, hint=f"let each pipeline have {enough} micro-batches per step (--microbatches)"
        ) from None
    return body


def default_placement(name: str, ranks: int, chunks: int = 0) -> tuple[StageGraph, tuple[int, ...]]:
    """A chain of stages and the placement that a schedule is meant for.

    chunks: stages per rank, unless the name has its own (`:v=4`); 2 where a schedule needs several.
    Raises: ScheduleError if a schedule that has no choice is given stages per rank, or other ranks than its
        own.

    >>> default_placement("zb_v", 2)[1]
    (0, 1, 1, 0)
    >>> default_placement("interleaved:v=3", 2)[1]
    (0, 1, 0, 1, 0, 1)
    """
    library_entry = entry(name)
    place = library_entry.place
    if (own := parse_name(name).chunks_in(place)) and chunks not in (0, own):
        raise ScheduleError(
            f"{name} has {own} stages on each rank, -v gives it {chunks}", hint="leave one of them out"
        )
    chunks = own or chunks
    if library_entry.table is not None:
        table = _table_of(name, library_entry, ranks)
        count = 1 + max(max(entry) if isinstance(entry, tuple) else entry for entry in table)
        if ranks != count:
            raise ScheduleError(f"{name} is for {count} ranks, not {ranks}", hint=f"use as many: -p {count}")
        if chunks:
            raise ScheduleError(
                f"{name} says itself which stages each rank has",
                hint="leave -v out; others may have it in their names, as gis:v=4",
            )
        return spread(library_entry.stages or chain(len(table)), table)
    if place == "both ways":
        return replicate(chain(ranks), 2), both_ways(ranks)
    chunks = chunks or (1 if place == "line" else 2)
    if ranks * chunks > MOST_STAGES:
        raise ScheduleError(
            f"{name} has {chunks} stages on each of {ranks} ranks",
            hint=f"give it at most {MOST_STAGES} stages together",
        )
    where = wave(ranks, chunks) if place == "wave" else loop(ranks, chunks)
    return chain(len(where)), where


def _table_of(name: str, library_entry: Entry, ranks: int) -> RankTable:
    """Raises: ScheduleError if it is no table; ConfigError if the user's function fails."""
    assert library_entry.table is not None
    with own_errors_told(f"the table of {name} fails"):
        table = library_entry.table(ranks)
    if not isinstance(table, Sequence) or not table:
        raise ScheduleError(
            f"the table of {name} for {ranks} ranks is {shown(table)}",
            hint="return a tuple with the rank of each stage, as (0, 1, 0)",
        )
    for stage, on in enumerate(table):
        each = on if isinstance(on, tuple) else (on,)
        if not each or not all(isinstance(rank, int | np.integer) for rank in each):
            raise ScheduleError(
                f"the table of {name} places stage {stage} on {shown(on)}",
                hint="give each stage its rank, or a tuple of the ranks that it spans",
            )
    return table


def with_chunks(name: str, chunks: int | None) -> str:
    """The name of a schedule with so many stages on each rank; None leaves it as it is.

    Raises: ScheduleError if the name gives another number, or the schedule has no choice.

    >>> with_chunks("gis", 4), with_chunks("gis_g:group=3", 4), with_chunks("1f1b", 1)
    ('gis:v=4', 'gis_g:group=3,v=4', '1f1b')
    """
    if chunks is None:
        return name
    place, parsed = entry(name).place, parse_name(name)
    if chunks < 1:
        raise ScheduleError(f"chunks is {chunks}", hint="give each rank 1 stage or more")
    named = parsed.chunks_in(place)
    if named not in (0, chunks):
        raise ScheduleError(
            f"{name} is to have {chunks} stages per rank", hint="leave out one of the two numbers"
        )
    if named == chunks or (chunks == 1 and place in ("line", "both ways")):
        return name
    longer = f"{name}{',' if parsed.listed else ':'}{CHUNKS}={chunks}"
    parse_name(longer).chunks_in(place)
    return longer


def shape_of(
    ranks: int = 1,
    chunks: int = 1,
    *,
    microbatches: int,
    placement: tuple[int, ...] | None = None,
    stages: StageGraph | None = None,
    costs: Sequence[StageCost] | None = None,
    **given: Any,
) -> Shape:
    """What a recipe is tried on: a chain in a loop with equal times, unless said otherwise.

    given: further fields of the `Shape`.
    """
    where = loop(ranks, chunks) if placement is None else placement
    graph = stages or chain(len(where))
    count = len(graph.stages)
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} micro-batches", hint="use at least 1")
    if not where or len(where) != count:
        raise ScheduleError(
            f"the placement names {len(where)} stages, the stage graph has {count}",
            hint="give one rank per stage",
        )
    if empty := sorted(set(range(max(where) + 1)) - set(where)):
        raise ScheduleError(
            f"rank {empty[0]} has no stage", hint="number the ranks from 0 without gaps, or use fewer ranks"
        )
    if min(where) < 0:
        raise ScheduleError(f"a stage is placed on rank {min(where)}", hint="number the ranks from 0")
    if costs is not None and len(costs) != count:
        raise ScheduleError(f"{len(costs)} costs for {count} stages", hint="give one StageCost per stage")
    each = equal_costs(count) if costs is None else tuple(costs)
    return Shape(stages=graph, placement=where, microbatches=microbatches, costs=each, **given)


def in_flight(schedule: Schedule, *, on_device: bool = False) -> tuple[int, ...]:
    """For each stage the most micro-batches whose residuals it holds at once (until B or W); 0 in evaluation.

    on_device: without those on the host, from their AWAIT until their RELOAD. What nothing awaits is not
        taken to have left before its RELOAD.
    """
    columns = schedule.columns
    if not columns.trains:
        return (0,) * schedule.stages
    change = np.zeros(len(columns), np.int64)
    change[columns.kind == F_] = 1
    change[(columns.kind == B_) | (columns.kind == W_)] = -1
    if on_device and columns.copies:
        change[columns.kind == AWAIT_] = -1
        awaited = schedule.action_index.of(AWAIT_)[columns.stage, columns.microbatch]
        change[(columns.kind == RELOAD_) & (awaited >= 0)] = 1
    order = np.argsort(columns.stage, kind="stable")
    now = np.split(change[order], np.searchsorted(columns.stage[order], np.arange(1, schedule.stages)))
    return tuple(int(np.cumsum(own).max(initial=0)) for own in now)


def _from_file(file: Path) -> Entry:
    schedule = read_schedule(file)

    def rows(shape: Shape) -> Schedule:
        if shape.microbatches != schedule.microbatches:
            raise ScheduleError(
                f"{file} is for {schedule.microbatches} micro-batches, not {shape.microbatches}",
                hint=f"use as many: -m {schedule.microbatches}",
            )
        return schedule

    return Entry(rows=rows, place="table", table=lambda ranks: schedule.placement, about="from a file")

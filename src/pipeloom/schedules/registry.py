"""The registry: name -> family of schedules. A family decides only the order; the rest is done here once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ..checks.schedules import check
from ..ir.action import B, F, W
from ..ir.columns import Rows as Table, columns_of
from ..ir.costs import StageCost, equal_costs
from ..ir.errors import DeadlockError, ScheduleError, shown
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph, chain, replicate
from .aliases import ALIASES, CHUNKS, canonical
from .copies.asked import COPY_OPTIONS, FIT, copies_asked
from .copies.place import Copies, place_copies
from .copies.uplinks import Uplinks
from .families import (
    bidirectional as two_ways,
    forward_only,
    gpipe,
    grouped,
    one_f_one_b,
    v_shape as vee,
    variants,
    zero_bubble as zb,
)
from .formats.csv import read_schedule
from .language.shape import Shape
from .language.user_files import LISTED, load_user_schedule, names_user_file, split_options
from .library_entry import PLACES as PLACES, Entry as Entry, Family
from .placements import RankTable, both_ways, loop, spread, wave

SLICES = "sequence slices"

FAMILIES: dict[str, Family | Entry] = {
    "forward_only": Entry(family=forward_only.rows, about="forwards, for evaluation"),
    "gpipe": Entry(family=gpipe.rows, about="all forwards, then all backwards"),
    "1f1b": Entry(family=one_f_one_b.rows, about="one forward, one backward"),
    "eager_1f1b": Entry(recipe=variants.eager_1f1b, about="1F1B with twice the warm-up"),
    "interleaved_1f1b": Entry(recipe=grouped.interleaved_1f1b, place="loop", about="1F1B over chunks"),
    "looped_bfs": Entry(recipe=grouped.looped_bfs, place="loop", about="GPipe over chunks"),
    "async_1f1b": Entry(recipe=variants.async_1f1b, about="1F1B without a flush", weights="stash"),
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
    "gis": Entry(recipe=grouped.gis, place="loop", about="interleaved with the memory of 1F1B"),
    "gis_g": Entry(recipe=grouped.gis_g, place="loop", about="gis in groups of `group`"),
    "gis_h": Entry(recipe=grouped.gis_h, place="loop", about="gis with the smallest groups"),
    "po": Entry(
        recipe=grouped.po,
        place="loop",
        about="uniform repeating; `offload` stages of each rank on the host",
        copied=grouped.po_joined,
        held=grouped.po_held,
    ),
    "po_h": Entry(
        recipe=grouped.po_joined,
        place="loop",
        about="po with half of the stages offloaded",
        copied=grouped.po_joined,
        offload=lambda s: -(-s.chunks // 2),
        held=grouped.po_held,
    ),
    "po_f": Entry(
        recipe=grouped.po_joined,
        place="loop",
        about="po with all stages offloaded",
        copied=grouped.po_joined,
        offload=lambda s: s.chunks,
        held=grouped.po_held,
    ),
    "seq1f1b": Entry(recipe=variants.seq1f1b, about="1F1B over sequence slices", lacks=SLICES),
}


def names() -> tuple[str, ...]:
    """All schedules that `build` knows.

    >>> names()[:3]
    ('forward_only', 'gpipe', '1f1b')
    """
    return tuple(FAMILIES)


def register(name: str, family: Family | Entry) -> None:
    """Make a family known by a name in small letters. Raises: ScheduleError if the name is taken."""
    key = _key(name)
    if key in FAMILIES:
        raise ScheduleError(f"a schedule named {key!r} exists already", hint="choose another name")
    FAMILIES[key] = family


def entry(name: str) -> Entry:
    """What the library knows of a schedule. Raises: ScheduleError if the name is unknown."""
    family = _family(split_options(name)[0])
    return family if isinstance(family, Entry) else Entry(family=family)


@dataclass(frozen=True, kw_only=True)
class Times:
    """What building may know besides the order.

    costs: one per stage; equal ones by default.  transfer_s: seconds of a message between two ranks, the
        same for all or by (from stage, to stage).  limit_bytes: most residual bytes of any rank, or
        of each; the costs must then say what residuals take.  uplinks: through which copies to the host go;
        by default each rank has its own.  room_bytes: what each rank has for residuals, where `fit=1` asks
        for copies until they fit.  shortest: "step" or "span", see `Shape`.
    """

    costs: tuple[StageCost, ...] | None = None
    transfer_s: float | Callable[[int, int], float] = 0.0
    limit_bytes: float | tuple[float, ...] | None = None
    uplinks: Uplinks | None = None
    room_bytes: tuple[float, ...] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    shortest: str = "step"


def build(
    name: str,
    stages: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    split_backward: bool = False,
    times: Times | None = None,
) -> Schedule:
    """Build a schedule by name and check it.

    name: see `names` and `ALIASES`; capitals and `-` for `_` are fine; options follow a colon, as in
        "gis_g:group=3"; any schedule takes `offload`, `limit` and `fit`, see `copies.copies_asked`.
    placement: the rank of each stage.  split_backward: every B becomes I and then W.
    times: for schedules in the language, which order by time.
    Raises: ScheduleError if the name is unknown, the placement does not fit, or a rule is broken.

    >>> from pipeloom.ir.stages import chain
    >>> print(build("1f1b", chain(2), (0, 1), 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    library_entry = entry(name)
    _refuse_bad_shape(stages, placement, microbatches)
    times = times or Times()
    shape = _shape(name, stages, placement, microbatches, times)
    copies = copies_asked(name, _options(name), shape, library_entry, times.room_bytes)
    try:
        return _checked(name, shape, times, copies, split_backward=split_backward)
    except DeadlockError as error:
        if names_user_file(name):
            raise
        raise library_entry.refusal(shape, error) from None


def _checked(
    name: str, shape: Shape, times: Times, copies: Copies | None, *, split_backward: bool
) -> Schedule:
    made, slices, pairs = entry(name).make(shape, copied=copies is not None)
    if split_backward and pairs:
        raise ScheduleError(
            f"{name} runs pairs such as {pairs[0][0]}&{pairs[0][1]}, which a split backward would tear apart",
            hint='leave out the split; and use kinds="FIW" in a recipe of your own, pairs=0 with DualPipe',
        )
    rows = made if isinstance(made, Table) else tuple(map(tuple, made))
    if split_backward:
        rows = Table(columns_of(rows).split_backward())
    if copies is not None:
        rows = place_copies(rows, shape, times.uplinks, copies, pairs=pairs)
    schedule = Schedule(
        name=_key(name),
        microbatches=shape.microbatches,
        placement=shape.placement,
        rows=rows,
        slices=slices,
        pairs=pairs,
    )
    check(schedule, shape.stages)
    return schedule


def _shape(
    name: str, stages: StageGraph, placement: tuple[int, ...], microbatches: int, times: Times
) -> Shape:
    transfer_s = times.transfer_s
    count = len(stages.stages)
    costs = times.costs or equal_costs(count)
    if len(costs) != count:
        raise ScheduleError(f"{len(costs)} costs for {count} stages", hint="give one StageCost per stage")
    return Shape(
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        costs=costs,
        transfer_s=transfer_s if callable(transfer_s) else (lambda source, target: transfer_s),
        limit_bytes=times.limit_bytes,
        shortest=times.shortest,
        options={
            option: value
            for option, value in {**times.options, **_options(name)}.items()
            if option not in (CHUNKS, *COPY_OPTIONS)
        },
    )


def _options(name: str) -> dict[str, float]:
    options: dict[str, float] = {}
    for part in filter(None, split_options(name)[1].split(",")):
        key, _, value = part.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            raise ScheduleError(
                f"cannot read option {part!r} of {name!r}",
                hint="write name:option=number, as in gis_g:group=3",
            ) from None
    return options


def default_placement(name: str, ranks: int, chunks: int = 0) -> tuple[StageGraph, tuple[int, ...]]:
    """A chain of stages and the placement that a schedule is meant for.

    chunks: stages per rank; 2 where a schedule needs several, unless given. The name's own option, as in
        "interleaved:v=4", goes before it.
    Raises: ScheduleError if the name gives stages per rank to a schedule that has no choice.

    >>> default_placement("zb_v", 2)[1]
    (0, 1, 1, 0)
    >>> default_placement("interleaved:v=3", 2)[1]
    (0, 1, 0, 1, 0, 1)
    """
    library_entry = entry(name)
    place = library_entry.place
    chunks = named_chunks(name, place) or chunks
    if library_entry.table is not None:
        table = library_entry.table(ranks)
        if library_entry.stages is not None:
            _refuse_other_ranks(name, table, ranks)
        return spread(library_entry.stages or chain(len(table)), table)
    if place == "both ways":
        return replicate(chain(ranks), 2), both_ways(ranks)
    if place == "wave":
        where = wave(ranks, chunks or 2)
    else:
        where = loop(ranks, chunks or (2 if place == "loop" else 1))
    return chain(len(where)), where


def _refuse_other_ranks(name: str, table: RankTable, ranks: int) -> None:
    """Of a table that is for stages of its own."""
    count = 1 + max(max(entry) if isinstance(entry, tuple) else entry for entry in table)
    if count != ranks:
        raise ScheduleError(f"{name} is for {count} ranks, not {ranks}", hint=f"use as many: -p {count}")


def fits_caps(name: str) -> bool:
    """Whether a schedule copies until residuals fit under the caps.

    >>> fits_caps("po:v=4,fit=1"), fits_caps("po:v=4")
    (True, False)
    """
    return bool(split_options(name)[1]) and bool(_options(name).get(FIT))


def named_chunks(name: str, place: str) -> int:
    """The stages per rank that a name's option gives; 0 without it."""
    count = _options(name).get(CHUNKS)
    if count is None:
        return 0
    if place not in ("loop", "wave"):
        raise ScheduleError(
            f"{split_options(name)[0]} has one stage on each rank, {name!r} gives it another number",
            hint="leave the option out, or use interleaved_1f1b, which has as many as `-v` or `:v=` says",
        )
    if count < 1 or count != int(count):
        raise ScheduleError(f"{name}: {count:g} stages per rank", hint="give a whole number from 1 on")
    return int(count)


def shape_of(
    ranks: int,
    *,
    microbatches: int,
    chunks: int = 1,
    placement: tuple[int, ...] | None = None,
    stages: StageGraph | None = None,
    times: Times | None = None,
) -> Shape:
    """What a recipe is tried on: a chain in a loop with equal times, unless said otherwise."""
    where = placement or loop(ranks, chunks)
    graph = stages or chain(len(where))
    _refuse_bad_shape(graph, where, microbatches)
    return _shape("", graph, where, microbatches, times or Times())


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most micro-batches whose residuals it holds at once (until B or W); 0 in evaluation.

    >>> from pipeloom.ir.stages import chain
    >>> in_flight(build("1f1b", chain(3), (0, 1, 2), 8))
    (3, 2, 1)
    """
    if all(action.kind == F for row in schedule.rows for action in row):
        return (0,) * schedule.stages
    now = [0] * schedule.stages
    most = [0] * schedule.stages
    for row in schedule.rows:
        for action in row:
            if action.kind == F:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in (B, W):
                now[action.stage] -= 1
    return tuple(most)


def _key(name: str) -> str:
    if names_user_file(name):
        return name
    plain, options = split_options(name)
    key = plain.lower().replace("-", "_")
    key = key if key in FAMILIES else canonical(plain)  # what a user registers keeps its name
    return f"{key}:{options.lower()}" if options else key


def _from_file(file: Path) -> Entry:
    """An order that is given: its ranks, stages and micro-batches are those of the file."""
    schedule = read_schedule(file)

    def table(ranks: int) -> RankTable:
        if ranks != schedule.ranks:
            raise ScheduleError(
                f"{file} is for {schedule.ranks} ranks, not {ranks}", hint=f"use as many: -p {schedule.ranks}"
            )
        return schedule.placement

    def rows(shape: Shape) -> Schedule:
        if shape.microbatches != schedule.microbatches:
            raise ScheduleError(
                f"{file} is for {schedule.microbatches} micro-batches, not {shape.microbatches}",
                hint=f"use as many: -m {schedule.microbatches}",
            )
        return schedule

    return Entry(rows=rows, place="table", table=table, about="from a file")


def _family(name: str) -> Family | Entry:
    if name.endswith(LISTED):
        return _from_file(Path(name))
    if names_user_file(name):
        user_schedule = load_user_schedule(name)
        return (
            user_schedule
            if isinstance(user_schedule, Entry)
            else Entry(recipe=user_schedule, about="your own")
        )
    key = _key(name)
    if key not in FAMILIES:
        near = [canonical(found) for found in get_close_matches(key, _known_names(), n=1)]
        meant = f"did you mean {near[0]}? " if near else ""
        raise ScheduleError(
            f"no schedule is named {shown(name)}", hint=f"{meant}the schedules are {', '.join(names())}"
        )
    return FAMILIES[key]


def _known_names() -> list[str]:
    return [*FAMILIES, *(alias.lower() for others in ALIASES.values() for alias in others)]


def _refuse_bad_shape(stages: StageGraph, placement: tuple[int, ...], microbatches: int) -> None:
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} micro-batches", hint="use at least 1")
    count = len(stages.stages)
    if not placement or len(placement) != count:
        raise ScheduleError(
            f"the placement names {len(placement)} stages, the stage graph has {count}",
            hint="give one rank per stage",
        )
    if empty := sorted(set(range(max(placement) + 1)) - set(placement)):
        raise ScheduleError(
            f"rank {empty[0]} has no stage", hint="number the ranks from 0 without gaps, or use fewer ranks"
        )
    if min(placement) < 0:
        raise ScheduleError(f"a stage is placed on rank {min(placement)}", hint="number the ranks from 0")

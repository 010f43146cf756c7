"""The registry: name -> family of schedules. A family decides only the order; the rest is done here once."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Protocol

from ..ir.action import Action, B, F, I, W
from ..ir.check import check
from ..ir.errors import ScheduleError
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from . import forward_only, gpipe, one_f_one_b
from .clock import Rows


class Family(Protocol):
    """Makes one row of compute actions per rank, from placement[stage] = rank."""

    def __call__(self, stages: StageGraph, placement: tuple[int, ...], microbatches: int, /) -> Rows: ...


_FAMILIES: dict[str, Family] = {
    "forward_only": forward_only.rows,
    "gpipe": gpipe.rows,
    "1f1b": one_f_one_b.rows,
}


def names() -> tuple[str, ...]:
    """All schedules that `build` knows.

    >>> names()[:3]
    ('forward_only', 'gpipe', '1f1b')
    """
    return tuple(_FAMILIES)


def register(name: str, family: Family) -> None:
    """Make a family known by a name in small letters. Raises: ScheduleError if the name is taken."""
    key = _key(name)
    if key in _FAMILIES:
        raise ScheduleError(f"a schedule named {key!r} exists already", hint="choose another name")
    _FAMILIES[key] = family


def build(
    name: str, stages: StageGraph, placement: tuple[int, ...], microbatches: int,
    *, split_backward: bool = False,
) -> Schedule:  # fmt: skip
    """Build a schedule by name and check it.

    name: see `names`; capitals and `-` for `_` are fine.  placement: the rank of each stage.
    split_backward: every B becomes I and then W.
    Raises: ScheduleError if the name is unknown, the placement does not fit, or a rule is broken.

    >>> from pipeloom.ir.stages import chain
    >>> print(build("1f1b", chain(2), (0, 1), 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    family = _family(name)
    _refuse_bad_shape(stages, placement, microbatches)
    made = (tuple(row) for row in family(stages, placement, microbatches))
    rows = tuple(split(row) for row in made) if split_backward else tuple(made)
    schedule = Schedule(name=_key(name), microbatches=microbatches, placement=placement, rows=rows)
    check(schedule, stages)
    return schedule


def split(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Every B as I and, right after it, W: the gradient leaves earlier, and memory stays that of B."""
    parts: list[Action] = []
    for action in row:
        kinds = (I, W) if action.kind == B else (action.kind,)
        parts.extend(Action(action.stage, kind, action.microbatch) for kind in kinds)
    return tuple(parts)


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
    return name.lower().replace("-", "_")


def _family(name: str) -> Family:
    key = _key(name)
    if key not in _FAMILIES:
        near = get_close_matches(key, _FAMILIES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ScheduleError(
            f"no schedule is named {name!r}", hint=f"{meant}the schedules are {', '.join(names())}"
        )
    return _FAMILIES[key]


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

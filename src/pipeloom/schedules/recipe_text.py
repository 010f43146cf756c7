"""Orders that repeat, as the text of a Python file in the schedule language."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from .language.patterns import repeating
from .registry import shape_of

_TEXT = '''\
"""{title}, for {ranks} ranks and {stages} stages.

{figures}

Every rank runs its line of TURN again and again, each time one micro-batch further: 0F is the forward of
stage 0 for the micro-batch of the turn, 0B-3 the backward of the micro-batch three turns before. Edit it as
you like: every command checks it.

    pipeloom schedule show {file}:{name} -p {ranks} -m {microbatches}
"""

{imports}
TURN = (
{turn}
)
RANKS = ({placement})
"""For each stage its rank, or the ranks that run it together.{shards}"""
EDGES = [{edges}]
"""Which stage sends to which."""


def order(shape: Shape) -> Recipe:
    return Recipe(kinds={kinds}, rows=repeating(shape, TURN), fill=""{insert})


{name} = Entry(
    recipe=order,
    place="table",
    table=lambda ranks: RANKS,
    stages=dag({stages}, EDGES),
    about="{about}",
)
'''
IMPORTS = "from pipeloom.schedule_language import Entry, Recipe, Shape, dag, repeating\n"

MOST_TRIED = 64
"""Runs of actions, those in the middle of a row first, that are tried as its turn."""


def recipe_text(
    turn: Sequence[str],
    *,
    placement: Sequence[object],
    edges: Sequence[tuple[int, int]],
    kinds: Sequence[str],
    shards: str = "",
    imports: str = IMPORTS,
    insert: str = "",
    **words: object,
) -> str:
    """The text of a file that runs `turn` again and again (`patterns.repeating`).

    placement: of each stage.  kinds: "FB" or "FIW", of each stage.
    shards, imports, insert: pieces of Python, where they differ.  words: all others of `_TEXT`.
    """
    return _TEXT.format(
        turn="\n".join(f'    "{line}",' for line in turn),
        placement=", ".join(map(str, placement)) + ("," if len(placement) == 1 else ""),
        stages=len(placement),
        edges=", ".join(map(str, edges)),
        kinds=f'"{kinds[0]}"' if len(set(kinds)) == 1 else f"{tuple(kinds)}.__getitem__",
        shards=shards,
        imports=imports,
        insert=insert,
        **words,
    )


def turn_of_rows(schedule: Schedule, stages: StageGraph) -> list[str] | None:
    """The turn that gives exactly these rows; None if they do not repeat, or have what a turn cannot say.

    A turn has each stage's F and B (or I and W) once. Any run of so many actions in the middle of a row that
    has them all is a candidate: an action is as late as its micro-batch is behind the newest one.

    >>> from pipeloom.ir.schedule import parse_rows
    >>> from pipeloom.ir.stages import chain
    >>> rows = parse_rows(("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    >>> turn_of_rows(Schedule(name="", microbatches=3, placement=(0, 1), rows=rows), chain(2))
    ['0B-2 0F', '1F 1B']
    """
    columns = schedule.columns
    if schedule.pairs or schedule.slices > 1 or columns.copies or not columns.trains:
        return None
    shape = shape_of(microbatches=schedule.microbatches, placement=schedule.placement, stages=stages)
    rows = [[(a.stage, a.kind, a.microbatch) for a in row] for row in schedule.rows]
    turn = [""] * schedule.ranks
    for rank, row in enumerate(rows):
        size = len({(stage, kind) for stage, kind, _ in row})
        middle = (len(row) - size) / 2
        for first in sorted(range(len(row) - size + 1), key=lambda at: abs(at - middle))[:MOST_TRIED]:
            window = row[first : first + size]
            if len({(stage, kind) for stage, kind, _ in window}) < size:
                continue
            newest = max(microbatch for _, _, microbatch in window)
            words = [f"{s}{k}" + (f"-{newest - b}" if newest > b else "") for s, k, b in window]
            tried = ["" if other != rank else " ".join(words) for other in range(schedule.ranks)]
            if tuple(repeating(shape, tried)[rank]) == tuple(schedule.rows[rank]):
                turn[rank] = tried[rank]
                break
        else:
            return None
    return turn


def repeating_recipe(schedule: Schedule, stages: StageGraph, *, name: str = "mine") -> str | None:
    """A schedule as a file for any number of micro-batches; None if its rows do not repeat, or hold pairs,
    copies, slices or replicas of stages."""
    turn = turn_of_rows(schedule, stages) if stages.replicas == 1 else None
    if turn is None:
        return None
    whole = {action.stage for row in schedule.rows for action in row if action.kind == "B"}
    return recipe_text(
        turn,
        title="A schedule of my own",
        figures="Made in the studio.",
        file=f"{name}.py",
        name=name,
        about="my own",
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        ranks=schedule.ranks,
        edges=sorted(stages.between),
        kinds=["FB" if stage in whole else "FIW" for stage in range(schedule.stages)],
    )

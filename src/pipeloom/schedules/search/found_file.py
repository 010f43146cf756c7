"""A found schedule as a file: a schedule in the language, to be read, edited and used for any
micro-batches."""

from __future__ import annotations

from ...ir.errors import ScheduleError
from .orders import OrderCandidate
from .problem import SearchProblem
from .search import SearchResult

_TEXT = '''\
"""A schedule found by `pipeloom schedule search`, for {ranks} ranks and {stages} stages.

{figures}

Every rank runs its line of TURN again and again, each time one micro-batch further: 0F is the forward of
stage 0 for the micro-batch of the turn, 0B-3 the backward of the micro-batch three turns before. Edit it as
you like: every command checks it.

    pipeloom schedule show {name}:found -p {ranks} -m {microbatches}
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


found = Entry(
    recipe=order,
    place="table",
    table=lambda ranks: RANKS,
    stages=dag({stages}, EDGES),
    about="found by a search",
)
'''


def found_text(result: SearchResult, name: str = "found.py", declared_in: str = "") -> str:
    """The best repeating order of a search as a file's text. Raises: ScheduleError if none keeps to the
    limits."""
    problem, repeating = result.problem, result.repeating
    if repeating.repeating is None:
        raise ScheduleError(
            "no repeating order that was found keeps to the limits",
            hint="write rows instead, -o found.txt; or search longer, with --effort 4",
        )
    kinds = [
        "FIW" if problem.stages[problem.origin(s)].split else "FB" for s in range(len(problem.placed[1]))
    ]
    return _TEXT.format(
        name=name,
        ranks=problem.ranks,
        stages=len(problem.stages),
        microbatches=problem.microbatches,
        figures=_figures(result),
        turn="\n".join(f'    "{line}",' for line in turn_of(problem, repeating)),
        placement=", ".join(str(s.ranks[0] if len(s.ranks) == 1 else s.ranks) for s in problem.stages)
        + ("," if len(problem.stages) == 1 else ""),
        shards=""
        if all(len(stage.ranks) == 1 for stage in problem.stages)
        else f" On further ranks a stage has numbers from {len(problem.stages)} on.",
        edges=", ".join(f"({a}, {s})" for s, stage in enumerate(problem.stages) for a in stage.after),
        kinds=f'"{kinds[0]}"' if len(set(kinds)) == 1 else f"{tuple(kinds)}.__getitem__",
        imports=_imports(problem, declared_in),
        insert=", insert=OPERATIONS" if problem.operations else "",
    )


def turn_of(problem: SearchProblem, candidate: OrderCandidate) -> list[str]:
    assert candidate.repeating is not None
    period, first = candidate.repeating.period, candidate.repeating.first
    settled = list(first)
    for unit, needs in enumerate(problem.needs):
        settled[unit] = max([settled[unit], *(settled[p] for p in needs)])
    turns = [int(moment // period) for moment in settled]
    phases = [moment - turn * period for moment, turn in zip(settled, turns, strict=True)]
    base = min(turns)
    lines: list[list[str]] = [[] for _ in range(problem.ranks)]
    for unit in sorted(range(len(settled)), key=lambda u: (phases[u], u)):
        late = turns[unit] - base
        for rank, stage, kind in problem.actions(unit):
            lines[rank].append(f"{stage}{kind}" + (f"-{late}" if late else ""))
    return [" ".join(line) for line in lines]


def _figures(result: SearchResult) -> str:
    progress, repeating = result.progress, result.repeating
    text = f"With {result.problem.microbatches} micro-batches a step takes {repeating.step_s:g}."
    text += f" No order takes less than\n{progress.bound.seconds:g}: {progress.bound.why}."
    if result.best.step_s < repeating.step_s - 1e-9:
        text += f"\nAn order that does not repeat takes {result.best.step_s:g}: write it with -o found.txt."
    return text


def _imports(problem: SearchProblem, declared_in: str) -> str:
    names = "Entry, Recipe, Shape, dag, repeating"
    if not problem.operations:
        return f"from pipeloom.schedule_language import {names}\n"
    own = ", ".join(f'DECLARED["{operation.letters}"]' for operation in problem.operations)
    return (
        "from pathlib import Path\n\n"
        "from pipeloom.ir.operation import OPERATIONS as DECLARED\n"
        f"from pipeloom.schedule_language import {names}, load_file\n\n"
        f"load_file(Path({declared_in!r}))\nOPERATIONS = ({own},)\n"
    )

"""search_schedule: the fastest order for stages under a memory limit; and a found schedule as a file, to be
read, edited and used for any micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import floor, inf
from pathlib import Path
from typing import Any

from ...checks.schedules import check
from ...ir.errors import ConfigError, PlanError, ScheduleError, shown
from ...ir.plan import load_plan
from ...ir.schedule import Schedule
from ...ir.stages import StageGraph
from ...ir.text import LARGEST, parse_bytes, parse_toml, refuse_unknown
from ...ir.timeline import Timeline
from ...lowering.passes import lower
from ...simulator.simulate import simulate
from ...simulator.summary import summarise
from ..language.names import load_operations
from ..language.placements import loop, wave
from ..recipe_text import IMPORTS, recipe_text
from ..scenario import Scenario, between, load_work, wired
from .exact import MOST_ENTRIES, solver_installed
from .orders import OrderCandidate
from .problem import SearchProblem, SearchStage
from .search import Progress, SearchOptions, SearchResult, search_orders


def found_text(result: SearchResult, name: str = "found.py", declared_in: str = "") -> str:
    """The best repeating order of a search as a file's text. Raises: ScheduleError if none keeps to the
    limits."""
    problem, repeating = result.problem, result.repeating
    if repeating.repeating is None:
        raise ScheduleError(
            "no repeating order that was found keeps to the limits",
            hint="write rows instead, -o found.txt; or search longer, with --effort 4",
        )
    origins = map(problem.origin, range(len(problem.placed[1])))
    return recipe_text(
        turn_of(problem, repeating),
        title="A schedule found by `pipeloom schedule search`",
        figures=_figures(result),
        file=name,
        name="found",
        about="found by a search",
        placement=[s.ranks[0] if len(s.ranks) == 1 else s.ranks for s in problem.stages],
        microbatches=problem.microbatches,
        ranks=problem.ranks,
        edges=[(a, s) for s, stage in enumerate(problem.stages) for a in stage.after],
        kinds=["FIW" if problem.stages[stage].split else "FB" for stage in origins],
        shards=""
        if all(len(stage.ranks) == 1 for stage in problem.stages)
        else f" On further ranks a stage has numbers from {len(problem.stages)} on.",
        imports=_imports(problem, declared_in),
        insert=", insert=OPERATIONS" if problem.operations else "",
    )


def turn_of(problem: SearchProblem, candidate: OrderCandidate) -> list[str]:
    assert candidate.repeating is not None
    period, first = candidate.repeating.period, candidate.repeating.moments
    settled = list(first)
    for unit, needs in enumerate(problem.needs):
        settled[unit] = max([settled[unit], *(settled[p] for p in needs)])
    turns = [floor(moment / period) for moment in settled]  # not `//`: 1.0 // 0.1 is 9
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
    if not problem.operations:
        return IMPORTS
    own = ", ".join(f'DECLARED["{operation.letters}"]' for operation in problem.operations)
    return (
        "from pathlib import Path\n\n"
        "from pipeloom.ir.operation import OPERATIONS as DECLARED\n"
        f"{IMPORTS[:-1]}, load_file\n\n"
        f"load_file(Path({declared_in!r}))\nOPERATIONS = ({own},)\n"
    )


KEYS = ("name", "F", "B", "I", "W", "bytes", "after", "ranks")

FINE = 1 << 20
"""Bytes that a unit of memory stands for where sizes are small numbers: residuals are counted in bytes."""


@dataclass(frozen=True, kw_only=True)
class StagesToSchedule:
    """stages: those without ranks get some from the search.  unit: bytes that the number 1 stands for, in
    sizes and limits.  memory: the file's own limit, or none."""

    stages: tuple[SearchStage, ...]
    ranks: int
    transfer_s: float = 0.0
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    unit: int = 1
    memory: str = ""

    def caps(self, memory: str) -> tuple[float, ...]:
        parts = [part.strip() for part in (memory or self.memory).split(",") if part.strip()]
        if not parts:
            return ()
        if len(parts) not in (1, self.ranks):
            raise ConfigError(
                f"--memory has {len(parts)} limits for {self.ranks} ranks",
                hint="give one for all ranks, or one per rank with commas",
            )
        if not any(stage.residual_bytes for stage in self.stages):
            raise ConfigError(
                f"--memory {memory or self.memory} limits residuals, and no stage has any",
                hint="write bytes = 1 at each stage to count micro-batches, or what its residuals take",
            )
        return tuple(_size(part, self.unit, "--memory") for part in parts * (self.ranks // len(parts)))


def stages_of(document: Mapping[str, Any], what: str, ranks: int = 0) -> StagesToSchedule:
    """Stages of plain values, as a TOML file has them: see docs/schedules.md.

    ranks: how many there are, where stages leave theirs out and the document does not say.
    Raises: ConfigError that names the stage and the key that is wrong.

    >>> both = [{"F": 1, "B": 2, "bytes": 1, "ranks": 0}, {"F": 1, "I": 1, "W": 1, "ranks": [0, 1]}]
    >>> made = stages_of({"stage": both, "transfer": 0.5}, "an example")
    >>> made.stages[1].after, made.stages[1].ranks, made.caps("4")
    ((0,), (0, 1), (4194304.0, 4194304.0))
    """
    known = ("stage", "edge", "transfer", "ranks", "memory")
    refuse_unknown(document, known, what)
    tables = document.get("stage")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"{what} has no stages", hint="write a [[stage]] with F and B for each")
    names = {str(table.get("name", s)): s for s, table in enumerate(tables)}
    if len(names) < len(tables):
        raise ConfigError(f"{what}: two stages have the same name", hint="name each stage once")
    sizes = [table.get("bytes", 0) for table in tables]
    small = all(isinstance(size, int | float) and size < FINE for size in sizes)
    unit = FINE if small else 1
    stages = tuple(_stage(table, s, names, unit) for s, table in enumerate(tables))
    most = max((rank for stage in stages for rank in stage.ranks), default=-1) + 1
    asked = document.get("ranks", 0)
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        raise ConfigError(f"{what}: ranks is {asked!r}", hint="write how many there are, as in ranks = 4")
    count = ranks or asked or most
    if count < 1:
        raise ConfigError(
            f"{what} does not say how many ranks there are", hint="give stages ranks, or say -p 4"
        )
    if count < most:
        raise ConfigError(f"{what} uses rank {most - 1} of {count} ranks", hint=f"use -p {most}")
    if ranks > most and all(stage.ranks for stage in stages):
        raise ConfigError(f"{what} names {most} ranks, -p says {ranks}", hint="leave out -p")
    return StagesToSchedule(
        stages=stages,
        ranks=count,
        transfer_s=_seconds(document.get("transfer", 0.0), f"{what}: transfer"),
        edge_s=_edges(document.get("edge", []), names, stages),
        unit=unit,
        memory=str(document.get("memory", "")),
    )


def stages_of_plan(path: Path) -> StagesToSchedule:
    """The stages of one pipeline of a saved plan as a chain, each on its rank, with their times and
    residuals. Raises: ConfigError if the file is none, or if its stages run side by side: what they read is
    not in it.
    """
    plan = load_plan(path)
    if any(key.startswith("branches.") for key in plan.notes):
        raise ConfigError(
            f"the stages of {path} are no chain, and a plan does not say which reads which",
            hint="write a TOML file with a [[stage]] for each and what it runs `after`",
        )
    placement = plan.placement[: len(plan.stages)]  # of the first replica
    ranks = sorted(set(placement))
    sizes = load_work(path).residual_bytes or (1.0,) * len(plan.stages)
    stages = tuple(
        SearchStage(
            name=str(s),
            forward_s=stage.forward_s,
            input_grad_s=stage.input_grad_s + stage.recompute_s,
            weight_grad_s=stage.weight_grad_s,
            split=True,
            residual_bytes=sizes[s],
            after=(s - 1,) if s else (),
            ranks=(ranks.index(placement[s]),),
        )
        for s, stage in enumerate(plan.stages)
    )
    return StagesToSchedule(stages=stages, ranks=len(ranks))


def _stage(table: Mapping[str, Any], s: int, names: Mapping[str, int], unit: int) -> SearchStage:
    what = f"stage {table.get('name', s)}"
    refuse_unknown(table, KEYS, what)
    split = "I" in table or "W" in table
    if "F" not in table or ("B" in table) == split or (split and not {"I", "W"} <= set(table)):
        times = ", ".join(key for key in ("F", "B", "I", "W") if key in table) or "none"
        raise ConfigError(f"{what} has the times {times}", hint="give F and B, or F, I and W")
    whole = 0.0 if split else _seconds(table["B"], f"{what}: B")
    after = table.get("after", [s - 1] if s else [])
    return SearchStage(
        name=str(table.get("name", s)),
        forward_s=_seconds(table["F"], f"{what}: F"),
        input_grad_s=_seconds(table["I"], f"{what}: I") if split else whole / 2,
        weight_grad_s=_seconds(table["W"], f"{what}: W") if split else whole / 2,
        split=split,
        residual_bytes=_size(str(table["bytes"]), unit, f"{what}: bytes") if table.get("bytes") else 0.0,
        after=tuple(_stage_named(one, names, what) for one in _listed(after)),
        ranks=tuple(_rank(one, what) for one in _listed(table.get("ranks", []))),
    )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _rank(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 4096:
        raise ConfigError(f"{what} is on rank {value!r}", hint="ranks are numbered from 0")
    return value


def _stage_named(value: Any, names: Mapping[str, int], what: str) -> int:
    if str(value) in names and not isinstance(value, bool):
        return names[str(value)]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    raise ConfigError(
        f"{what} comes after {value!r}, which is no stage", hint=f"the stages are {', '.join(names)}"
    )


def _edges(
    tables: Any, names: Mapping[str, int], stages: Sequence[SearchStage]
) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict) or set(table) != {"from", "to", "transfer"}:
            raise ConfigError(f"an [[edge]] has {table!r}", hint='write from = "a", to = "b", transfer = 0.5')
        source, target = (_stage_named(table[key], names, "an edge") for key in ("from", "to"))
        if source not in stages[target].after:
            raise ConfigError(
                f"stage {table['to']} does not come after {table['from']}", hint="add it to after="
            )
        found[source, target] = _seconds(table["transfer"], "an edge's transfer")
    return found


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        raise ConfigError(f"{what} is {shown(value)}", hint=f"times are numbers from 0 to {LARGEST:g}")
    return float(value)


def _size(text: str, unit: int, what: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        return float(parse_bytes(text, what=what))
    if not 0 <= amount < LARGEST:
        raise ConfigError(f"{what} is {shown(text)}", hint=f"sizes are numbers from 0 to {LARGEST:g}")
    return amount * unit


SHORTEST = ("step", "span")


@dataclass(frozen=True, kw_only=True)
class FoundSchedule:
    schedule: Schedule
    stages: StageGraph
    timeline: Timeline = field(repr=False)
    result: SearchResult = field(repr=False)
    peaks: tuple[float, ...]
    declared_in: str = ""

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def span_s(self) -> float:
        return summarise(self.timeline).span_s

    @property
    def shortest(self) -> str:
        return self.result.problem.shortest

    @property
    def left_out(self) -> str:
        few = self.result.problem.entries <= MOST_ENTRIES  # as the engine is asked about
        if self.result.ended == "optimal" or not few or solver_installed():
            return ""
        return "engine exact was left out: OR-tools is not installed (pip install pipeloom[search])"

    @property
    def bound_s(self) -> float:
        return self.result.progress.bound.seconds

    @property
    def gap(self) -> float:
        took = self.span_s if self.shortest == "span" else self.step_s
        return max(0.0, took / self.bound_s - 1) if self.bound_s else 0.0

    def text(self, name: str) -> str:
        if name.endswith(".py"):
            return found_text(self.result, name, self.declared_in)
        if name.endswith(".txt"):
            return f"{self.schedule}\n"
        raise ConfigError(f"cannot write a schedule as {name}", hint="end the name in .py or .txt")

    def figures(self) -> dict[str, Any]:
        progress = self.result.progress
        return {
            "step_s": self.step_s,
            "span_s": self.span_s,
            "repeating_step_s": self.result.repeating.step_s,
            "bound_s": self.bound_s,
            "bound": progress.bound.name,
            "bound_why": progress.bound.why,
            "gap": self.gap,
            "engine": self.result.best.engine,
            "ended": self.result.ended,
            "left_out": self.left_out,
            "evaluations": progress.evaluations,
            "seconds": progress.seconds,
            "peaks": list(self.peaks),
            "ranks": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
            "placement": list(self.schedule.placement),
            "rows": str(self.schedule).splitlines(),
        }


def search_schedule(
    stages: Path | str | Mapping[str, Any],
    microbatches: int = 8,
    *,
    memory: str = "",
    ranks: int = 0,
    operations: Path | None = None,
    shortest: str = "step",
    options: SearchOptions | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> FoundSchedule:
    """Search for the fastest order of stages within a limit, and say how far from the best it may be.

    stages: a TOML file of stages, a saved plan (.json), or what such a TOML file says, as plain values: for
    each its times per micro-batch (in seconds or any unit), residuals, ranks; see docs/schedules.md.
    microbatches: per step.
    memory: most residuals of a rank in the unit of the stages' `bytes`, or with a unit as 3GiB; or one per
        rank with commas.  ranks: how many there are, where stages do not name theirs.
    operations: a Python file that declares operations, which are placed too.
    shortest: "step"; or "span", the longest time from a rank's first action to its last.
    options: effort, time limit, seed, engines.  report: called now and then with what is known so far.
    Returns: the schedule, checked and simulated, with a bound below which no order can be.
    Raises: ConfigError for wrong stages or another `shortest`; ScheduleError for no stage or no
        micro-batch; PlanError if no order keeps to the limits.
    Source: the idea is FlexPipe's (arXiv 2510.05112), of which only the abstract was available; each engine
    names its own.

    >>> towers = [{"F": 1, "B": 3, "bytes": 1, "ranks": rank} for rank in range(3)]
    >>> found = search_schedule({"stage": towers}, 8, memory="3")
    >>> found.step_s, found.gap, found.result.progress.bound.name
    (40.0, 0.0, 'busiest rank')
    """
    if shortest not in SHORTEST:
        raise ConfigError(f"shortest={shortest!r} is no length of a step", hint='use "step" or "span"')
    asked = _asked(stages, ranks)
    declared = () if operations is None else load_operations(operations)
    options = options or SearchOptions()
    problem = partial(
        SearchProblem,
        microbatches=microbatches,
        transfer_s=asked.transfer_s,
        edge_s=asked.edge_s,
        caps=asked.caps(memory),
        operations=declared,
        shortest=shortest,
        unit=asked.unit,
    )
    if all(stage.ranks for stage in asked.stages):
        result = search_orders(problem(stages=asked.stages), options, report)
    else:
        result = search_placed(problem, asked.stages, asked.ranks, options, report)
    return prove_search(result, declared_in="" if operations is None else str(operations.resolve()))


def _asked(stages: Path | str | Mapping[str, Any], ranks: int) -> StagesToSchedule:
    if isinstance(stages, Mapping):
        return stages_of(stages, "what was given", ranks)
    path = Path(stages)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", hint="name a plan, or a TOML file of stages"
        ) from None
    if path.suffix == ".json" or text.startswith("{"):
        planned = stages_of_plan(path)
        if ranks not in (0, planned.ranks):
            raise ConfigError(
                f"the stages of {path} are placed on {planned.ranks} ranks, -p asks for {ranks}",
                hint=f"leave -p out, or plan the model for {ranks} ranks",
            )
        return planned
    return stages_of(parse_toml(text, str(path)), str(path), ranks)


def prove_search(result: SearchResult, *, declared_in: str = "") -> FoundSchedule:
    problem = result.problem
    graph, placement = problem.placed
    schedule = Schedule(
        name="found",
        microbatches=problem.microbatches,
        placement=placement,
        rows=problem.rows([int(entry) for entry in result.best.order]),
    )
    check(schedule, graph)
    transfer_s: float | tuple[float, ...] = problem.transfer_s
    if problem.edge_s:
        transfer_s = tuple(problem.edge_s.get(edge, problem.transfer_s) for edge in between(graph))
    costs = problem.shape.costs
    graph, cluster = wired(graph, schedule.ranks, Scenario(transfer_s=transfer_s), costs)
    timeline = simulate(lower(schedule, graph), graph, costs, cluster)
    return FoundSchedule(
        schedule=schedule,
        stages=graph,
        timeline=timeline,
        result=result,
        declared_in=declared_in,
        peaks=tuple(peak / problem.unit for peak in result.best.peaks),
    )


SHORT = 0.2


def tables(stages: Sequence[SearchStage], ranks: int) -> dict[str, tuple[SearchStage, ...]]:
    """Name -> the stages with ranks, for those without: neighbours together, in a loop, in a wave; on all
    ranks, and on those that no other stage is on.

    Stages go in the order in which they are given, which is that of the data. What names its ranks keeps
    them.

    Raises: ScheduleError if there are fewer such stages than ranks that no other stage is on.
    """
    free = [s for s, stage in enumerate(stages) if not stage.ranks]
    taken = {r for stage in stages for r in stage.ranks}
    untaken = sorted(set(range(ranks)) - taken)
    if len(free) < len(untaken):
        raise ScheduleError(
            f"{len(free)} stages without ranks for {ranks} ranks", hint="use fewer ranks, or more stages"
        )
    result: dict[str, tuple[SearchStage, ...]] = {}
    # Over all ranks the stages may leave one empty; over those that are empty, they do not.
    for these, of in ((list(range(ranks)), ""), (untaken, " of their own")):
        if not these:
            continue
        chunks = -(-len(free) // len(these))
        found = {
            "neighbours": _neighbours([stages[s] for s in free], len(these)),
            "loop": loop(len(these), chunks),
            "wave": wave(len(these), chunks),
        }
        for name, where in found.items():
            rank = {s: these[at] for s, at in zip(free, where, strict=False)}
            placed = tuple(
                replace(stage, ranks=(rank[s],)) if s in rank else stage for s, stage in enumerate(stages)
            )
            if taken.union(rank.values()) >= set(range(ranks)) and placed not in result.values():
                result[name + of] = placed
    return result


def _neighbours(stages: Sequence[SearchStage], ranks: int) -> list[int]:
    """Runs of stages, so that the busiest is as short as possible; every rank has one while there are enough.

    longest[k][s]: of the first s stages on k ranks = min over t of max(longest[k-1][t], sum of t..s)
    """
    work = [stage.forward_s + stage.backward_s for stage in stages]
    count = len(work)
    ranks = min(ranks, count)
    longest = [[inf] * (count + 1) for _ in range(ranks + 1)]
    begin = [[0] * (count + 1) for _ in range(ranks + 1)]
    longest[0][0] = 0.0
    for k in range(1, ranks + 1):
        for s in range(k, count + 1):
            for t in range(k - 1, s):
                busiest = max(longest[k - 1][t], sum(work[t:s]))
                if busiest < longest[k][s]:
                    longest[k][s], begin[k][s] = busiest, t
    where = [0] * count
    end = count
    for k in range(ranks, 0, -1):
        where[begin[k][end] : end] = [k - 1] * (end - begin[k][end])
        end = begin[k][end]
    return where


def search_placed(
    problem: Callable[..., SearchProblem],
    stages: Sequence[SearchStage],
    ranks: int,
    options: SearchOptions,
    report: Callable[[Progress], None],
) -> SearchResult:
    """The best of all placements: the one that a short search likes best is searched in full."""
    best: SearchResult | None = None
    refused: PlanError | None = None
    short = replace(options, effort=options.effort * SHORT)
    for placed in tables(stages, ranks).values():
        try:
            found = search_orders(problem(stages=placed), short, report)
        except PlanError as error:
            refused = error
            continue
        if best is None or found.best.cost_s < best.best.cost_s:
            best = found
        if found.ended in ("interrupted", "time limit"):
            return best
    if best is None:
        assert refused is not None
        raise refused
    full = search_orders(best.problem, options, report)
    return full if full.best.cost_s <= best.best.cost_s else best

"""Searching for a schedule: the search itself is in `schedules.search`; here its result is proved and
simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from ..checks.schedules import check
from ..ir.cluster import Cluster, Device, Link
from ..ir.errors import ConfigError
from ..ir.operation import Operation
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from ..ir.timeline import Timeline
from ..lowering.passes import lower
from ..schedules.language.user_files import load_file
from ..schedules.search.choose_ranks import search_placed
from ..schedules.search.engines.exact import solver_installed
from ..schedules.search.found_file import found_text
from ..schedules.search.problem import SearchProblem, SearchStage
from ..schedules.search.search import Progress as SearchProgress, SearchOptions, SearchResult, search_orders
from ..simulator.simulate import simulate
from ..simulator.summary import summarise
from .edges import between
from .microbatch_times import with_transfers
from .search_stages import StagesToSchedule, read_stages, stages_of, stages_of_plan

SHORTEST = ("step", "span")


@dataclass(frozen=True, kw_only=True)
class FoundSchedule:
    """What a search found, proved and simulated.

    step_s: of `timeline`, the simulator's word.  bound_s, bound: no step, or no span, is shorter, and why.
    gap: by which share of the bound it may at most be improved.  peaks: most residuals per rank, in the
    file's unit.
    """

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
        """The longest time from a rank's first action to its last."""
        return summarise(self.timeline).span_s

    @property
    def shortest(self) -> str:
        """What was to be short: "step" or "span"."""
        return self.result.problem.shortest

    @property
    def left_out(self) -> str:
        """Why engines that could have found more did not run, in a sentence; empty if all ran."""
        if self.result.ended == "optimal" or solver_installed():
            return ""
        return (
            "engines kernel and exact were left out: OR-tools is not installed (pip install pipeloom[search])"
        )

    @property
    def bound_s(self) -> float:
        return self.result.progress.bound.seconds

    @property
    def gap(self) -> float:
        took = self.span_s if self.shortest == "span" else self.step_s
        return max(0.0, took / self.bound_s - 1) if self.bound_s else 0.0

    def text(self, name: str) -> str:
        """As a file of this name: ending in .py a schedule in the language, in .txt its rows."""
        if name.endswith(".py"):
            return found_text(self.result, name, self.declared_in)
        if name.endswith(".txt"):
            return f"{self.schedule}\n"
        raise ConfigError(f"cannot write a schedule as {name}", hint="end the name in .py or .txt")

    def figures(self) -> dict[str, Any]:
        """What `--json` prints."""
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
    report: Callable[[SearchProgress], None] = lambda progress: None,
) -> FoundSchedule:
    """Search for the fastest order of stages within a limit, and say how far from the best it may be.

    stages: a TOML file of stages, a saved plan (.json), or what such a TOML file says, as plain values: for
    each its times per micro-batch (in seconds or any unit), residuals, ranks; see docs/schedule-search.md.
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
    in `schedules/search/engines` names its own.

    >>> towers = [{"F": 1, "B": 3, "bytes": 1, "ranks": rank} for rank in range(3)]
    >>> found = search_schedule({"stage": towers}, 8, memory="3")
    >>> found.step_s, found.gap, found.result.progress.bound.name
    (40.0, 0.0, 'busiest rank')
    """
    if shortest not in SHORTEST:
        raise ConfigError(f"shortest={shortest!r} is no length of a step", hint='use "step" or "span"')
    asked = _asked(stages, ranks)
    declared = () if operations is None else _declared_in(operations)
    caps = asked.caps(memory)
    options = options or SearchOptions()

    def problem(placed: tuple[SearchStage, ...]) -> SearchProblem:
        return replace(asked.problem(placed, microbatches, caps, declared), shortest=shortest)

    if all(stage.ranks for stage in asked.stages):
        result = search_orders(problem(asked.stages), options, report)
    else:
        result = search_placed(problem, asked.stages, asked.ranks, options, report)
    return prove_search(
        result, asked.unit, declared_in="" if operations is None else str(operations.resolve())
    )


def _declared_in(path: Path) -> tuple[Operation, ...]:
    found = tuple(o for o in vars(load_file(path)).values() if isinstance(o, Operation))
    if not found:
        raise ConfigError(f"{path} declares no operation", hint="write NAME = declare(Operation(...)) in it")
    return found


def _asked(stages: Path | str | Mapping[str, Any], ranks: int) -> StagesToSchedule:
    if isinstance(stages, Mapping):
        return stages_of(stages, "what was given", ranks)
    path = Path(stages)
    return stages_of_plan(path) if path.suffix == ".json" else read_stages(path, ranks)


def prove_search(result: SearchResult, unit: float = 1.0, *, declared_in: str = "") -> FoundSchedule:
    """Check what a search found by every rule, and simulate it. unit: of sizes, in bytes."""
    problem = result.problem
    graph, placement = problem.placed
    schedule = Schedule(
        name="found",
        microbatches=problem.microbatches,
        placement=placement,
        rows=problem.rows([int(entry) for entry in result.best.order]),
    )
    check(schedule, graph)
    graph, timeline = _simulated(problem, schedule, graph)
    return FoundSchedule(
        schedule=schedule,
        stages=graph,
        timeline=timeline,
        result=result,
        declared_in=declared_in,
        peaks=tuple(peak / unit for peak in result.best.peaks),
    )


def _simulated(problem: SearchProblem, schedule: Schedule, graph: StageGraph) -> tuple[StageGraph, Timeline]:
    """The stages with messages that take the seconds that were given, and the step."""
    link = Link(bandwidth_bytes_per_s=inf, latency_s=problem.transfer_s)
    if problem.edge_s:
        seconds = tuple(problem.edge_s.get(edge, problem.transfer_s) for edge in between(graph))
        graph, bandwidth = with_transfers(graph, seconds)
        link = Link(bandwidth_bytes_per_s=bandwidth)
    device = Device(name="any", memory_bytes=1)
    cluster = Cluster(devices=(device,) * schedule.ranks, within_node=link)
    costs = problem.shape.costs
    return graph, simulate(lower(schedule, graph), graph, costs, cluster)

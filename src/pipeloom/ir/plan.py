"""Plan: everything the runtime needs to know, in one JSON file.

A plan for one pipeline becomes one for several side by side, each with its share of the micro-batches:

    one pipeline    stage s on rank p(s)
    width W         stage s of replica r on rank p(s) * W + r, and numbered r * S + s, for S stages

Replicas of a stage are on neighbouring ranks, which sum their gradients: these are the ranks that share a
node, or a faster link. What a replica sends to the next stage goes W ranks further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from .action import Action
from .errors import ConfigError, PlanError, shown
from .graph import OpGraph
from .memory_policy import MemoryPolicy
from .schedule import Schedule, parse_pairs, parse_rows, rows_text
from .stages import StageGraph, cut, replicate
from .steady import SteadyStep, parse_steady
from .text import load_noun, odd_figure, save_noun
from .weight_policies import FLUSH, WEIGHT_POLICIES, Updates

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Predicted bytes of one stage on its device, by kind.

    residuals: for all micro-batches in flight at the peak.  boundary: send, receive and gradient
    buffers of values that cross.  transient: scratch of the heaviest action.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    residuals: int = 0
    boundary: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind.name) for kind in fields(self))


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: its ops, and what it is predicted to take for one micro-batch (seconds, bytes).

    recompute_s: making again what the forward dropped.  offload_s, reload_s: copies to the host and back,
        which run beside computing.  turn_s: how long a micro-batch occupies the stage, with what of
        transfers and copies does not hide behind computing.
    kept_bytes, recomputed_bytes, offloaded_bytes: residuals by what becomes of them.
    """

    ops: tuple[str, ...]
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    offload_s: float = 0.0
    reload_s: float = 0.0
    turn_s: float = 0.0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    offloaded_bytes: int = 0
    memory: StageMemory = field(default_factory=StageMemory)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model trains on one cluster.

    schema: version of the file's form.  graph: fingerprint of the OpGraph.
    planner: name of the strategy that made it.
    stages: in the order of the data, each with its ops and figures in seconds and bytes.
    schedule: its name.  schedule_rows: one line of actions per rank; of weights that are updated without a
        flush those of the step that repeats, see `ir.steady`.
    microbatches: per step, of all replicas together.  microbatch_size: rows of each.
    batch: shapes it was made for (see Profile.batch).
    caps: bytes each rank may hold, empty for no cap.  peaks: bytes that each holds in the simulated step.
    memory: what becomes of the residuals of each stage.
    weights: name of the policy by which they are updated, see `ir.weight_policies`.
    delay_correction, warm_up_with_flush: of updates without a flush, see `Updates`.
    clips: planned for gradients that are clipped by their norm over all ranks.
    master_weights: planned for float32 copies of parameters of lower precision, in which they are updated.
    shard_optimizer: replicas share out the optimizer's state (`ir.weight_policies`).
    placement: the rank of each stage; one that is several times as long as the stages places replicas of
        them, each with its share of the micro-batches (see `ir.stages`).
    width: pipelines side by side; a schedule of two directions has replicas in one of them.
    split_words: weights that are cut by words, see `tracer/split_words.py`: FQN -> in how many parts.
    modules: of each module that other engines know as a whole, by FQN, its first and its last op.
    notes: what else its planner has to say, by subject.

    Raises: PlanError if `memory` says something about a stage that the plan does not have; ValueError for
        weights by no known policy, of which `load_plan` makes a ConfigError.

    >>> plan = Plan(
    ...     graph="6154b6a536dd02a9",
    ...     planner="by hand",
    ...     stages=(StagePlan(ops=("linear", "tanh")), StagePlan(ops=("linear_1", "square", "mean"))),
    ...     placement=(0, 1),
    ...     schedule="gpipe",
    ...     schedule_rows=("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"),
    ...     microbatches=2,
    ...     microbatch_size=4,
    ... )
    >>> print(plan.as_schedule)
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """

    schema: int = SCHEMA
    graph: str
    planner: str
    stages: tuple[StagePlan, ...]
    placement: tuple[int, ...]
    schedule: str
    schedule_rows: tuple[str, ...]
    microbatches: int
    microbatch_size: int = 1
    batch: tuple[str, ...] = ()
    caps: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    weights: str = FLUSH
    delay_correction: float = 0.0
    warm_up_with_flush: int = 0
    clips: bool = False
    master_weights: bool = False
    shard_optimizer: bool = False
    width: int = 1
    predicted_step_s: float = 0.0
    split_words: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory.require_stages(len(self.stages))
        if self.weights not in WEIGHT_POLICIES:
            raise ValueError(f"Invalid enum value {self.weights!r} - at `$.weights`")  # as msgspec's own

    @cached_property
    def replicas(self) -> int:
        """How often the stages are placed. Raises: PlanError if not evenly, or there are none."""
        if not self.stages:
            raise PlanError("this plan has no stages", hint="plan again")
        times, rest = divmod(len(self.placement), len(self.stages))
        if rest or times < 1 or self.microbatches % times:
            raise PlanError(
                f"a placement of {len(self.placement)} stages and {self.microbatches} micro-batches for a "
                f"plan of {len(self.stages)} stages",
                hint="place every stage equally often, and let that number divide the micro-batches",
            )
        if self.width not in (1, times):
            raise PlanError(
                f"a plan of width {self.width} that places each stage {times} times",
                hint=f"plan again, with --replicas {times}",
            )
        return times

    @property
    def ranks(self) -> int:
        """How many ranks it is for, those of all replicas together."""
        return len(set(self.placement))

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Op -> its stage."""
        return {op: index for index, stage in enumerate(self.stages) for op in stage.ops}

    def microbatches_on(self, rank: int) -> int:
        """How many micro-batches of a step run through the stages of `rank`, which needs the inputs of these
        only. Raises: PlanError as `replicas`."""
        return len(self.replicas_on(rank)) * (self.microbatches // self.replicas)

    def replicas_on(self, rank: int) -> frozenset[int]:
        """The numbers of the replicas that `rank` has stages of, from 0. Raises: PlanError as `replicas`."""
        count = len(self.stages)
        return frozenset(stage // count for stage, home in enumerate(self.placement) if home == rank)

    @property
    def updates(self) -> Updates | None:
        """When weights change in a pipeline that does not drain between two steps; None for one that does.
        Raises: PlanError as `replicas`."""
        if WEIGHT_POLICIES[self.weights].flushes:
            return None
        return Updates(
            policy=self.weights,
            every=self.microbatches // self.replicas,
            flushed=self.warm_up_with_flush,
            correction=self.delay_correction,
        )

    @cached_property
    def steady(self) -> SteadyStep | None:
        """The step that such a pipeline repeats; None for one that drains. Raises: PlanError as `replicas`;
        ScheduleError if the rows hold none."""
        if self.updates is None:
            return None
        return parse_steady(
            self.schedule_rows,
            name=self.schedule,
            microbatches=self.updates.every,
            placement=self.placement,
        )

    @cached_property
    def as_schedule(self) -> Schedule:
        """The order of each rank; `microbatches` there is what each replica runs. Several steps of a pipeline
        that does not drain between them.

        Raises: PlanError as `replicas`; ScheduleError if the rows cannot be read.
        """
        if self.steady is not None:
            return self.steady.unrolled
        return Schedule(
            name=self.schedule,
            microbatches=self.microbatches // self.replicas,
            placement=self.placement,
            rows=parse_rows(self.schedule_rows),
            pairs=parse_pairs(self.schedule_rows),
        )

    def replicated(self, stages: StageGraph) -> StageGraph:
        """All stages that the schedule runs: the `stages` of the cut, or replicas of them side by side.
        Raises: PlanError as `replicas`; CutError for stages that are replicas already."""
        return stages if self.replicas == 1 else replicate(stages, self.replicas)

    def stage_graph(self, graph: OpGraph) -> StageGraph:
        """Cut `graph` as planned.

        Raises: PlanError if the plan was made for another model, has an op twice, one that the model has not,
            or a stage without ops; CutError if its stages are no cut of it.
        """
        if graph.fingerprint != self.graph:
            raise PlanError(
                f"this plan was made for model {shown(self.graph)}, not for {graph.name} "
                f"({graph.fingerprint})",
                hint="plan again for this model, or pass the model the plan was made for, as it was: a run "
                "is resumed with that only",
            )
        known = {op.name for op in graph.ops}
        for op, times in Counter(op for stage in self.stages for op in stage.ops).items():
            if times > 1 or op not in known:
                wrong = f"{times} times" if times > 1 else "and not in the model"
                raise PlanError(f"op {shown(op)} is in the plan {wrong}", hint="give each op one stage")
        if empty := [index for index, stage in enumerate(self.stages) if not stage.ops]:
            raise PlanError(f"stage {empty[0]} of the plan has no ops", hint="give it some, or plan again")
        return cut(graph, self.stage_of)

    def save(self, path: Path | str) -> None:
        """Write the plan to `path` as JSON, whole or not at all; `load_plan` reads it.

        Raises: ConfigError if the disk refuses.
        """
        save_noun(self, Path(path))


def _impossible(plan: Plan) -> str | None:
    """The first number of a plan that no plan can have, or numbers of ranks that it is not for."""
    if (odd := odd_figure(vars(plan))) is not None:
        return f"{odd[0]} is {shown(odd[1])}"
    if none := [name for name in ("microbatches", "microbatch_size", "width") if not getattr(plan, name)]:
        return f"{none[0]} is 0"
    for name, each in (("caps", plan.caps), ("peaks", plan.peaks)):
        if len(each) not in (0, plan.ranks):
            return f"{name} are of {len(each)} ranks, the plan is for {plan.ranks}"
    return None


def load_plan(path: Path | str) -> Plan:
    """Read a plan, which somebody may have edited.

    path: of the JSON file that `Plan.save` or `pipeloom plan -o` wrote.
    Raises: ConfigError if it is unreadable, has a key that no plan has, or a number that cannot be;
        PlanError if it is of another schema version, or treats residuals of a stage that it does not have.

    >>> from tempfile import TemporaryDirectory
    >>> stage = StagePlan(ops=("linear", "mean"))
    >>> rows = ("0F0 0B0",)
    >>> plan = Plan(graph="0f", planner="by hand", stages=(stage,), placement=(0,), schedule="1f1b",
    ...             schedule_rows=rows, microbatches=1)
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "plan.json"
    ...     plan.save(file)
    ...     load_plan(file) == plan
    True
    """
    plan = load_noun(Path(path), Plan, strict=True)
    if wrong := _impossible(plan):
        raise ConfigError(f"{path}: {wrong}", hint="numbers are 0 or more, caps and peaks one for each rank")
    if plan.schema != SCHEMA:
        raise PlanError(
            f"{path} has plan schema {plan.schema}, this pipeloom reads {SCHEMA}",
            hint="plan again with this version",
        )
    return plan


def widened(plan: Plan, width: int) -> Plan:
    """So many pipelines side by side, each as a plan says.

    Caps and peaks are those of the plan's rank for all its replicas, and the predicted step is the plan's:
    sums over replicas are not in it.
    Raises: PlanError if the plan has replicas already.

    >>> from pipeloom.ir.plan import StagePlan
    >>> one = Plan(
    ...     graph="", planner="", stages=(StagePlan(ops=("a",)), StagePlan(ops=("b",))), placement=(0, 1),
    ...     schedule="1f1b", schedule_rows=("0F0 0B0", "1F0 1B0"), microbatches=1,
    ... )
    >>> two = widened(one, 2)
    >>> two.placement, two.microbatches
    ((0, 2, 1, 3), 2)
    >>> two.schedule_rows
    ('0F0 0B0', '2F0 2B0', '1F0 1B0', '3F0 3B0')
    """
    if width == 1:
        return plan
    if plan.replicas != 1:
        raise PlanError(
            f"schedule {plan.schedule} runs {plan.replicas} replicas of each stage by itself, and cannot be "
            f"run {width} times side by side",
            hint="leave out --replicas, or choose a schedule of one direction",
        )
    shape = plan.as_schedule if plan.steady is None else plan.steady
    count = len(plan.stages)

    def moved(action: Action, replica: int) -> Action:
        return replace(action, stage=action.stage + replica * count)

    replicas = range(width)
    rows = [[moved(action, replica) for action in row] for row in shape.rows for replica in replicas]
    pairs = tuple((moved(a, replica), moved(b, replica)) for a, b in shape.pairs for replica in replicas)
    return replace(
        plan,
        placement=tuple(home * width + replica for replica in replicas for home in plan.placement),
        schedule_rows=tuple(rows_text(rows, pairs).splitlines()),
        microbatches=plan.microbatches * width,
        caps=repeated(plan.caps, width),
        peaks=repeated(plan.peaks, width),
        width=width,
    )


def repeated(sizes: Sequence[int], width: int) -> tuple[int, ...]:
    """What holds of each rank of one pipeline, for the ranks of several.

    >>> repeated((3, 4), 2)
    (3, 3, 4, 4)
    """
    return tuple(size for size in sizes for _ in range(width))

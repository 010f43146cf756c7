"""Plans for engines that cut between whole modules: torch.distributed.pipelining, torchtitan, Megatron-Core.

These engines run a chain of stages, each a list of modules, and know the actions F, B, I and W. A plan that
needs more is refused by the name of what they lack; what they do in their own way is left out, and said.

Sources: torch 2.13, `torch/distributed/pipelining/schedules.py` (the CSV files, the rule of neighbours);
torchtitan 0.3.0, `distributed/pipeline_parallel.py` (names of modules, placements); megatron-core 0.16.1,
`core/transformer/pipeline_parallel_layer_layout.py` (the letters). From descriptions.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks.schedules import check
from .ir.action import KINDS, B, F, I, W
from .ir.errors import ConfigError, PlanError
from .ir.graph import OpGraph
from .ir.plan import Plan
from .ir.schedule import Schedule
from .ir.stages import StageGraph, chain
from .runnable import require_runnable_plan, require_training

ENGINES = {"torch": "torch.distributed.pipelining", "torchtitan": "torchtitan", "megatron": "Megatron-Core"}
"""Engines by the names of `pipeloom export-plan --for`."""

MODULES_HINT = "plan again with --granularity module"


def stage_modules(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """FQNs of the modules of each stage, in the order of the forward.

    Raises: PlanError if a stage begins within a module, or between two, with the op in the way; or if the
    plan does not say which ops are whose.

    >>> from pipeloom.ir.plan import StagePlan
    >>> plan = Plan(
    ...     graph="", planner="", stages=(StagePlan(ops=("a", "b")), StagePlan(ops=("c",))), placement=(0, 1),
    ...     schedule="1f1b", schedule_rows=("0F0 0B0", "1F0 1B0"), microbatches=1,
    ...     modules={"embed": ("a", "b"), "head": ("c", "c")},
    ... )
    >>> stage_modules(plan)
    (('embed',), ('head',))
    """
    if not plan.modules:
        raise PlanError("this plan does not say which modules its ops are in", hint=MODULES_HINT)
    stage_of = plan.stage_of
    missing = next((op for ends in plan.modules.values() for op in ends if op not in stage_of), None)
    if missing is not None:
        raise PlanError(f"op {missing} has no stage in this plan", hint=MODULES_HINT)
    found: list[list[str]] = [[] for _ in plan.stages]
    for name, (first, last) in plan.modules.items():
        if stage_of[first] != stage_of[last]:
            stage = max(stage_of[first], stage_of[last])
            raise PlanError(
                f"stage {stage} begins at op {plan.stages[stage].ops[0]}, within module {name}",
                hint=MODULES_HINT,
            )
        found[stage_of[first]].append(name)
    begins = {first for first, _ in plan.modules.values()}
    for stage, own in enumerate(plan.stages[1:], start=1):
        if own.ops[0] not in begins:
            raise PlanError(
                f"stage {stage} begins at op {own.ops[0]}, which is between two modules", hint=MODULES_HINT
            )
    return tuple(map(tuple, found))


def engine_order(plan: Plan, engine: str) -> Schedule:
    """The order of one pipeline of a plan, its pairs apart; of several side by side, that of the first.

    Raises: PlanError if the engine lacks what the plan needs: versions of weights, two directions,
        offloading, other actions than F, B, I and W; ScheduleError if it does not train, or cannot be run.
    """
    require_runnable_plan(plan)
    require_training(plan)
    if plan.updates is not None:
        raise PlanError(
            f"{engine} has no versions of weights, and this plan updates them by {plan.weights}",
            hint="plan with --weights flush",
        )
    if plan.replicas != plan.width:
        raise PlanError(
            f"{engine} runs stages in one direction, and {plan.schedule} runs each in {plan.replicas}",
            hint="plan with a schedule of one direction, such as 1f1b",
        )
    if plan.memory.offloads:
        raise PlanError(
            f"{engine} does not offload residuals, and this plan does",
            hint="plan with --treatments recompute, or none",
        )
    wide, count, width = plan.as_schedule, len(plan.stages), plan.width
    rows = tuple(map(tuple, wide.rows))[::width]
    odd = next((action for row in rows for action in row if action.kind not in (F, B, I, W)), None)
    if odd is not None:
        raise PlanError(
            f"{engine} knows F, B, I and W only, and this plan has {odd} ({KINDS[odd.kind].label})",
            hint="plan with another schedule, such as 1f1b or zb_h1",
        )
    order = Schedule(
        name=plan.schedule,
        microbatches=wide.microbatches,
        placement=tuple(home // width for home in plan.placement[:count]),
        rows=rows,
    )
    check(order, chain(count))
    return order


def left_out(plan: Plan) -> list[str]:
    """Sentences on what an engine does in its own way, whatever the plan says."""
    said = []
    recomputes = [s for s in range(len(plan.stages)) if plan.memory.treated(s, "recompute")]
    if recomputes:
        stages = ", ".join(map(str, recomputes))
        said.append(f"left out: recomputation in stages {stages}; turn on activation checkpointing there")
    if plan.width > 1:
        said.append(f"left out: {plan.width} pipelines side by side; this is one, data parallelism is yours")
    if plan.shard_optimizer:
        said.append("left out: sharing out the optimizer's state")
    return said


def refuse_other_than_chain(stages: StageGraph, graph: OpGraph, engine: str, *, ties: bool) -> None:
    """Raises: PlanError if a value skips a stage, stages do not read their neighbours, or a parameter that is
    trained is in several. ties: one may be in the first and the last stage."""
    for crossing in stages.crossings:
        if crossing.target != crossing.source + 1:
            raise PlanError(
                f"{engine} passes values to the next stage only, and stage {crossing.source} sends "
                f"{crossing.value.name} to stage {crossing.target}",
                hint="plan with --no-branches, or fewer stages: stages must form a chain",
            )
    for stage in range(1, stages.cuts):
        if not stages.predecessors[stage]:
            raise PlanError(
                f"{engine} runs a chain of stages, and stage {stage} reads nothing of stage {stage - 1}",
                hint="cut the model into fewer stages",
            )
    for name, holders in stages.tied.items():
        if graph.parameter[name].trainable and not (ties and holders == (0, stages.cuts - 1)):
            raise PlanError(
                f"{engine} does not sum gradients of {name}, which stages "
                f"{' and '.join(map(str, holders))} share",
                hint="use fewer stages, so that one has it, or run the plan with pipeloom",
            )


@dataclass(frozen=True, kw_only=True)
class Export:
    """What an engine is given.

    settings: its own settings by name.  flags: of a command line, if it takes such.
    order: what goes into the CSV file; None if the engine has its own.  notes: sentences on what is left out.
    """

    settings: dict[str, Any]
    order: Schedule | None
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """The settings as options for a shell."""
        return " ".join(
            f"--{key.replace('_', '-')} {shlex.quote(str(v))}" for key, v in self.settings.items()
        )


def export_for(plan: Plan, graph: OpGraph, engine: str, csv: Path | None = None) -> Export:
    """A plan for one of `ENGINES`.

    graph: of the model that it was made for.  csv: where the order will be written.
    Raises: PlanError if the plan is of another model, or the engine lacks what it needs; ConfigError for a
        CSV file where the engine reads none.
    """
    title = ENGINES[engine]
    if plan.split_words:
        raise PlanError(
            f"the plan splits the words of {next(iter(plan.split_words))}, and {title} takes whole modules",
            hint="plan with --split-words off",
        )
    stages = plan.stage_graph(graph)
    modules = stage_modules(plan)
    order = engine_order(plan, title)
    refuse_other_than_chain(stages, graph, title, ties=engine == "megatron")
    if engine == "megatron":
        if csv is not None:
            raise ConfigError("Megatron-Core reads no order", hint="leave out --csv")
        return _megatron(plan, modules, order)
    notes = left_out(plan)
    if csv is None:
        notes.append("left out: the order of the actions; --csv FILE writes it")
    make = _torchtitan if engine == "torchtitan" else _torch
    return Export(settings=make(plan, modules, order, csv), order=order, notes=tuple(notes))


Modules = tuple[tuple[str, ...], ...]


def _torch(plan: Plan, modules: Modules, order: Schedule, csv: Path | None) -> dict[str, Any]:
    """For `torch.distributed.pipelining.pipeline`: each of these is a `SplitPoint.BEGINNING`."""
    return {
        "split_points": [names[0] for names in modules[1:]],
        "stage_to_rank": list(order.placement),
        "n_microbatches": order.microbatches,
        **({} if csv is None else {"schedule_csv": str(csv)}),
    }


def _torchtitan(plan: Plan, modules: Modules, order: Schedule, csv: Path | None) -> dict[str, Any]:
    """Fields of `ParallelismConfig`. With an order from a file, the name of a schedule only says how stages
    are placed."""
    for stage, names in enumerate(modules):
        for name in names:
            head, _, entry = name.partition(".")
            if entry and not entry.isdigit():
                raise PlanError(
                    "torchtitan cuts between modules at the top of a model and entries of its lists, and "
                    f"stage {stage} has {name}, within {head}",
                    hint="plan the inner model by itself",
                )
    return {
        "pipeline_parallel_degree": order.ranks,
        "pipeline_parallel_schedule": _placing_schedule(order, from_file=csv is not None),
        "pipeline_parallel_microbatch_size": plan.microbatch_size,
        "module_fqns_per_model_part": [list(names) for names in modules],
        **({} if csv is None else {"pipeline_parallel_schedule_csv": str(csv)}),
    }


def _placing_schedule(order: Schedule, *, from_file: bool) -> str:
    ranks, stages = order.ranks, order.stages
    if _is_loop(order):
        usual = "1F1B" if stages == ranks else "Interleaved1F1B"
        return "PipelineScheduleMulti" if from_file else usual
    if order.placement == (*range(ranks), *reversed(range(ranks))):
        return "ZBVZeroBubble"
    raise _placed_otherwise(order, "torchtitan", "round the ranks, or in a V")


def _is_loop(order: Schedule) -> bool:
    """Whether stages go round the ranks, the same number on each."""
    return order.stages % order.ranks == 0 and all(
        home == stage % order.ranks for stage, home in enumerate(order.placement)
    )


def _placed_otherwise(order: Schedule, engine: str, how: str) -> PlanError:
    return PlanError(
        f"{engine} places stages {how}, and {order.name} has them on ranks "
        f"{', '.join(map(str, order.placement))}",
        hint="plan with another schedule, such as 1f1b or interleaved",
    )


def _megatron(plan: Plan, modules: Modules, order: Schedule) -> Export:
    """In the layout E is all in front of the layers, t a layer, L all behind them, and `|` a cut."""
    if not _is_loop(order):
        raise _placed_otherwise(order, "Megatron-Core", "round the ranks")
    letter = _letters([name for names in modules for name in names])
    for mark, where in (("E", "in front of"), ("L", "behind")):
        holders = [stage for stage, names in enumerate(modules) if any(letter[n] == mark for n in names)]
        if len(holders) != 1:
            what = f"stages {' and '.join(map(str, holders))} share it" if holders else "there is nothing"
            raise PlanError(
                f"Megatron-Core has what is {where} the layers in one stage, and in this plan {what}",
                hint="plan with --planner equal, which cuts between layers only"
                if holders
                else "use --for torch",
            )
    usual = "1f1b" if order.stages == order.ranks else "interleaved_1f1b"
    notes = left_out(plan)
    if plan.schedule != usual:
        notes.append(f"left out: the order of {plan.schedule}; Megatron-Core runs its own, {usual}")
    settings = {
        "pipeline_model_parallel_size": order.ranks,
        "pipeline_model_parallel_layout": "|".join(
            "".join(mark * (count if mark == "t" else 1) for mark, count in counts.items())
            for counts in (Counter(letter[name] for name in names) for names in modules)
        ),
        "micro_batch_size": plan.microbatch_size,
    }
    return Export(settings=settings, order=None, notes=tuple(notes))


def _letters(names: Sequence[str]) -> dict[str, str]:
    entry = {name: name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()}
    lists = sorted(set(entry.values()))
    layers = [at for at, name in enumerate(names) if name in entry]
    alone = layers == list(range(layers[0], layers[-1] + 1)) if layers else False
    if len(lists) != 1 or not alone:
        what = " and ".join(lists) or "none"
        raise PlanError(
            f"Megatron-Core's layout has one list of layers and nothing between, this model has {what}",
            hint="use --for torch",
        )
    return {name: "E" if at < layers[0] else "L" if at > layers[-1] else "t" for at, name in enumerate(names)}

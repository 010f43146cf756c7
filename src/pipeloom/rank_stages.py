"""One rank's stages: its weights, and its functions per size of micro-batch, to train and to evaluate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from .checks.weight_versions import versions, weight_versions
from .ir.action import REDUCE
from .ir.errors import BatchError, CaptureError, CutError, PipeloomError, PlanError
from .ir.graph import LOWER_PRECISION
from .ir.memory_policy import KEEP_ALL, MemoryPolicy
from .ir.plan import Plan
from .ir.schedule import Program
from .ir.shared_weights import OptimizerShares, optimizer_shares
from .ir.stages import StageGraph
from .ir.weight_policies import Updates
from .lowering.passes import lower
from .profiler.roofline import product_flops
from .run_options import Options
from .runnable import refuse_master_weights
from .runtime.batches import agree_on_layouts, rows_of, signature_of
from .runtime.channel import Channel
from .runtime.optimizers import stand_ins
from .runtime.rank import Variant
from .runtime.reduce_and_step import shared_by
from .runtime.weights import Weights
from .schedules import registry
from .tracer.capture import capture
from .tracer.captured import Captured
from .tracer.evaluation import capture_evaluation, cut_alike
from .tracer.job import Job
from .tracer.job_calls import sample_batch
from .tracer.stage.trace import stage_functions, stage_residuals

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """The stages of a plan that one rank runs.

    stages: one replica of all stages.  indices: of the rank's stages, of all replicas.  channel: to the
    other ranks, which build theirs at the same time.
    """

    job: Job
    plan: Plan
    captured: Captured
    stages: StageGraph
    indices: tuple[int, ...]
    options: Options
    device: torch.device
    channel: Channel

    @cached_property
    def planned_signature(self) -> tuple[str, ...]:
        """Of micro-batches as the plan has them."""
        return signature_of(sample_batch(self.job, 0, self.plan.microbatch_size))

    def weights(self, program: Program) -> Weights:
        """The rank's parameters and buffers, as the seed initialises them, with their optimizer."""
        captured, options, rank, shares = self.captured, self.options, self.channel.rank, self._shares()
        shared = shared_by(self.plan.replicated(self.stages), self.plan.placement, rank, shares)
        origins = [self.stages.origin(s) for s in self.indices]
        params = list(dict.fromkeys(n for s in origins for n in self.stages.params[s]))
        buffers = list(dict.fromkeys(n for s in origins for n in self.stages.buffers[s]))
        graph = captured.graph
        own_names = dict.fromkeys(graph.parameter[n].own_name for n in params)
        tensors = captured.blueprint.materialise(
            options.seed, [*own_names, *(b for b in buffers if b not in captured.constants)]
        )
        tensors |= {name: t for name, t in captured.constants.items() if name in buffers}
        for name, rows in graph.rows.items():
            if name in params:
                tensors[name] = tensors[rows.whole][rows.start : rows.stop].clone()
        trainable = {name: graph.parameter[name].trainable for name in params}
        lower: dict[str, torch.dtype] = {}
        if options.master_weights:
            refuse_master_weights(self.plan.weights)
            low = [n for n in params if trainable[n] and graph.parameter[n].dtype in LOWER_PRECISION]
            lower = {name: tensors[name].dtype for name in low}
            tensors |= {name: tensors[name].float() for name in lower}
        return Weights(
            {n: nn.Parameter(tensors[n].to(self.device), trainable[n]) for n in params},
            {n: tensors[n].to(self.device) for n in buffers},
            self.job.optimizer,
            keep_gradients=options.keep_gradients,
            device=self.device,
            updates=self._updates(),
            together=[reduction.names for reduction in shared],
            shares=shares,
            rank=rank,
            everywhere=stand_ins(graph, options.master_weights),
            rows=graph.rows,
            computed_in=lower,
            awaited=program.every is not None and REDUCE in {step.kind for step in program.rows[rank]},
        )

    def _shares(self) -> tuple[OptimizerShares, ...]:
        if not self.plan.shard_optimizer:
            return ()
        sizes = {p.name: p.bytes for p in self.captured.graph.parameters if p.trainable}
        stages = self.plan.replicated(self.stages)
        return optimizer_shares(stages, self.plan.placement, sizes)

    def _updates(self) -> Updates | None:
        """The plan's updates, with as many versions of weights as this rank's stages keep at once.

        Raises: ScheduleError if the plan's rows break the rule of weight versions.
        """
        updates, schedule = self.plan.updates, self.plan.as_schedule
        if updates is None:
            return None
        weight_versions(schedule, self.plan.replicated(self.stages), updates)
        kept = (stage.needed for stage in versions(schedule, updates) if stage.stage in self.indices)
        return replace(updates, kept=max(kept))


class StageVariants:
    """A rank's stages per size of micro-batch, to train, or to evaluate.

    training: of those that evaluate, the ones that train; None of these.
    with_outputs: they give the model's outputs, too.
    """

    def __init__(
        self, rank: RankStages, training: StageVariants | None = None, *, with_outputs: bool = False
    ) -> None:
        self._rank, self._training, self._with_outputs = rank, training, with_outputs
        self._variants: dict[tuple[str, ...], Variant] = {}
        self.evaluation_program: Program | None = None
        """Of forwards alone, once a size is known that is evaluated."""
        if training is None:
            stages = rank.plan.stage_graph(rank.captured.graph)
            agree_on_layouts(rank.channel, stages)
            self._variants[rank.planned_signature] = self._trace(rank.captured, stages)

    @property
    def planned(self) -> Variant:
        """For micro-batches as the plan has them. Raises: KeyError if they were not evaluated yet."""
        return self._variants[self._rank.planned_signature]

    def variant(self, part: Mapping[str, Tensor]) -> Variant:
        """The stages for one micro-batch. Every rank calls it.

        Raises: BatchError, on all ranks, if its size does not fit the plan, or is evaluated in another way
            than other sizes; CaptureError or CutError if the model cannot be captured or cut in evaluation
            mode.
        """
        signature, rank = signature_of(part), self._rank
        if signature in self._variants:
            return self._variants[signature]
        if self._training is not None:
            self._variants[signature] = self._evaluated(part, self._training)
            return self._variants[signature]
        captured, stages = self._on_all_ranks(signature, lambda: self._capture(part))
        agree_on_layouts(rank.channel, stages)
        self._variants[signature] = self._on_all_ranks(signature, lambda: self._trace(captured, stages))
        return self._variants[signature]

    def _evaluated(self, part: Mapping[str, Tensor], training: StageVariants) -> Variant:
        """The stages in evaluation mode. Of a model that was cut between its modules they run in either."""
        rank, plan = self._rank, self._rank.plan
        if rank.captured.cut is not None and self._with_outputs:
            raise CaptureError(
                f"the outputs of {rank.job.name} cannot be had: {rank.captured.graph.fallback}",
                hint="evaluate the loss alone, or with the model in one process",
            )
        if rank.captured.cut is not None:
            variant = training.variant(part)
        else:
            signature = signature_of(part)
            captured, stages = self._on_all_ranks(signature, lambda: self._capture_evaluation(part))
            agree_on_layouts(rank.channel, stages)
            variant = make_variant(captured, plan, stages, rank.indices, device=str(rank.device))
        count = plan.microbatches // plan.replicas
        forwards = registry.build("forward_only", variant.stages, plan.placement, count)
        program = lower(forwards, variant.stages)
        if self.evaluation_program is not None and str(program) != str(self.evaluation_program):
            raise BatchError(
                f"in evaluation mode {', '.join(signature_of(part))} is computed in another way than other "
                "sizes",
                hint="evaluate batches of one size",
            )
        self.evaluation_program = program
        return variant

    def _capture_evaluation(self, part: Mapping[str, Tensor]) -> tuple[Captured, StageGraph]:
        rank = self._rank
        captured = None if self._with_outputs else rank.captured.evaluation
        if captured is None or signature_of(part) != rank.planned_signature:
            captured = capture_evaluation(
                rank.job,
                rank.captured,
                part,
                autocast=rank.captured.autocast,
                with_outputs=self._with_outputs,
            )
        return captured, cut_alike(captured.graph, rank.captured.graph, rank.stages)

    def _capture(self, part: Mapping[str, Tensor]) -> tuple[Captured, StageGraph]:
        rank = self._rank
        # Of what its stages do not read, a rank has shapes alone; see `FirstBatches`.
        batch = {n: torch.zeros_like(t, device=rank.device) if t.is_meta else t for n, t in part.items()}
        captured = capture(
            rank.job, rows_of(part), batch=batch, autocast=rank.captured.autocast, like=rank.captured
        )
        return captured, self._cut(captured)

    def _trace(self, captured: Captured, stages: StageGraph) -> Variant:
        rank = self._rank
        return make_variant(
            captured,
            rank.plan,
            stages,
            rank.indices,
            device=str(rank.device),
            compiled=rank.options.compile,
            policy=self._policy(captured, stages),
        )

    def _cut(self, captured: Captured) -> StageGraph:
        """Cut a capture of another size as the plan says. Of one row a model may lack ops that it has of
        several, such as copies of what is expanded: its ops then go where their like went.

        Raises: PlanError, CutError if the stages would exchange other values than the program sends.
        """
        rank, plan = self._rank, self._rank.plan
        if captured.graph.fingerprint == plan.graph:
            return plan.stage_graph(captured.graph)
        if captured.cut is not None:
            raise PlanError(
                "its forward calls other modules than that of the planned size"
                if rank.captured.cut is not None
                else captured.graph.fallback
            )
        stages = cut_alike(
            captured.graph, rank.captured.graph, rank.stages, when="with micro-batches so small"
        )
        for name, edges in _exchanges(stages).items():
            if odd := edges ^ _exchanges(rank.stages)[name]:
                source, target = min(odd)
                raise PlanError(
                    f"stage {source} would exchange {name} with stage {target} otherwise than planned"
                )
        buffers = tuple(
            tuple(dict.fromkeys((*planned, *(n for n in own if n in captured.constants))))
            for planned, own in zip(rank.stages.buffers, stages.buffers, strict=True)
        )
        return replace(stages, params=rank.stages.params, buffers=buffers)

    def _policy(self, captured: Captured, stages: StageGraph) -> MemoryPolicy:
        """The plan's policy for the residuals of this capture, which may lack some of the planned ones."""
        rank, policy = self._rank, self._rank.plan.memory
        if captured.graph.fingerprint == rank.plan.graph:
            return policy
        treatments = []
        for stage, planned in enumerate(policy.stages):
            here = rank.indices and stage in {stages.origin(s) for s in rank.indices} and planned
            residuals = stage_residuals(captured, stages, stage, device=str(rank.device)) if here else {}
            possible = {
                name: given
                for name, given in planned.items()
                if name in residuals and not (given == "recompute" and residuals[name].obstacle)
            }
            if here and stage in policy.ahead and "recompute" not in possible.values():
                raise PlanError(f"stage {stage} has nothing to recompute")
            treatments.append(possible)
        return replace(policy, stages=tuple(treatments))

    def _on_all_ranks(self, signature: tuple[str, ...], make: Callable[[], T]) -> T:
        """What `make` returns, if it can on all ranks: one that cannot would leave the others waiting."""
        made: list[T] = []
        refusal: PipeloomError | None = None
        try:
            made.append(make())
        except (CaptureError, CutError, PlanError) as error:
            refusal = error
            if signature != self._rank.planned_signature:
                given = [entry.partition("[")[0] for entry in signature]
                planned = [entry.partition("[")[0] for entry in self._rank.planned_signature]
                missing = [name for name in planned if name not in given]
                refusal = BatchError(
                    f"a micro-batch of {', '.join(signature)} does not fit the plan, which was made for "
                    f"{', '.join(self._rank.planned_signature)}: {error.message}",
                    hint=f"give the batch {' and '.join(map(repr, missing))}, as the example has it"
                    if missing
                    else "pad or cut the batch to the planned size, or plan for this one",
                )
        self._rank.channel.agree(refusal, None)
        return made[0]


def _exchanges(stages: StageGraph) -> dict[str, set[tuple[int, int]]]:
    """Between which stages a program sends anything: values, and gradients back."""
    edges = set(stages.between)
    return {"values": edges, "gradients": {edge for edge in edges if stages.gradients(*edge)}}


def make_variant(
    captured: Captured,
    plan: Plan,
    stages: StageGraph,
    rank_stages: Sequence[int],
    *,
    device: str,
    compiled: bool = False,
    policy: MemoryPolicy = KEEP_ALL,
) -> Variant:
    """Build the functions of the stages that a rank owns.

    stages: one replica of them.  rank_stages: of all replicas; those of one stage share its functions.
    policy: what becomes of residuals; in evaluation mode there are none.
    """
    origins = dict.fromkeys(stages.origin(s) for s in rank_stages)
    built = {
        s: stage_functions(
            captured,
            stages,
            s,
            device=device,
            compiled=compiled,
            treatments=policy.of_stage(s),
            ahead=s in policy.ahead,
        )
        for s in origins
    }
    functions = {s: built[stages.origin(s)] for s in rank_stages}
    flops = 0.0 if device == "cpu" else product_flops(captured.graph)
    decides = captured.cut is not None
    return Variant(stages=plan.replicated(stages), functions=functions, flops=flops, decides=decides)

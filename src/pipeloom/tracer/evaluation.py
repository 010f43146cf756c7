"""The model in evaluation mode: captured by itself, and cut where the training graph was cut.

`model.eval()` changes more than dropout and batch norm: any `if self.training` of the user's does. So
nothing is guessed from the training graph; only the places of the new ops are taken from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.export.graph_signature import OutputKind

from ..ir.errors import CutError
from ..ir.flow import flow_of
from ..ir.graph import Op, OpGraph
from ..ir.stages import StageGraph, cut
from .autocast import Autocast
from .captured import Captured
from .export import export_watched
from .guards import WeightChangesRefused, warn_of_updates
from .job import Job
from .job_calls import ModelWithLoss, evaluation_mode
from .program import captured_from_program
from .random import one_thread_at_a_time
from .split_words import split_words


@one_thread_at_a_time
def capture_evaluation(
    job: Job,
    trained: Captured,
    batch: Mapping[str, Tensor],
    *,
    autocast: Autocast | None = None,
    with_outputs: bool = False,
) -> Captured:
    """Capture a job's model in evaluation mode, for one micro-batch. Its buffer updates are left out,
    with a warning.

    trained: the same model's training graph.  with_outputs: the graph gives the model's outputs, too.
    Raises: CaptureError if that fails.
    """
    example = {key: tensor.clone() for key, tensor in batch.items()}
    model = trained.blueprint.model
    with evaluation_mode(model, WeightChangesRefused(model)):
        module = ModelWithLoss(model, job, with_outputs=with_outputs)
        program = export_watched(module, example, f"{job.name} in evaluation mode", autocast)
        kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
        specs = [spec for spec in program.graph_signature.output_specs if spec.kind in kinds]
        warn_of_updates([(spec.target or "").removeprefix("model.") for spec in specs], job.name)
        captured = captured_from_program(
            program, job, trained.blueprint, list(example), training=False, copied=_read_anew(trained)
        )
    return split_words(captured, trained.split_words)


def _read_anew(trained: Captured) -> list[str]:
    """Buffers of which training reads what the forward has made of them, as of a teacher that it averages: on
    any later stage, and evaluation reads the buffers themselves there."""
    nodes = {node.name: node for node in trained.module.graph.nodes}
    output = trained.module.graph.output_node()
    return [name for node, name in trained.updates.items() if {*nodes[node].users} - {output}]


def cut_alike(
    other: OpGraph, planned: OpGraph, stages: StageGraph, *, when: str = "in evaluation mode"
) -> StageGraph:
    """Cut another graph of a model as the planned one is cut, so that each stage finds the parameters and
    buffers that it holds.

    An op goes where the op of the same module and kind went; one without such a counterpart, to the stage
    of what it reads.
    when: when the model computes the other graph, for messages.
    Raises: CutError if an op would need parameters that are held before the stage that makes its inputs, or
        if a stage has nothing to do.
    """
    order = flow_of(stages).order
    cheap = {op.name for op in other.ops if op.cheap}
    updated = {name for op in planned.ops for name in op.updates}  # which one stage holds
    torn = [op.name for op in other.ops if op.cheap and updated.intersection(op.buffers)]
    while True:
        cheap.difference_update(torn)
        for op in other.ops:  # nor can what reads them be cloned
            if any(other.producer[name] not in cheap for name in op.inputs if name in other.producer):
                cheap.discard(op.name)
        graph = replace(other, ops=tuple(replace(op, cheap=op.name in cheap) for op in other.ops))
        homes = _Homes(planned, stages, order, when)
        result = cut(graph, _places(graph, homes, order))
        torn = [
            name
            for stage in result.stages
            for name in stage.clones
            if not homes.holds(order.index(stage.index), graph.op[name])
        ]
        if not torn:
            return result


def _places(graph: OpGraph, homes: _Homes, order: Sequence[int]) -> dict[str, int]:
    where: dict[str, int] = {}
    for op in graph.ops:
        if not op.cheap:
            makers = (graph.producer.get(name, "") for name in op.inputs)
            earliest = max((where[maker] for maker in makers if maker in where), default=0)
            where[op.name] = homes.find(op, earliest)
    if idle := sorted({*range(len(order))} - {*where.values()}):
        raise CutError(
            f"stage {order[idle[0]]} has nothing to do {homes.when}",
            hint="plan with fewer stages, or put its ops together with others",
        )
    return {name: order[position] for name, position in where.items()}


class _Homes:
    """Positions, in the order of the stages, where ops of a module and kind are, and what is held there."""

    def __init__(self, planned: OpGraph, stages: StageGraph, order: Sequence[int], when: str) -> None:
        self.when = when
        place = {stage: position for position, stage in enumerate(order)}
        stage_of = {name: stage.index for stage in stages.stages for name in stage.ops}
        self.of_kind: dict[tuple[str, str], list[int]] = defaultdict(list)
        for op in planned.ops:
            if op.name in stage_of:
                self.of_kind[op.module, op.target].append(place[stage_of[op.name]])
        self.holding: dict[str, set[int]] = defaultdict(set)
        for stage, position in place.items():
            for name in (*stages.params[stage], *stages.buffers[stage]):
                self.holding[name].add(position)
        self.taken: Counter[tuple[str, str]] = Counter()

    def holds(self, position: int, op: Op) -> bool:
        """Whether the stage at a position has what `op` reads; constants of the forward are everywhere."""
        return all(position in self.holding.get(name, {position}) for name in (*op.params, *op.buffers))

    def find(self, op: Op, earliest: int) -> int:
        """Where an op belongs that cannot stand before position `earliest`."""
        key = op.module, op.target
        alike = self.of_kind.get(key, [])
        preferred = max(alike[self.taken[key]] if self.taken[key] < len(alike) else 0, earliest)
        self.taken[key] += 1
        holders = [self.holding[name] for name in (*op.params, *op.buffers) if name in self.holding]
        if not holders:
            return preferred
        possible = sorted(p for p in set.intersection(*holders) if p >= earliest)
        if not possible:
            names = ", ".join((*op.params, *op.buffers))
            raise CutError(
                f"{self.when} {op.name} reads {names}, which no later stage holds together",
                hint="put the ops that read them into one stage, or take a plan of one stage",
            )
        return min(possible, key=lambda position: (position < preferred, abs(position - preferred)))

"""Stage and StageGraph: ops grouped into stages, and the values that cross between them.

Stages form a DAG; a chain is the special case. A value goes from its producer straight to each stage
that reads it, whatever the distance. Cheap gradient-free ops are cloned into the stages that need
them, so their values never cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from .errors import CutError, ScheduleError
from .graph import Op, OpGraph, Value


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A set of ops that run together, in the graph's order, clones included."""

    index: int
    ops: tuple[str, ...]
    clones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ops:
            raise CutError(f"stage {self.index} is empty", hint="use fewer stages")


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A value sent from the stage that makes it to one stage that reads it.

    If `value.needs_grad`, a gradient of the same shape and dtype comes back. It is false, whatever the graph
    says of the value, where this reader makes nothing of it that the loss depends on differentiably.
    """

    value: Value
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Stages and the values that cross between them.

    params, buffers: for each stage the FQNs it reads or updates; a name listed by two stages is tied across
        them. What no op reads belongs to stage 0, so that nothing is missing from a checkpoint.
    """

    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    params: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    inputs: tuple[tuple[str, ...], ...]
    """For each stage the batch inputs it reads."""
    loss_stage: int
    replicas: int = 1
    """How many times the same stages stand side by side, see `replicate`; `loss_stage` is the first's."""
    shards: tuple[tuple[int, ...], ...] = ()
    """Stages that are one stage on several ranks, see `schedules.spread`: they begin F, B and I together."""

    @cached_property
    def predecessors(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> the stages whose values it reads, ascending."""
        return {
            s.index: tuple(sorted({c.source for c in self.crossings if c.target == s.index}))
            for s in self.stages
        }

    @cached_property
    def successors(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> the stages that read its values, ascending."""
        return {
            s.index: tuple(sorted({c.target for c in self.crossings if c.source == s.index}))
            for s in self.stages
        }

    @cached_property
    def between(self) -> Mapping[tuple[int, int], tuple[Value, ...]]:
        """(source, target) -> the values sent along that edge, by name."""
        values: dict[tuple[int, int], list[Value]] = {}
        for c in self.crossings:
            values.setdefault((c.source, c.target), []).append(c.value)
        return {edge: tuple(sorted(vs, key=lambda v: v.name)) for edge, vs in values.items()}

    @cached_property
    def cuts(self) -> int:
        """Into how many stages the model is cut: replicas and shards are not counted."""
        return len(self.stages) // self.replicas - sum(len(group) - 1 for group in self.shards)

    def origin(self, stage: int) -> int:
        """The stage of the first replica that a stage is a copy of; the first shard of a shard."""
        first = stage % (len(self.stages) // self.replicas)
        return next((group[0] for group in self.shards if first in group), first)

    def number(self, stage: int, microbatch: int, *, of: int) -> int:
        """Which of the step's micro-batches a stage calls `microbatch`; `of`: how many each replica runs."""
        return stage // (len(self.stages) // self.replicas) * of + microbatch

    def gradients(self, source: int, target: int) -> tuple[Value, ...]:
        """The values of an edge whose gradients come back from `target` to `source`."""
        return tuple(v for v in self.between.get((source, target), ()) if v.needs_grad)

    @cached_property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter read by several stages -> those stages."""
        readers: dict[str, list[int]] = {}
        for index, names in enumerate(self.params):
            for name in names:
                readers.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in readers.items() if len(stages) > 1}


def dag(
    stages: int,
    edges: Iterable[tuple[int, int]],
    *,
    loss_stage: int | None = None,
    no_gradient: Iterable[tuple[int, int]] = (),
    value_bytes: int = 4,
    params: Mapping[int, tuple[str, ...]] | None = None,
) -> StageGraph:
    """A graph of stages with one value per edge and nothing else: enough to schedule.

    edges: (source, target) pairs.  loss_stage: the last stage unless given.
    no_gradient: edges whose value needs no gradient.  value_bytes: a multiple of 4.
    params: stage -> names it reads; a name given to two stages is tied.

    >>> dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)]).predecessors[3]
    (1, 2)
    """
    frozen = set(no_gradient)
    crossings = tuple(
        Crossing(
            value=Value(
                name=f"v{source}_{target}",
                shape=(value_bytes // 4,),
                dtype="float32",
                needs_grad=(source, target) not in frozen,
            ),
            source=source,
            target=target,
        )
        for source, target in edges
    )
    names = params or {}
    none: tuple[tuple[str, ...], ...] = ((),) * stages
    return StageGraph(
        stages=tuple(Stage(index=s, ops=(f"op{s}",)) for s in range(stages)),
        crossings=crossings,
        params=tuple(names.get(s, ()) for s in range(stages)),
        buffers=none,
        inputs=none,
        loss_stage=stages - 1 if loss_stage is None else loss_stage,
    )


def chain(stages: int) -> StageGraph:
    """A chain of stages.

    >>> chain(3).successors
    {0: (1,), 1: (2,), 2: ()}
    """
    return dag(stages, pairwise(range(stages)))


def sequential(stages: StageGraph) -> StageGraph:
    """The stages as a sequential pipeline, in which values are handed on from stage to stage: each stage also
    waits for the one in front of it, and for a gradient of the one behind it.

    Where a stage reads nothing of the one in front, a number of four bytes is handed on instead, and back
    where that stage or one before it has a gradient to wait for: frozen stages in front get none.
    stages: replicas, too, but no stage on several ranks.

    >>> towers = replace(chain(3), crossings=chain(3).crossings[1:])  # 0 and 1 -> 2 read apart
    >>> sequential(towers).successors
    {0: (1,), 1: (2,), 2: ()}
    >>> sequential(replicate(towers)).successors
    {0: (1,), 1: (2,), 2: (), 3: (4,), 4: (5,), 5: ()}
    """
    assert not stages.shards, "a stage on several ranks has no one stage in front of it"
    count = len(stages.stages) // stages.replicas
    waits_for_gradient = [
        any(stages.gradients(s, reader) for reader in stages.successors[s]) for s in range(count)
    ]
    handed_on = []
    for stage in range(count - 1):
        back = any(waits_for_gradient[: stage + 1])
        if back and not stages.gradients(stage, stage + 1) or (stage, stage + 1) not in stages.between:
            handed_on.append(
                (stage, Value(name=f"after {stage}", shape=(1,), dtype="float32", needs_grad=back))
            )
    added = [
        Crossing(value=value, source=first + stage, target=first + stage + 1)
        for first in range(0, stages.replicas * count, count)
        for stage, value in handed_on
    ]
    return replace(stages, crossings=(*stages.crossings, *added))


def cut(graph: OpGraph, stage_of: Mapping[str, int]) -> StageGraph:
    """Group ops into stages.

    stage_of: op name -> stage index, 0-based without gaps. Cheap ops may be left out: they go only
        where they are used.
    Raises: CutError if an op has no stage, a stage is empty, the quotient has a cycle, or a buffer would
        be updated in one stage and read in another.
    """
    missing = [op.name for op in graph.ops if op.name not in stage_of and not op.cheap]
    if missing:
        raise CutError(f"op {missing[0]} has no stage ({len(missing)} in all)", hint="assign every op")
    _refuse_torn_buffers(graph, stage_of)
    count = max(stage_of.values()) + 1
    own: list[list[Op]] = [[] for _ in range(count)]
    for op in graph.ops:
        if op.name in stage_of:
            own[stage_of[op.name]].append(op)
    place = {op.name: at for at, op in enumerate(graph.ops)}
    clones = [sorted(_clones(graph, stage_of, s, own[s]), key=place.__getitem__) for s in range(count)]
    stages = tuple(
        Stage(index=s, ops=tuple(op.name for op in own[s]), clones=tuple(clones[s])) for s in range(count)
    )
    members = [
        sorted((*own[s], *(graph.op[name] for name in clones[s])), key=lambda op: place[op.name])
        for s in range(count)
    ]
    loss_stage = stage_of[graph.producer[graph.loss]]
    result = StageGraph(
        stages=stages,
        crossings=_crossings(graph, stage_of, members),
        params=_owned(members, "params", [p.name for p in graph.parameters]),
        buffers=_owned(members, "buffers", [b.name for b in graph.buffers]),
        inputs=tuple(
            tuple(v.name for v in graph.inputs if any(v.name in op.inputs for op in ops)) for ops in members
        ),
        loss_stage=loss_stage,
    )
    _refuse_cycles(result)
    return result


def _clones(graph: OpGraph, stage_of: Mapping[str, int], stage: int, own: Sequence[Op]) -> set[str]:
    """Cheap ops that `stage` needs and does not own, with the cheap ops those need."""
    wanted: set[str] = set()
    pending = list(own)
    while pending:
        for value in pending.pop().inputs:
            maker = graph.producer.get(value)
            if maker is None or maker in wanted or stage_of.get(maker) == stage:
                continue
            if graph.op[maker].cheap:
                wanted.add(maker)
                pending.append(graph.op[maker])
    return wanted


def _crossings(
    graph: OpGraph, stage_of: Mapping[str, int], members: Sequence[Sequence[Op]]
) -> tuple[Crossing, ...]:
    """members: of each stage its ops and clones, in the order of the graph."""
    crossings: dict[tuple[str, int], Crossing] = {}
    for stage, ops in enumerate(members):
        inside = {op.name for op in ops}
        for op in ops:
            back = any(v.needs_grad for v in op.outputs)
            for name in op.inputs:
                maker = graph.producer.get(name)
                if maker is None or maker in inside:
                    continue
                value, key = graph.value[name], (name, stage)
                if key not in crossings:
                    value = replace(value, needs_grad=value.needs_grad and back)
                elif not (back and value.needs_grad):
                    continue
                crossings[key] = Crossing(value=value, source=stage_of[maker], target=stage)
    return tuple(crossings.values())


def _owned(
    members: Sequence[Sequence[Op]], kind: str, everything: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Per stage the parameters (or buffers) it reads; the first stage also holds what no op reads."""
    read = [
        dict.fromkeys(
            name for op in ops for name in (*getattr(op, kind), *(op.updates if kind == "buffers" else ()))
        )
        for ops in members
    ]
    used = {name for names in read for name in names}
    read[0].update(dict.fromkeys(name for name in everything if name not in used))
    return tuple(tuple(names) for names in read)


def _refuse_torn_buffers(graph: OpGraph, stage_of: Mapping[str, int]) -> None:
    for buffer, ops in graph.together.items():
        first, *others = ops
        for other in others:
            if stage_of[other] != stage_of[first]:
                raise CutError(
                    f"buffer {buffer} is updated in every step, but its ops {first} and {other} are in "
                    f"stages {stage_of[first]} and {stage_of[other]}",
                    hint=f"put {', '.join(ops)} into one stage",
                )


def _refuse_cycles(stages: StageGraph) -> None:
    try:
        TopologicalSorter(stages.predecessors).prepare()
    except CycleError as error:
        raise CutError(
            f"stages {sorted(set(error.args[1]))} need each other's values: the cut has a cycle",
            hint="keep every op in the same stage as, or a later stage than, the ops it reads from",
        ) from None


def replicate(stages: StageGraph, times: int = 2) -> StageGraph:
    """One graph of all replicas: replica r of stage s is stage r * S + s, for S stages.

    Bidirectional schedules run one replica in each direction. A step's micro-batches are dealt out in order:
    with m for each replica, replica r runs numbers r * m to r * m + m - 1 as its micro-batches 0 to m - 1.
    Every parameter is tied between the replicas, so that their gradients are summed before the step.
    Values and ops keep their names: what is between two stages is the same in each replica.
    Raises: ScheduleError if `times` is not positive; CutError if the stages are replicas already.

    >>> both = replicate(chain(3))
    >>> both.successors[3], both.origin(4), both.number(4, 1, of=8)
    ((4,), 1, 9)
    """
    if times < 1:
        raise ScheduleError(f"{times} replicas", hint="use at least 1")
    if stages.replicas != 1:
        raise CutError("these stages are replicas already", hint="replicate the stages of one")
    if stages.shards:
        raise CutError("a stage on several ranks cannot be replicated", hint="place each stage on one rank")
    count = len(stages.stages)
    return StageGraph(
        stages=tuple(
            Stage(index=r * count + s.index, ops=s.ops, clones=s.clones)
            for r in range(times)
            for s in stages.stages
        ),
        crossings=tuple(
            Crossing(value=c.value, source=r * count + c.source, target=r * count + c.target)
            for r in range(times)
            for c in stages.crossings
        ),
        params=stages.params * times,
        buffers=stages.buffers * times,
        inputs=stages.inputs * times,
        loss_stage=stages.loss_stage,
        replicas=times,
    )

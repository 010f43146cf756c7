"""Pipelines on threads, plain PyTorch beside them, and how far apart their numbers are."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipeloom import Job, Options, Pipeline, planning
from pipeloom.ir.graph import OpGraph, PartRows
from pipeloom.ir.memory_policy import MemoryPolicy, Residual
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.ir.stages import StageGraph, cut
from pipeloom.run_options import mixed_precision
from pipeloom.runtime.batches import rows_of, signature_of, split_batch
from pipeloom.runtime.channel import Channel, run_threads as threads
from pipeloom.runtime.checkpoint import joined
from pipeloom.schedules import registry
from pipeloom.tracer.capture import capture
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.evaluation import capture_evaluation
from pipeloom.tracer.job_calls import make_optimizer, scalar_loss
from pipeloom.tracer.random import one_thread_at_a_time
from pipeloom.tracer.split_words import heads, split_words
from pipeloom.tracer.stage.functions import Sink, StageFunctions
from pipeloom.tracer.stage.trace import stage_functions, stage_residuals
from pipeloom.verification import differences

Batch = Mapping[str, Tensor]


_CAPTURES: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""What `shared_captures` has captured, after what it was made of, whose ids stay unique by that."""

_STAGE_FUNCTIONS: dict[tuple[Any, ...], tuple[Captured, StageFunctions]] = {}
"""What `shared_captures` has traced, with the capture to keep its id unique."""

_MOST_ENTRIES = 64


@contextmanager
def shared_captures() -> Iterator[None]:
    """Let the ranks of a test, and other runs of the same job, share a capture and the traces of its stages:
    they are most of their time. Jobs that differ in their optimizer only are the same here, and so are jobs
    that the same code makes anew from the same values.

    Whole processes capture and trace for themselves in the tests of `train` and `launch`.
    """

    shared = {real: partial(_remembered, real) for real in (capture, capture_evaluation)}
    ours = [module for name, module in sys.modules.copy().items() if name.startswith("pipeloom.")]
    front = [module for module in ours if module.__name__.count(".") == 1]
    with ExitStack() as stack:
        for real, once in {**shared, stage_functions: _traced_once}.items():
            users = [*front]
            if real is not stage_functions:  # functions of `planning` and `train` import them when called
                users.append(sys.modules[real.__module__])
            for module in users:
                if vars(module).get(real.__name__) is real:
                    stack.enter_context(patch.object(module, real.__name__, once))
        yield


@one_thread_at_a_time
def _remembered(real: Callable[..., Captured], job: Job, *args: Any, **kwargs: Any) -> Captured:
    given = [signature_of(a) if isinstance(a, Mapping) else a for a in (*args, kwargs.get("batch"))]
    key = (
        real,
        job.name,
        *map(_what, (job.model, job.batch, job.loss, job.weight, job.modules)),
        *(id(a) if isinstance(a, Captured) else a for a in given),
        kwargs.get("autocast"),
        kwargs.get("with_outputs"),
        id(kwargs.get("like")),
        tuple((kwargs.get("split") or {}).items()),
    )
    return _kept(_CAPTURES, key, lambda: (job, args, kwargs, real(job, *args, **kwargs)))


def _what(value: Any) -> Any:
    """Equal for functions of the same code, in files with the same text, that hold the same values."""
    if isinstance(value, FunctionType):
        file = value.__globals__.get("__file__")
        where = Path(file).read_bytes() if file and Path(file).is_file() else id(value.__globals__)
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, where, *map(_what, (*held, *given))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_what(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, dict):
        return tuple((name, _what(held)) for name, held in value.items())
    plain = isinstance(value, str | int | float | bytes | tuple | None) and _hashable(value)
    return (type(value), value) if plain else id(value)


def _hashable(value: Any) -> bool:
    try:
        return isinstance(hash(value), int)
    except TypeError:
        return False


@one_thread_at_a_time
def _traced_once(captured: Captured, stages: StageGraph, index: int, **how: Any) -> StageFunctions:
    cuts = tuple((stage.ops, stage.clones) for stage in stages.stages)
    treatments = frozenset(how.get("treatments", {}).items())
    key = (id(captured), cuts, index, how["device"], how.get("compiled"), treatments, how.get("ahead"))
    return _kept(_STAGE_FUNCTIONS, key, lambda: (captured, stage_functions(captured, stages, index, **how)))


def _kept(entries: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Of many entries, that which nobody has asked for longest goes: random models come once."""
    entries[key] = entries.pop(key, None) or make()
    if len(entries) > _MOST_ENTRIES:
        del entries[next(iter(entries))]
    return entries[key][-1]


def capture_of(job: Job, microbatch_size: int = 2, **how: Any) -> Captured:
    """A capture that is made once per job."""
    how["autocast"] = mixed_precision(how.pop("autocast", None), how.pop("device", "cpu"))
    return _remembered(capture, job, microbatch_size, **how)


def graph_of(job: Job, microbatch_size: int = 2) -> OpGraph:
    """The graph of that capture, with what the job's optimizer takes."""
    return planning.with_updates(capture_of(job, microbatch_size).graph, job)


def cuttable(graph: OpGraph) -> list[list[str]]:
    """Ops in order; those that no cut may separate are one."""
    names = [op.name for op in graph.ops if not op.cheap]
    place = {name: index for index, name in enumerate(names)}
    spans = [range(min(at), max(at) + 1) for at in ([place[n] for n in g] for g in graph.together.values())]
    pieces: list[list[str]] = []
    for index, name in enumerate(names):
        if any(index in span and index != span.start for span in spans):
            pieces[-1].append(name)
        else:
            pieces.append([name])
    return pieces


def places(captured: Captured) -> list[str]:
    """The ops that a cut assigns, in order."""
    return [op.name for op in captured.graph.ops if not op.cheap]


def split_at(captured: Captured, *cuts: int) -> dict[str, int]:
    """Op -> stage, with cuts in front of these places."""
    return {name: sum(at >= place for place in cuts) for at, name in enumerate(places(captured))}


def even(graph: OpGraph, stages: int) -> dict[str, int]:
    """Ops to stages in order, about the same number of what can be cut in each; fewer where there are not so
    many."""
    pieces = cuttable(graph)
    stages = min(stages, len(pieces))
    return {name: at * stages // len(pieces) for at, piece in enumerate(pieces) for name in piece}


def plan_for(
    captured: Captured,
    stage_of: Mapping[str, int],
    *,
    microbatches: int,
    microbatch_size: int = 2,
    schedule: str = "1f1b",
    split: bool = False,
    placement: Sequence[int] | None = None,
) -> Plan:
    graph = captured.graph
    stages = cut(graph, stage_of)
    where = tuple(placement or range(len(stages.stages)))
    made = registry.build(schedule, stages, where, microbatches, split_backward=split)
    return Plan(
        graph=graph.fingerprint,
        planner="test",
        placement=where,
        schedule=schedule,
        stages=tuple(StagePlan(ops=stage.ops) for stage in stages.stages),
        schedule_rows=tuple(str(made).splitlines()),
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        split_words=captured.split_words,
    )


def even_plan(job: Job, stages: int, *, words: int = 1, **how: Any) -> Plan:
    """words: in how many parts its heads are cut."""
    captured = capture_of(job, how.get("microbatch_size", 2), autocast=how.pop("autocast", None))
    if words > 1:
        captured = split_words(captured, {n: words for head in heads(captured) for n in head.names})
    return plan_for(captured, even(captured.graph, stages), **how)


def residuals_of(job: Job, plan: Plan, stage: int = 0) -> Mapping[str, Residual]:
    """Of a micro-batch on a stage, by name."""
    captured = capture_of(job, plan.microbatch_size)
    return stage_residuals(captured, plan.stage_graph(captured.graph), stage)


def treated_plan(job: Job, plan: Plan, *treatments: str, ahead: tuple[int, ...] = ()) -> Plan:
    """The residuals of each stage treated in turn; what cannot be recomputed is kept."""
    policy = []
    for stage in range(len(plan.stages)):
        given = zip(residuals_of(job, plan, stage).items(), cycle(treatments), strict=False)
        policy.append(
            {name: "keep" if how == "recompute" and r.obstacle else how for (name, r), how in given}
        )
    assert any(how != "keep" for stage in policy for how in stage.values())
    return replace(plan, memory=MemoryPolicy(stages=tuple(policy), ahead=ahead))  # type: ignore[arg-type]


@dataclass
class Numbers:
    """What a few training steps gave. gradients: of the last step, before clipping or update."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    evaluated: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


def each_rank(job: Job, plan: Plan, work: Callable[[Pipeline], Any], **options: Any) -> list[Any]:
    """Run `work(pipeline)` on each rank of a plan, one thread per rank; its results."""

    def on_rank(_: int, channel: Channel) -> Any:
        with Pipeline(job, plan, options=Options(**options), channel=channel) as pipeline:
            return work(pipeline)

    return threads(len(plan.schedule_rows), on_rank)


def pipelined(
    job: Job, plan: Plan, batches: Sequence[Batch], *, evaluate: Sequence[Batch] = (), **options: Any
) -> Numbers:
    """Train on the batches, then evaluate; one thread per rank."""

    def work(pipeline: Pipeline) -> tuple[Mapping[str, PartRows], Numbers]:
        losses, norms = [], []
        for batch in batches:
            losses.append(pipeline.step(batch))
            norms.append(pipeline.report.grad_norm)
        weights = pipeline.weights
        return weights.rows, Numbers(
            losses=losses,
            norms=norms,
            gradients=dict(weights.last_gradients),
            parameters={n: p.detach().clone() for n, p in weights.params.items()},
            buffers={n: b.clone() for n, b in weights.buffers.items()},
            evaluated=[pipeline.evaluate(batch) for batch in evaluate],
        )

    with shared_captures():
        found = each_rank(job, plan, work, keep_gradients=True, **options)
    rows, found = found[0][0], [numbers for _, numbers in found]
    for rank in found[1:]:
        assert rank.losses == found[0].losses and rank.evaluated == found[0].evaluated
        assert rank.norms == found[0].norms
    return Numbers(
        losses=found[0].losses,
        evaluated=found[0].evaluated,
        norms=found[0].norms,
        gradients=joined(merged(rank.gradients for rank in found), rows),
        parameters=joined(merged(rank.parameters for rank in found), rows),
        buffers=merged(rank.buffers for rank in found),
    )


def merged(parts: Any) -> dict[str, Tensor]:
    """All ranks' tensors by name; replicas must be equal to the last bit."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"replicas of {name} differ"
    return whole


def plain(
    job: Job,
    batches: Sequence[Batch],
    microbatches: int,
    *,
    evaluate: Sequence[Batch] = (),
    clip_norm: float | None = None,
    scheduler: Any = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> Numbers:
    """The same in plain PyTorch: one process, the user's own module, gradients summed over micro-batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = job.model()
    optimizer = make_optimizer(job.optimizer, {n: p for n, p in model.named_parameters() if p.requires_grad})
    plan = scheduler(optimizer) if scheduler else None
    losses, norms, gradients = [], [], {}
    for batch in batches:
        losses.append(_accumulate(job, model, batch, microbatches, autocast))
        gradients = {n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(
            None
            if clip_norm is None
            else float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        )
        optimizer.step()
        model.zero_grad()
        if plan is not None:
            plan.step()
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        evaluated = [_weighted_loss(job, model, batch, microbatches) for batch in evaluate]
    return Numbers(losses, gradients, parameters, buffers, evaluated, norms)


def _shares(job: Job, batch: Batch, microbatches: int) -> list[tuple[Batch, float]]:
    parts = split_batch(batch, microbatches)
    weights = [float(job.weight(p)) if job.weight else float(rows_of(p)) for p in parts]
    return [(part, weight / sum(weights)) for part, weight in zip(parts, weights, strict=True)]


def _accumulate(job: Job, model: Any, batch: Batch, microbatches: int, autocast: torch.dtype | None) -> float:
    total = 0.0
    for part, share in _shares(job, batch, microbatches):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = scalar_loss(job, model(**part), part)
        (loss * share).backward()
        total += float(loss.detach()) * share
    return total


def _weighted_loss(job: Job, model: Any, batch: Batch, microbatches: int) -> float:
    return sum(
        float(scalar_loss(job, model(**part), part)) * share
        for part, share in _shares(job, batch, microbatches)
    )


class Sums(dict[str, Tensor], Sink):
    """Gradients of parameters, added up."""

    def add(self, name: str, grad: Tensor) -> None:
        self[name] = self[name] + grad if name in self else grad.clone()


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference and whose it is; infinite if names differ."""
    by_name = differences(found, expected)
    worst = max(by_name, key=by_name.__getitem__, default="nothing")
    return by_name.get(worst, 0.0), worst


def assert_same(found: Numbers, expected: Numbers, *, tolerance: float) -> None:
    """Losses, gradients, parameters, buffers and evaluation losses agree."""
    for name in ("losses", "evaluated"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), f"{name}: {a} != {b}"
    for name in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if name == "buffers":  # constants of the forward are buffers to us
            ours = {n: t for n, t in ours.items() if n in theirs}
        worst, where = difference(ours, theirs)
        assert worst <= tolerance, f"{name}: {where} differs by {worst:.3g}"


def assert_same_bits(found: Numbers, expected: Numbers) -> None:
    """Losses, gradients, parameters and buffers are equal to the last bit."""
    assert found.losses == expected.losses
    for kind in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), f"{kind} of {name}"

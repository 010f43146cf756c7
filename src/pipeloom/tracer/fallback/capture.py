"""Capture by recording a run, for models that torch.export cannot capture; and their stage functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.errors import CaptureError, CutError, PipeloomError
from ...ir.graph import OpGraph, Value
from ...ir.stages import StageGraph
from ..blueprint import Blueprint
from ..export import model_buffers, model_parameters
from ..job import Job
from ..layout import zeros
from ..meta import autocast_region
from ..stage import Sink, made_bytes
from .forward_path import PATH, Path, encode
from .recorded_ops import Member, wire
from .recorded_run import LOSS, Course
from .recorder import Recorder
from .skeleton import Skeleton
from .stage_functions import ModuleFunctions
from .stage_task import task_of
from .trial_parameters import Materials, make
from .units import derive_units, is_container, listed_units, size_of

_log = logging.getLogger("pipeloom")


@dataclass(eq=False)
class ModuleCut:
    """A model captured as modules.

    reason: why.  units: FQNs.  groups: units that form one op, or None.  batch: what was recorded.
    """

    job: Job
    reason: str
    skeleton: Skeleton
    units: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...] | None
    course: Course
    members: Sequence[Member]
    batch: Mapping[str, Tensor]
    autocast: torch.dtype | None


def cut_modules(
    job: Job,
    batch: Mapping[str, Tensor],
    made: Blueprint,
    *,
    reason: str,
    autocast: torch.dtype | None = None,
    like: ModuleCut | None = None,
) -> tuple[OpGraph, ModuleCut]:
    """Record a run of a job's model and make one op of each unit call.

    reason: why export was not used.  like: an earlier cut of the same job, for a batch of other shapes: the
        units stay, and the forward takes the same way.
    Raises: CaptureError if the forward fails, CutError if Job.modules cannot be.
    """
    skeleton = like.skeleton if like is not None else Skeleton(made)
    units, groups, course = _recorded(job, batch, skeleton, autocast, like)
    with skeleton.evaluating():
        evaluated = _record(job, batch, skeleton, autocast, course.tainted)
    course.evaluated = evaluated.call_named
    course.values = evaluated.values | course.values
    for unit, names in course.remembered.items():
        _log.warning(
            "%s changes its attribute %s: stages that do not run it never see that, so the code between "
            "modules must not depend on it",
            unit,
            ", ".join(names),
        )
    wiring = wire(course, skeleton, groups)
    ops = wiring.ops()
    sent = {value.name for op in ops for value in op.outputs}
    course.samples = {name: sample.clone() for name, sample in course.samples.items() if name in sent}
    graph = OpGraph(
        name=job.name,
        inputs=tuple(_value(key, tensor) for key, tensor in batch.items()),
        ops=ops,
        parameters=model_parameters(skeleton.model, wiring.reached()),
        buffers=model_buffers(skeleton.model, {n: skeleton.resting(n) for n in skeleton.attributes}),
        loss=LOSS,
        fallback=reason,
    )
    cut = ModuleCut(
        job=job,
        reason=reason,
        skeleton=skeleton,
        units=units,
        groups=groups,
        course=course,
        members=wiring.members,
        batch=dict(batch),
        autocast=autocast,
    )
    return graph, cut


def _value(name: str, tensor: Tensor) -> Value:
    return Value(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _recorded(
    job: Job,
    batch: Mapping[str, Tensor],
    skeleton: Skeleton,
    autocast: torch.dtype | None,
    like: ModuleCut | None,
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...] | None, Course]:
    """The units and a run with them. A module that decides on data within becomes a unit itself."""
    if like is not None:
        return like.units, like.groups, _record(job, batch, skeleton, autocast, like.course.tainted)
    groups = listed_units(skeleton.model, job.modules) if job.modules is not None else None
    whole: frozenset[str] = frozenset()
    while True:
        units = derive_units(skeleton.model, whole) if groups is None else sum(groups, ())
        skeleton.install(units)
        course = _record(job, batch, skeleton, autocast, ())
        more = _decides_within(course, skeleton.model, trunks_of(units)) - whole
        if groups is not None or not more:
            break
        whole |= more
    if not course.calls:  # all that is computed is computed by the model's own forward
        units = ("",)
        skeleton.install(units)
        course = _record(job, batch, skeleton, autocast, ())
    return units, groups, course


def _decides_within(course: Course, model: nn.Module, trunks: Sequence[str]) -> frozenset[str]:
    """Modules to keep whole, although they were expanded: those that shape tensors by data, and, where they
    hold less than half of the parameters, those that decide on data or may be called or not by such a
    decision of the model's own forward."""
    suspects = set(course.undecided) - {""}
    if "" in course.undecided:
        shapes = course.undecided[""]
        suspects |= {fqn for fqn in trunks if shapes or not is_container(model.get_submodule(fqn))}
    return frozenset(
        fqn
        for fqn in suspects
        if course.undecided.get(fqn) or 2 * size_of(model.get_submodule(fqn)) < size_of(model)
    )


def trunks_of(units: Sequence[str]) -> list[str]:
    """Modules that are no units and have units below.

    >>> trunks_of(["encoder.layers.0", "head"])
    ['encoder', 'encoder.layers']
    """
    return sorted(
        {".".join(parts[:size]) for parts in (u.split(".") for u in units) for size in range(1, len(parts))}
    )


def _record(
    job: Job,
    batch: Mapping[str, Tensor],
    skeleton: Skeleton,
    autocast: torch.dtype | None,
    forced: Sequence[float],
) -> Course:
    """Try without data, then on the CPU, then on a GPU if there is one."""
    attempts = [(torch.device("cpu"), True), (torch.device("cpu"), False)]
    if torch.cuda.is_available():
        attempts.append((torch.device("cuda"), False))
    problem: Exception | None = None
    for device, fake in attempts:
        try:
            return _attempt(job, batch, skeleton, autocast, Materials(skeleton, device, fake=fake), forced)
        except PipeloomError:
            raise
        except Exception as error:  # the user's forward raises every kind of exception
            clear_frames(error.__traceback__)  # as `exporting.export` does
            problem = error
        finally:
            skeleton.rest()
    text = str(problem).strip().splitlines()
    raise CaptureError(
        f"the forward of {job.name} fails: {type(problem).__name__}: {text[0] if text else 'no message'}",
        hint="run one training step of the model in plain PyTorch on a batch of Job.batch",
    ) from problem


def _attempt(
    job: Job,
    batch: Mapping[str, Tensor],
    skeleton: Skeleton,
    autocast: torch.dtype | None,
    materials: Materials,
    forced: Sequence[float],
) -> Course:
    recorder = Recorder(skeleton, materials, forced=forced, trunks=trunks_of(list(skeleton.units)))
    with torch.random.fork_rng(), autocast_region(materials.device.type, autocast):
        if not materials.fake:
            return recorder.record(job, {key: t.to(materials.device).clone() for key, t in batch.items()})
        mode = next(p.fake_mode for p in _fakes(skeleton))
        with mode:
            return recorder.record(job, {key: mode.from_tensor(t) for key, t in batch.items()})


def _fakes(skeleton: Skeleton) -> list[FakeTensor]:
    found = [t for name in skeleton.names if isinstance(t := skeleton.resting(name), FakeTensor)]
    if not found:
        raise ValueError("the model has no parameters")
    return found


def module_functions(
    cut: ModuleCut,
    graph: OpGraph,
    stages: StageGraph,
    index: int,
    *,
    device: str = "cpu",
    compiled: bool = False,
) -> ModuleFunctions:
    """The functions of one stage; see `tracer.stage.trace.stage_functions`."""
    task = task_of(cut.course, cut.members, cut.units, stages, index)
    received = {c.value.name: c.value for c in stages.crossings if c.target == index}
    sent = {c.value.name: graph.value[c.value.name] for c in stages.crossings if c.source == index}
    gives = [*sent.values(), *[graph.value[LOSS]] * task.makes_loss]
    if compiled:
        cut.skeleton.compile_units(eager={call.unit for call in cut.course.calls if call.random})
    functions = ModuleFunctions(
        index=index,
        params=stages.params[index],
        buffers=stages.buffers[index],
        batch=tuple(v.name for v in graph.inputs),
        received=tuple(sorted(received)),
        sent=tuple(sorted(sent)),
        loss=LOSS if task.makes_loss else None,
        differentiable=any(value.needs_grad for value in gives),
        examples={n: _example(cut, graph.value[n], torch.device(device)) for n in received},
        job=cut.job,
        task=task,
        skeleton=cut.skeleton,
        values=received | sent,
        updated=frozenset(n for op in graph.ops for n in op.updates if n in stages.buffers[index]),
        trainable=frozenset(p.name for p in graph.parameters if p.trainable),
        autocast=cut.autocast,
    )
    _trial(functions, cut, torch.device(device))
    return functions


def _example(cut: ModuleCut, value: Value, device: torch.device) -> Tensor:
    """What a stage received in the recorded run; made up if that had no data."""
    if value.name.startswith(PATH):
        calls = [cut.units.index(call.unit) for call in cut.course.calls]
        return encode(Path(cut.course.decisions, calls), value, device)
    sample = cut.course.samples.get(value.name)
    if sample is not None:
        return sample.to(device)
    made = zeros(value, device)
    return made.normal_(0.0, 0.1) if made.is_floating_point() else made


def initial_state(cut: ModuleCut, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers as the model makes them with seed 0, for trial runs."""
    return make(cut.skeleton, names, device, seed=0)


class Nowhere(Sink):
    """A sink for gradients that nobody wants."""

    def add(self, name: str, grad: Tensor) -> None:
        pass


def _trial(functions: ModuleFunctions, cut: ModuleCut, device: torch.device) -> None:
    """Run each function once on initial weights, to know what memory it takes."""
    names = [*functions.params, *functions.buffers]
    state = initial_state(cut, names, device)
    inputs = {n: t.to(device) for n, t in cut.batch.items()} | dict(functions.examples)
    with torch.random.fork_rng(), torch.no_grad():
        for split in (False, True):
            outputs, residuals = functions.forward(state, inputs, 0)
            if not functions.differentiable:
                return
            functions.residual_bytes = {"autograd": made_bytes(residuals)}
            grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
            outputs.clear()
            if not split:
                functions.backward(state, residuals, grads, Nowhere())
                continue
            try:
                _, carried = functions.backward_input(state, residuals, grads)
            except CutError:  # it is an error only if the schedule splits the backward
                return
            functions.carried_bytes = made_bytes(carried)
            functions.backward_weight(state, carried, Nowhere())

"""Capture by recording a run, for models that torch.export cannot capture; and their stage functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from traceback import clear_frames

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...ir.errors import CutError, PipeloomError
from ...ir.graph import OpGraph, Value
from ...ir.stages import Stage, StageGraph
from ...ir.user_code import at, definition_of
from ..autocast import Autocast, autocast_region
from ..blueprint import Blueprint
from ..export import without_export_output
from ..guards import (
    AttributeWatch,
    ParameterWatch,
    WeightChangesRefused,
    attributes_kept,
    backward_hooks,
    caches_kept,
    refuse_transforms,
    settled,
    warn_of_updates,
    warn_once,
)
from ..job import Job
from ..job_calls import evaluation_mode, failed_call
from ..op_graph import model_buffers, model_parameters
from ..tensors import zeros_like_value
from .functions import ModuleFunctions
from .ops import ModuleOp, build_ops, is_dynamic
from .path import PATH_PREFIX, ForwardPath, encode_path
from .record import LOSS, ForwardRecorder, RecordedRun, SameStage, value_of
from .run import derive_stage_task
from .skeleton import Skeleton, TrialParameters
from .trial import TRIAL_LIMIT_BYTES, TRIAL_WAYS, finest_cut, first_failure, trial_run
from .units import derive_units, is_container, listed_units, size_of


@dataclass(eq=False)
class ModuleCut:
    """A model captured as modules.

    reason: why.  units: FQNs.  groups: units that form one op, or None.  batch: what was recorded.
    together: calls that no stage could run apart when that was tried.
    """

    job: Job
    reason: str
    skeleton: Skeleton
    units: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...] | None
    recording: RecordedRun
    module_ops: Sequence[ModuleOp]
    batch: Mapping[str, Tensor]
    autocast: Autocast | None
    together: tuple[SameStage, ...] = ()


def cut_modules(
    job: Job,
    batch: Mapping[str, Tensor],
    blueprint: Blueprint,
    *,
    reason: str,
    autocast: Autocast | None = None,
    like: ModuleCut | None = None,
) -> tuple[OpGraph, ModuleCut]:
    """Record a run of a job's model and make one op of each unit call.

    reason: why export was not used.  like: an earlier cut of the same job, for a batch of other shapes: the
        units stay, and the forward takes the same way.
    Raises: CaptureError if the forward fails, CutError if Job.modules cannot be.
    """
    skeleton = like.skeleton if like is not None else Skeleton(blueprint)
    units, groups, recording = _recorded(job, batch, skeleton, autocast, like)
    with evaluation_mode(skeleton.model, WeightChangesRefused(skeleton.model)):
        evaluated = _record(job, batch, skeleton, autocast, recording.tainted_decisions)
    changed = (each.updates for kind in (evaluated.calls, evaluated.effects) for each in kind)
    warn_of_updates([*dict.fromkeys(chain.from_iterable(changed))], job.name)
    recording.evaluation_calls = {call.name: call for call in evaluated.calls}
    recording.values = evaluated.values | recording.values
    together: tuple[SameStage, ...] = like.together if like is not None else ()
    while True:
        cut = ModuleCut(
            job=job,
            reason=reason,
            skeleton=skeleton,
            units=units,
            groups=groups,
            recording=recording,
            module_ops=(),
            batch=dict(batch),
            autocast=autocast,
            together=together,
        )
        graph = _assemble(cut)
        failure = None if like is not None else _try_stages(cut, graph)
        if failure is None:
            return graph, cut
        together = (*together, _kept_together(cut, *failure, tries=len(together)))


def _assemble(cut: ModuleCut) -> OpGraph:
    skeleton, recording = cut.skeleton, cut.recording
    builder = build_ops(recording, skeleton, cut.groups, cut.together)
    ops = builder.ops()
    if recording.parameter_watch is not None:
        readers = Counter(name for op in ops for name in op.params)
        recording.parameter_watch.refuse(readers, skeleton.model)
        recording.changed_parameters = tuple(recording.parameter_watch.changed)
        recording.parameter_watch = None
    if not cut.together:
        for unit, names in recording.changed_attributes.items():
            warn_once(
                f"{unit} changes its attribute {', '.join(names)}: stages that do not run it never see that, "
                "so the code between modules must not depend on it"
            )
    sent = {value.name for op in ops for value in op.outputs}
    recording.samples = {name: sample.clone() for name, sample in recording.samples.items() if name in sent}
    cut.module_ops = builder.module_ops
    if len(ops) == 1:
        where = at(definition_of(type(skeleton.model)))
        why = (
            cut.together[-1].why if cut.together else f"what computes is the forward of {cut.job.name}{where}"
        )
        cut.reason += f"; nor can it be cut between its modules: {why}; move that into modules of its own"
    return OpGraph(
        name=cut.job.name,
        inputs=tuple(value_of(key, tensor.detach()) for key, tensor in cut.batch.items()),
        ops=ops,
        parameters=model_parameters(skeleton.model, builder.reached()),
        buffers=model_buffers(skeleton.model, {n: skeleton.resting(n) for n in skeleton.attributes}),
        loss=LOSS,
        fallback=cut.reason,
    )


def _try_stages(cut: ModuleCut, graph: OpGraph) -> tuple[Stage, CutError] | None:
    """The first stage of the finest cut that does not run, and why; None if all do, or the model is too large
    or in another place to try."""
    skeleton, recording = cut.skeleton, cut.recording
    size = sum(skeleton.resting(name).nbytes for name in skeleton.names)
    if recording.device != "cpu" or size > TRIAL_LIMIT_BYTES or len(graph.ops) < 2:
        return None
    stages = finest_cut(graph)
    functions = [_stage_functions(cut, graph, stages, stage.index) for stage in stages.stages]
    ways = TRIAL_WAYS if is_dynamic(recording, cut.module_ops) else 1
    return first_failure(functions, stages, cut.batch, ways)


def _kept_together(cut: ModuleCut, stage: Stage, error: CutError, *, tries: int) -> SameStage:
    """Put the ops of a stage that does not run together with those before it: each time with more of them.

    Raises: CutError if Job.modules does not allow that.
    """
    if cut.groups is not None:
        raise error
    number = {module_op.name: index for index, module_op in enumerate(cut.module_ops)}
    first, last = number[stage.ops[0]], number[stage.ops[-1]]
    begin = cut.module_ops[max(0, first - 2**tries)]
    end = cut.module_ops[max(last, 1)]
    stays = f"{cut.job.name}: {begin.name} to {end.name} stay in one stage"
    warn_once(f"{stays}, because otherwise {error.message}; {error.hint}")
    return SameStage(begin.calls[0], end.calls[-1], error.message)


def _recorded(
    job: Job,
    batch: Mapping[str, Tensor],
    skeleton: Skeleton,
    autocast: Autocast | None,
    like: ModuleCut | None,
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...] | None, RecordedRun]:
    """The units and a run with them. A module that decides on data within becomes a unit itself."""
    if like is not None:
        recording = _record(job, batch, skeleton, autocast, like.recording.tainted_decisions)
        return like.units, like.groups, recording
    groups = listed_units(skeleton.model, job.modules) if job.modules is not None else None
    whole = skeleton.with_hooks
    _refuse_cut_hooks(skeleton, groups)
    while True:
        units = ("",) if "" in whole else derive_units(skeleton.model, whole)
        units = units if groups is None else sum(groups, ())
        skeleton.install(units)
        recording = _record(job, batch, skeleton, autocast, ())
        more = _decides_within(recording, skeleton.model, trunks_of(units)) - whole
        if groups is not None or not more:
            break
        whole |= more
    if not recording.calls and units != ("",):  # all that is computed is computed by the model's own forward
        units = ("",)
        skeleton.install(units)
        recording = _record(job, batch, skeleton, autocast, ())
    return units, groups, recording


def _refuse_cut_hooks(skeleton: Skeleton, groups: tuple[tuple[str, ...], ...] | None) -> None:
    """Raises: CutError if Job.modules cuts a module whose hooks are called with gradients."""
    trunks = {"", *trunks_of(sum(groups or (), ()))}
    for hook in backward_hooks(skeleton.model):
        if groups is not None and hook.owner in trunks:
            raise CutError(
                f"Job.modules cuts {hook.owner or 'the model'}, which has a hook by {hook}: no rank has its "
                "gradients",
                hint="name the module as a whole, or put the hook on a module inside it",
            )


def _decides_within(recording: RecordedRun, model: nn.Module, trunks: Sequence[str]) -> frozenset[str]:
    """Modules to keep whole, although they were expanded: those that shape tensors by data, and, where they
    hold less than half of the parameters, those that decide on data or may be called or not by such a
    decision of the model's own forward."""
    suspects = set(recording.decides_on_data) - {""}
    if "" in recording.decides_on_data:
        shapes = recording.decides_on_data[""]
        suspects |= {fqn for fqn in trunks if shapes or not is_container(model.get_submodule(fqn))}
    return frozenset(
        fqn
        for fqn in suspects
        if recording.decides_on_data.get(fqn) or 2 * size_of(model.get_submodule(fqn)) < size_of(model)
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
    autocast: Autocast | None,
    forced: Sequence[float],
) -> RecordedRun:
    """Try without data, then on the CPU, then on an accelerator if there is one."""
    attempts = [(torch.device("cpu"), True), (torch.device("cpu"), False)]
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        attempts.append((accelerator, False))
    problem: Exception | None = None
    for device, fake in attempts:
        try:
            parameters = TrialParameters(skeleton, device, fake=fake)
            with without_export_output():
                return _attempt(job, batch, skeleton, autocast, parameters, forced)
        except PipeloomError:
            raise
        except Exception as error:  # the user's forward raises every kind of exception
            clear_frames(error.__traceback__)  # as `export_program` does
            problem = error
        finally:
            skeleton.rest()
    assert problem is not None, "there was an attempt"
    refuse_transforms(problem, job.name)
    raise failed_call(job, batch, problem) from problem


def _attempt(
    job: Job,
    batch: Mapping[str, Tensor],
    skeleton: Skeleton,
    autocast: Autocast | None,
    parameters: TrialParameters,
    forced: Sequence[float],
) -> RecordedRun:
    mode = _fake_mode(skeleton) if parameters.fake else None
    if mode is None:
        batch = {key: t.to(parameters.device).clone() for key, t in batch.items()}
    else:
        batch = {key: mode.from_tensor(t) for key, t in batch.items()}

    def run(first: RecordedRun | None) -> tuple[RecordedRun, AttributeWatch]:
        taken = forced if first is None else first.tainted_decisions
        recorder = ForwardRecorder(skeleton, parameters, forced=taken, trunks=trunks_of([*skeleton.units]))
        watch = AttributeWatch(skeleton.model, units=skeleton.units, inside=lambda: recorder.inside)
        changes = ParameterWatch(parameters.storages, between=lambda: not recorder.inside)
        with torch.random.fork_rng(), watch.watching():
            cast = autocast_region(autocast, run_on=parameters.device.type)
            with cast, mode or nullcontext(), changes.watching():
                recording = recorder.record(job, batch)
            watch.look()
        skeleton.rest()
        recording.parameter_watch, recording.device = changes, parameters.device.type
        return recording, watch

    with attributes_kept(skeleton.model), caches_kept():
        return settled(run, lambda first, second: first.glue == second.glue)


def _fake_mode(skeleton: Skeleton) -> FakeTensorMode:
    for name in skeleton.names:
        if isinstance(tensor := skeleton.resting(name), FakeTensor):
            return tensor.fake_mode
    raise ValueError("the model has no parameters")


def module_stage_functions(
    cut: ModuleCut,
    graph: OpGraph,
    stages: StageGraph,
    index: int,
    *,
    device: str = "cpu",
    compiled: bool = False,
) -> ModuleFunctions:
    """The functions of one stage; see `tracer.stage.trace.stage_functions`."""
    if compiled:
        cut.skeleton.compile_units(eager={call.unit for call in cut.recording.calls if call.random})
    functions = _stage_functions(cut, graph, stages, index, device)
    trial_run(functions, cut.batch, torch.device(device))
    cut.skeleton.left.clear()  # what the trial has left
    return functions


def _stage_functions(
    cut: ModuleCut, graph: OpGraph, stages: StageGraph, index: int, device: str = "cpu"
) -> ModuleFunctions:
    task = derive_stage_task(cut.recording, cut.module_ops, cut.units, stages, index)
    received = {c.value.name: c.value for c in stages.crossings if c.target == index}
    sent = {c.value.name: graph.value[c.value.name] for c in stages.crossings if c.source == index}
    gives = [*sent.values(), *[graph.value[LOSS]] * task.makes_loss]
    differentiable = any(value.needs_grad for value in gives)
    return ModuleFunctions(
        index=index,
        params=stages.params[index],
        buffers=stages.buffers[index],
        batch=tuple(v.name for v in graph.inputs),
        received=tuple(sorted(received)),
        sent=tuple(sorted(sent)),
        loss=LOSS if task.makes_loss else None,
        differentiable=differentiable,
        kept_inputs=frozenset(received if differentiable else ()),  # autograd may keep any of them
        examples={n: _example(cut, graph.value[n], torch.device(device)) for n in received},
        job=cut.job,
        task=task,
        skeleton=cut.skeleton,
        values=received | sent,
        updated=frozenset(n for op in graph.ops for n in op.updates if n in stages.buffers[index]),
        trainable=frozenset(p.name for p in graph.parameters if p.trainable),
        autocast=cut.autocast,
    )


def _example(cut: ModuleCut, value: Value, device: torch.device) -> Tensor:
    """What a stage received in the recorded run; made up if that had no data."""
    if value.name.startswith(PATH_PREFIX):
        calls = [cut.units.index(call.unit) for call in cut.recording.calls]
        return encode_path(ForwardPath(cut.recording.decisions, calls), value, device)
    sample = cut.recording.samples.get(value.name)
    if sample is not None:
        return sample.to(device)
    tensor = zeros_like_value(value, device)
    return tensor.normal_(0.0, 0.1) if tensor.is_floating_point() else tensor

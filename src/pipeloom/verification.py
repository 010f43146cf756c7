"""Whether a pipeline gives the numbers of plain PyTorch: `verify`, and a comparison before a first run.

`verify` runs a step by a pipeline (`pipelined_step`) and by the user's own module (`plain_step`), and
compares their numbers (`differences`). `verify_once` does so with two micro-batches before a model's first
run here, with as many rows as time and memory allow.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from . import __version__
from .caches import cache_folder, cache_key, keep
from .clusters.names import machine_memory
from .ir.errors import BatchError, VerifyError
from .ir.flow import flow_of
from .ir.graph import Op, OpGraph, PartRows, storages
from .ir.memory_policy import KEEP_ALL
from .ir.plan import Plan, StagePlan
from .ir.text import format_bytes
from .ir.user_code import is_user_file
from .ir.weight_policies import FLUSH
from .profiler.measure_op import torch_threads
from .profiler.measurement import usable_cores
from .run_options import Options
from .runnable import require_runnable_plan, require_training
from .runtime.batches import loss_shares, off_mean, rows_of, split_batch
from .runtime.channel import Channel, run_threads
from .runtime.checkpoint import joined
from .tracer.autocast import Autocast, autocast_region
from .tracer.captured import Captured
from .tracer.job import Job
from .tracer.job_calls import call_model, make_optimizer, scalar_loss
from .tracer.random import DrawRecorder, DrawReplay, OtherDraws, constructor_draws

_log = logging.getLogger("pipeloom")

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Differences by rounding alone, relative to a tensor's largest entry: sums in another order, several ops
deep. About 80 times the spacing of float32 and 8 times that of the short types."""

NOISE = 1e-3
"""Differences are relative to the largest entry of a tensor, or to this share of the largest entry of any,
whichever is more: a gradient that is zero but for rounding has no digits to compare."""

EAGER = "the module itself, eager"

NOT_FINITE_HINT = (
    "look at its logarithms, its divisions and the batch; `Pipeline(find_nan=True)` with compare=False "
    "(Options.compare) names the op"
)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Largest relative differences between the pipeline and one process.

    gradients, parameters, buffers: by FQN.  reference: what the one process ran, with the reason if that was
    not the module itself: then what capturing the model may have changed is not seen. A difference is
    infinite where either side has a value that is not finite: of such numbers nothing can be said.
    not_finite: what is not finite in plain PyTorch, too, and in the same places, as `largest` calls it, with
    a sentence on it.
    off_mean: how far the loss of two micro-batches as one batch, in plain PyTorch, is from the mean over
    theirs, relative; 0 if neither is finite. None where that says nothing: with `Job.weight`, with one
    micro-batch, and of a model that draws random numbers, has batch statistics or changes its buffers, or
    that takes no batch so large.
    warning: if all is equal, and that is above the tolerance, what it means.
    """

    loss: float
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    buffers: Mapping[str, float]
    tolerance: float
    reference: str
    not_finite: Mapping[str, str] = field(default_factory=dict)
    off_mean: float | None = None
    warning: str = ""

    @property
    def worst(self) -> float:
        return self.largest[1]

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance and not self.not_finite

    @property
    def hint(self) -> str | None:
        """What to do where numbers are not finite in plain PyTorch, too, and nothing else differs."""
        return NOT_FINITE_HINT if self.not_finite and self.worst <= self.tolerance else None

    @property
    def largest(self) -> tuple[str, float]:
        """What differs most, in words, and by how much; what is `not_finite` is left out."""
        where = {"loss": self.loss} | {f"gradient of {n}": d for n, d in self.gradients.items()}
        where |= {f"updated {n}": d for n, d in self.parameters.items()}
        where |= {f"buffer {n}": d for n, d in self.buffers.items()}
        comparable = {name: d for name, d in where.items() if name not in self.not_finite}
        return max(comparable.items(), key=lambda item: item[1], default=("loss", 0.0))

    @property
    def independent(self) -> bool:
        """Whether the pipeline was compared with the user's own module."""
        return self.reference.startswith(EAGER)

    @property
    def verdict(self) -> str:
        """What differs most, by how much, and the tolerance; or what is not finite in plain PyTorch, too."""
        if self.hint is not None:
            return next(iter(self.not_finite.values()))
        name, difference = self.largest
        return f"{name} differs by {difference:.3g} relative, the tolerance is {self.tolerance:.3g}"

    def require(self) -> None:
        """Raises: VerifyError if a difference is above the tolerance, or numbers are not finite."""
        if not self.passed:
            promise = "report it with the model and the plan: equal numbers are a promise"
            raise VerifyError(self.verdict, hint=self.hint or promise)


def verify(
    job: Job,
    plan: Plan,
    *,
    options: Options | None = None,
    tolerance: float | None = None,
    seed: int = 1,
    captured: Captured | None = None,
    rows: int | None = None,
) -> Verification:
    """Run one step of a plan, with ranks as threads of this process, and of a single process; compare.

    Updated parameters are compared with what the job's optimizer (plain SGD where it names none) makes of
    the pipeline's own gradients in one process: those are compared already, and Adam would turn the
    rounding of a zero gradient into a full-sized update. The one process runs the user's own module. Where
    the model draws random numbers it draws those of its captured graph, run uncut; if it cannot, that graph
    is what the pipeline is compared with, and `reference` says so. A loss that is no mean over rows is warned
    of: the step's is the mean over its micro-batches, see `Verification.off_mean`.

    job, plan: as a `Pipeline` gets them.  options: of both runs, which are on the CPU; `keep_gradients` is on
    and `compare` off.
    tolerance: relative; by default what the coarsest dtype of the parameters explains.
    seed: for `Job.batch`, which gives the rows of one step.
    captured: the job's model, captured for the plan's micro-batches, if it is at hand.
    rows: of each micro-batch, instead of the plan's: the model is then captured anew for them, and cut alike.
    Returns: the largest relative differences. None is refused: `Verification.require` does that.
    Raises: PlanError if the plan was made for another model; ScheduleError if the runtime cannot run its
        schedule, or the schedule does not train; else as `Pipeline` and `Pipeline.step`, such as
        InfeasibleError, CaptureError and BatchError.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> two = {"ranks": 2, "microbatches": 2, "microbatch_size": 2, "cluster": "2 x a100-40"}
    >>> plan = pipeloom.plan(job, schedule="1f1b", **two)
    >>> result = pipeloom.verify(job, plan)
    >>> result.passed, result.reference
    (True, 'the module itself, eager')
    """
    require_runnable_plan(plan)
    require_training(plan)
    options = replace(options or Options(), device="cpu", keep_gradients=True, compare=False)
    job = replace(job, optimizer=job.optimizer or (lambda params: torch.optim.SGD(params, lr=0.1)))
    batch = job.batch(seed, plan.microbatches * (rows or plan.microbatch_size))
    pipelined = pipelined_step(job, plan, options, batch, captured)
    expected, reference = _reference(job, plan, options, batch, pipelined)
    initial = {name: t for name, t in expected.initial.items() if name not in pipelined.buffers}
    buffers = {n: t for n, t in pipelined.buffers.items() if n in expected.buffers}
    expected_buffers = {n: expected.buffers[n] for n in buffers}
    not_finite = dict[str, str]()
    if _same_not_finite(torch.tensor(pipelined.loss), torch.tensor(expected.loss)):
        not_finite["loss"] = f"the loss of {job.name} is {expected.loss} in plain PyTorch too"

    def compared(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
        apart = differences(found, wanted)
        for name in [n for n, d in apart.items() if d == inf and n in found and n in wanted]:
            if what == "buffer" and torch.equal(_wide(found[name]), _wide(wanted[name])):
                apart[name] = 0.0  # such as a mask, whose infinities are meant
            elif _same_not_finite(found[name], wanted[name]):
                of = f"{what} {name}"
                not_finite[of] = f"{of} of {job.name} is not finite in plain PyTorch too"
        return apart

    gradients = compared("gradient of", pipelined.gradients, expected.gradients)
    updated = _updated(job, initial, pipelined.gradients, options.clip_norm)  # which uses up the gradients
    tolerance = rounding(expected.initial, options.autocast) if tolerance is None else tolerance
    result = Verification(
        loss=_relative(abs(pipelined.loss - expected.loss), max(abs(expected.loss), 1e-12)),
        gradients=gradients,
        parameters=compared("updated", pipelined.parameters, updated),
        buffers=compared("buffer", buffers, expected_buffers),
        tolerance=tolerance,
        reference=reference,
        not_finite=not_finite,
        off_mean=expected.off_mean,
    )
    if result.passed and (off := result.off_mean or 0.0) > tolerance:
        result = replace(result, warning=_no_mean(job, off))
        _log.warning("%s", result.warning)
    return result


def _same_not_finite(found: Tensor, wanted: Tensor) -> bool:
    """Whether there are values that are not finite, and the same in both."""
    found, wanted = _wide(found).double(), _wide(wanted).double()
    bad = ~torch.isfinite(wanted)
    same = torch.equal(bad, ~torch.isfinite(found))
    return bool(bad.any()) and same and torch.allclose(found[bad], wanted[bad], equal_nan=True)


def _no_mean(job: Job, off: float) -> str:
    return (
        f"{job.name} trains with other numbers than one process without micro-batches: its loss of two of "
        f"them at once differs by {off:.2g} relative from the mean over both; if it is a mean over tokens, "
        "and not over rows, give their number as the weight of Job or Pipeline (docs/troubleshooting.md)"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepNumbers:
    """What one step gave.

    gradients: before clipping.  initial, parameters: before and after the update.  buffers: afterwards.
    autocast: the mixed precision that the model was captured in.
    draws: the random numbers that a pipeline of one rank has drawn, see `tracer.random`.
    random, python_random: whether a forward draws any, of PyTorch's or of Python's.
    by_rows: a forward draws nothing, has no batch statistics, and leaves all buffers as they were, so that it
    may be run once more for other rows.
    off_mean: see `Verification`.
    rows: of a pipeline's parameters that are parts of one.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Autocast | None = None
    draws: list[tuple[str, Tensor]] = field(default_factory=list)
    random: bool = False
    python_random: bool = False
    by_rows: bool = False
    off_mean: float | None = None
    rows: Mapping[str, PartRows] = field(default_factory=dict)


def plain_step(
    job: Job,
    plan: Plan,
    options: Options,
    batch: Mapping[str, Tensor],
    autocast: Autocast | None = None,
    draws: list[tuple[str, Tensor]] | None = None,
    *,
    joined: bool = False,
) -> StepNumbers:
    """Build the model, and run forward and backward of each micro-batch in plain PyTorch; no update.

    draws: random numbers to draw.  joined: also run the forward of two micro-batches at once, for `off_mean`.
    Raises: OtherDraws if it draws others.
    """
    parts = split_batch(batch, plan.microbatches)
    shares = loss_shares(parts, job.weight)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # whatever the caller has switched off
        torch.manual_seed(options.seed)
        with constructor_draws():
            model = job.model()
        named: dict[str, nn.Parameter] = dict(model.named_parameters())
        total, losses = 0.0, list[float]()
        replay = DrawReplay(draws) if draws is not None else None
        with replay or nullcontext():
            for part, share in zip(parts, shares, strict=True):
                given = _copies(part)  # which a forward may change in place
                with autocast_region(autocast):
                    own = scalar_loss(job, call_model(job, model, given), given)
                    loss = own * share
                losses.append(float(own.detach()))
                total += float(loss.detach())
                torch.autograd.backward(loss)
        if replay is not None:
            replay.require_all()
        initial = _copies(named)  # as the forwards leave them, such as an embedding with `max_norm`
        off = _off_mean(job, model, parts[:2], losses[:2], autocast) if joined else None
    held = dict(model.named_buffers()) | {n: p for n, p in named.items() if not p.requires_grad}
    return StepNumbers(  # nobody has the module from now on, so nothing of it is copied
        loss=total,
        gradients={name: p.grad.to_dense() for name, p in named.items() if p.grad is not None},
        initial=initial,
        buffers={name: tensor.detach() for name, tensor in held.items()},
        off_mean=off,
    )


def _off_mean(
    job: Job,
    model: nn.Module,
    parts: Sequence[Mapping[str, Tensor]],
    losses: Sequence[float],
    autocast: Autocast | None,
) -> float | None:
    """See `Verification`. None where the model cannot take so many rows: only micro-batches are promised to
    it. Of few parts, as a forward holds as much more as it has more rows."""
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    try:
        with torch.no_grad(), autocast_region(autocast):
            whole = float(scalar_loss(job, call_model(job, model, batch), batch))
    except Exception as error:  # the user's code raises every kind of exception
        _log.debug("the loss of %s is not compared with its mean over rows: %r", job.name, error)
        return None
    return off_mean(whole, losses, [rows_of(part) for part in parts])


def pipelined_step(
    job: Job, plan: Plan, options: Options, batch: Mapping[str, Tensor], captured: Captured | None = None
) -> StepNumbers:
    """The same by a plan's pipeline, with its ranks as threads of this process, and the update.

    captured: None where each rank captures the model, so that ranks share nothing of it.
    """
    from .pipeline import Pipeline  # which is compared by this module before its first step

    def run(rank: int, channel: Channel) -> StepNumbers:
        with Pipeline(job, plan, options=options, channel=channel, captured=captured) as pipeline:
            graph = pipeline.captured.graph
            random = any(op.random for op in graph.ops)
            python_random = pipeline.captured.draws_python_random
            may_stand_for_module = random or python_random
            by_rows = not may_stand_for_module and not any(op.updates or _mixes_rows(op) for op in graph.ops)
            by_rows = by_rows and not _has_batch_norm(pipeline.captured.blueprint.model)
            initial = _copies(pipeline.weights.params) if may_stand_for_module else {}
            # Of another size than the plan's, the stages are captured and traced now: nothing can be
            # captured while draws are recorded, and what it draws would be counted as the step's.
            pipeline.batches.take(batch, step=0)
            recorder = DrawRecorder() if may_stand_for_module and plan.ranks == 1 else None
            with recorder or nullcontext():
                loss = pipeline.step(batch)
            return StepNumbers(
                loss=loss,
                gradients=pipeline.weights.last_gradients,
                initial=initial,
                buffers=dict(pipeline.weights.buffers),
                parameters={n: p.detach() for n, p in pipeline.weights.params.items()},
                autocast=pipeline.captured.autocast,
                draws=recorder.draws if recorder is not None else [],
                random=random,
                python_random=python_random,
                by_rows=by_rows,
                rows=graph.rows,
            )

    steps = run_threads(plan.ranks, run, timeout_s=options.timeout_s)
    rows = steps[0].rows
    return replace(
        steps[0],
        gradients=joined({n: t for step in steps for n, t in step.gradients.items()}, rows),
        initial=joined({n: t for step in steps for n, t in step.initial.items()}, rows),
        buffers={n: t for step in steps for n, t in step.buffers.items()},
        parameters=joined({n: t for step in steps for n, t in step.parameters.items()}, rows),
    )


def _mixes_rows(op: Op) -> bool:
    return "batch_norm" in op.target and "no_training" not in op.target


def _has_batch_norm(model: nn.Module) -> bool:
    """Of a model that is cut between its modules the graph has no such op."""
    norms = (each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm))
    return any(each.training or each.running_mean is None for each in norms)


def _reference(
    job: Job,
    plan: Plan,
    options: Options,
    batch: Mapping[str, Tensor],
    pipelined: StepNumbers,
) -> tuple[StepNumbers, str]:
    """What one process gives, and what it ran."""
    if not pipelined.random and not pipelined.python_random:
        joined = pipelined.by_rows and job.weight is None and plan.microbatches > 1
        return plain_step(job, plan, options, batch, pipelined.autocast, joined=joined), EAGER
    uncut = pipelined
    if plan.ranks > 1:
        ops = tuple(op for stage in plan.stages for op in stage.ops)
        row = " ".join(f"0F{m} 0B{m}" for m in range(plan.microbatches))
        one_stage = _in_one_rank(plan, (StagePlan(ops=ops),), row)
        uncut = pipelined_step(job, one_stage, replace(options, compile=False), batch)
    try:
        if pipelined.python_random:
            raise OtherDraws("the forward draws Python's random numbers")
        plain = plain_step(job, plan, options, batch, pipelined.autocast, uncut.draws)
        return plain, f"{EAGER}, with the same random numbers"
    except OtherDraws as other:
        return uncut, f"its own captured graph, uncut, since {other}"


def _in_one_rank(plan: Plan, stages: tuple[StagePlan, ...], row: str) -> Plan:
    return replace(
        plan,
        stages=stages,
        placement=(0,) * len(stages),
        schedule="gpipe",
        schedule_rows=(row,),
        caps=(),
        peaks=(),
        memory=KEEP_ALL,
        weights=FLUSH,
        width=1,
    )


def _updated(
    job: Job, initial: Mapping[str, Tensor], gradients: Mapping[str, Tensor], clip_norm: float | None
) -> dict[str, Tensor]:
    """One step of the job's optimizer in one process, on gradients that it clips. Both are used up: a copy of
    each would be most of what comparing a large model takes."""
    params = {name: nn.Parameter(t) for name, t in initial.items() if name in gradients}
    for name, param in params.items():
        param.grad = gradients[name]
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(params.values(), clip_norm)
    assert job.optimizer is not None
    if params:
        make_optimizer(job.optimizer, params).step()
    return {name: params[name].detach() if name in params else t for name, t in initial.items()}


def rounding(tensors: Mapping[str, Tensor], autocast: torch.dtype | None = None) -> float:
    """Relative differences that the coarsest of these tensors' types explains.

    >>> rounding({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.bfloat16)})
    0.06
    """
    kinds = {t.dtype for t in tensors.values()} | {autocast}
    return max((size for dtype, size in ROUNDING.items() if dtype in kinds), default=ROUNDING[torch.float32])


def differences(pipelined: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, how far tensors are apart relative to their size, see `NOISE`; infinite for a tensor that only
    one side has, or with a value that is not finite."""
    sizes = {name: _largest(_wide(t)) for name, t in expected.items() if t.numel()}
    largest = max(filter(isfinite, sizes.values()), default=0.0)
    missing = {name: inf for name in expected.keys() ^ pipelined.keys()}
    return missing | {
        name: _relative(
            _largest(_wide(pipelined[name]) - _wide(expected[name])),
            max(size, NOISE * largest, 1e-30),
        )
        for name, size in sizes.items()
        if name in pipelined
    }


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in a type whose differences are exact enough. Those of float32 have float32's digits, which is
    far below any tolerance; float64 would take ten times as long."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype == torch.float32 else tensor.double()


def _largest(tensor: Tensor) -> float:
    """The largest absolute value of an entry; NaN if any entry is NaN."""
    low, high = tensor.aminmax()
    return float(torch.maximum(-low.double(), high.double()).abs())  # no -0.0


def _relative(difference: float, size: float) -> float:
    return difference / size if isfinite(difference) and isfinite(size) else inf


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


MICROBATCHES = 2
"""The second shows what the first has left behind."""

LIMIT_BYTES = 8 * 2**30
SHARE_OF_MEMORY = 0.25
"""What the comparison may need: at most so much, and this share of the machine's memory."""

MOST_S = 20.0
"""Where by the plan's times computing takes longer than this, smaller micro-batches are compared."""

ENOUGH_S = 10.0
"""They are so small that it takes no longer than this. The model is then captured and traced anew, which
takes seconds itself, so that less than half must be left to compute."""

LONG_S = 5.0
"""A comparison that took longer is mentioned: the first step was late for it."""


def verify_once(job: Job, plan: Plan, captured: Captured, options: Options) -> None:
    """Compare with plain PyTorch before a model's first run here, and remember that the numbers were equal.

    Does nothing if `options.compare` is off. What cannot be compared is said in a warning; that a loss is no
    mean over rows is said in one before every run. One rank calls it,
    before it trains. The model is built twice in this process, on the CPU.
    Raises: VerifyError if the numbers differ, or are not finite.
    """
    if not options.compare:
        return
    marker = cache_folder("compared") / _key(job, plan, captured, options)
    if marker.is_file():
        if job.weight is None and (warning := marker.read_text("utf-8").partition("\n")[2].strip()):
            _log.warning("%s", warning)
        return
    start = time.perf_counter()
    result = compare_what_fits(job, plan, captured, options)
    if isinstance(result, str):
        _warn(job, f"{result}; `pipeloom verify` compares a smaller one of its kind")
        return
    if (took_s := time.perf_counter() - start) > LONG_S:
        _log.warning("%s was compared with plain PyTorch in %.0f s, once for this model", job.name, took_s)
    if result.hint is not None:
        result.require()
    if not result.passed:
        raise VerifyError(
            f"{job.name} does not train as in plain PyTorch: in its first {MICROBATCHES} micro-batches "
            f"{result.verdict}",
            hint="does its forward read what an earlier call has left, or what is not in its modules? "
            "`pipeloom verify` shows more; compare=false (Options.compare) trains all the same",
        )
    if not result.independent:
        _warn(job, f"it was compared with {result.reference}")
        return
    keep(marker, f"equal within {result.tolerance:g}: {result.worst:.3g}\n{result.warning}\n")


def compare_what_fits(job: Job, plan: Plan, captured: Captured, options: Options) -> Verification | str:
    """With as many rows as are quick; if the job has no batch so small, as many as memory allows.

    Returns: the comparison, or why none was made.
    Raises: BatchError if the job makes no batch of the plan's size.
    """
    whole, limit = plan.microbatch_size, limit_bytes(plan)
    most = bisect_right(
        range(1, whole + 1), limit, key=lambda rows: needed_bytes(captured.graph, rows / whole)
    )
    allowed = f"{format_bytes(limit)} may be used for it"
    if not most:
        need = needed_bytes(captured.graph, 1 / whole)
        return f"that needs about {format_bytes(need)}, and {allowed}"
    reason = ""
    for rows in sorted({min(most, quick_rows(plan)), most}):
        try:
            result = compare_first(job, plan, captured, options, rows)
        except BatchError as error:
            if rows == whole:
                raise
            reason = f"{allowed}, enough for {rows} of its {whole} rows, and {error.message}"
            continue
        if rows < whole:
            need = needed_bytes(captured.graph)
            _log.warning(
                "%s was compared with plain PyTorch in micro-batches of %s; with %d, as it is trained, "
                "that %s",
                job.name,
                f"{rows} rows" if rows > 1 else "1 row",
                whole,
                f"needs about {format_bytes(need)}, and {allowed}"
                if rows == most
                else f"would take more than {MOST_S:.0f} s",
            )
        return result
    return reason


def compare_first(
    job: Job, plan: Plan, captured: Captured, options: Options, rows: int | None = None
) -> Verification:
    """The first micro-batches of a job by the stages of a plan, on one rank, and by the module itself.

    Two are in flight at once, as in the plan, so that what one changes under the other shows; and what only
    other ranks leave in attributes is not seen. captured: as the ranks have it.  rows: see `verify`.
    """
    order = flow_of(plan.stage_graph(captured.graph)).order
    parts = [f"{s}F{m}" for m in range(MICROBATCHES) for s in order]
    parts += [f"{s}B{m}" for m in range(MICROBATCHES) for s in reversed(order)]
    one_rank = replace(_in_one_rank(plan, plan.stages, " ".join(parts)), microbatches=MICROBATCHES)
    plain = Options(seed=options.seed, autocast=options.autocast, timeout_s=options.timeout_s)
    sgd = replace(job, optimizer=None)
    threads = torch_threads(max(torch.get_num_threads(), usable_cores()))  # the other ranks wait meanwhile
    with threads, captured.ranks_apart(plan.placement):
        return verify(sgd, one_rank, options=plain, seed=0, captured=captured, rows=rows)


def quick_rows(plan: Plan) -> int:
    """Rows of the largest micro-batches that are compared in time, by the plan's times; at least 1."""
    microbatch_s = sum(stage.forward_s + stage.input_grad_s + stage.weight_grad_s for stage in plan.stages)
    both_s = 2 * MICROBATCHES * microbatch_s  # by the stages, and by the module
    return plan.microbatch_size if both_s <= MOST_S else max(1, int(plan.microbatch_size * ENOUGH_S / both_s))


def needed_bytes(graph: OpGraph, share: float = 1.0) -> int:
    """About what the comparison holds: parameters, their gradients, and a copy of either, twice, and of each
    micro-batch all values that its forward makes, views aside, with their gradients.

    share: of the rows of the captured micro-batch.
    """
    state = sum(p.bytes for p in graph.parameters) + sum(b.bytes for b in graph.buffers)
    base = storages(graph)
    made = (value for op in graph.ops for value in op.outputs if base[value.name] == value.name)
    values = sum(value.bytes for value in made)
    return 7 * state + math.ceil(2 * MICROBATCHES * values * share)


def limit_bytes(plan: Plan) -> int:
    """What it may hold: no more than a rank of the plan, and no large share of the machine's memory."""
    return min(LIMIT_BYTES, int(SHARE_OF_MEMORY * machine_memory()), *plan.caps)


def _warn(job: Job, why: str) -> None:
    _log.warning("%s was not compared with plain PyTorch before its first step: %s", job.name, why)


def _key(job: Job, plan: Plan, captured: Captured, options: Options) -> str:
    """What a comparison holds for: the graph, the stages' ranks, the modules' classes, the user's files,
    and the versions.

    With what ops are called with besides tensors: a loss that is a sum differs by that alone from a mean. And
    with classes by name, as two in one file may have the same graph, of which one trains otherwise.
    """
    kinds = {type(module) for module in captured.blueprint.model.modules()}
    files = {_file_of(thing) for thing in (*kinds, job.loss, job.model) if thing is not None}
    graph = (captured.graph.fingerprint, *(op.attributes for op in captured.graph.ops))
    run = (*graph, plan.placement, captured.autocast, options.seed, *sorted(k.__qualname__ for k in kinds))
    return cache_key(*run, __version__, torch.__version__, *map(_digest, sorted(files)))


def _file_of(thing: object) -> str:
    try:
        return str(inspect.getsourcefile(thing))  # type: ignore[arg-type]
    except TypeError:  # a builtin, or an object that is called
        return "None"


def _digest(name: str) -> str:
    if not is_user_file(name) or not Path(name).is_file():
        return name
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()

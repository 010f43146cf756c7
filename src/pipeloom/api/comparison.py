"""The same micro-batches in one process and in the pipeline, compared. `verify` and the first step use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.errors import PeerError, VerifyError
from ..ir.memory_policy import KEEP_ALL
from ..ir.plan import Plan, StagePlan
from ..ir.weight_policy import FLUSH
from ..runtime.batches import split_batch
from ..runtime.loss_scaling import loss_shares
from ..runtime.transports.local_channel import LocalChannel, local_channels
from ..tracer.captured import Captured
from ..tracer.draws import DrawRecorder, OtherDraws
from ..tracer.job import Job
from .options import Options
from .plain_step import copies, plain_step, rounding
from .runnable import require_runnable_plan, require_training

NOISE = 1e-3
"""Differences are relative to the largest entry of a tensor, or to this share of the largest entry of any,
whichever is more: a gradient that is zero but for rounding has no digits to compare."""


MakePipeline = Callable[..., Any]
"""`Pipeline`, which itself compares before its first step."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Largest relative differences between the pipeline and one process.

    gradients, parameters, buffers: by FQN.  reference: what the one process ran, with the reason if that was
    not the module itself: then what capturing the model may have changed is not seen. A difference is
    infinite where either side has a value that is not finite: of such numbers nothing can be said.
    """

    loss: float
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    buffers: Mapping[str, float]
    tolerance: float
    reference: str

    @property
    def worst(self) -> float:
        found = (self.gradients, self.parameters, self.buffers)
        return max((self.loss, *(d for differences in found for d in differences.values())))

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def largest(self) -> tuple[str, float]:
        """What differs most, in words, and by how much."""
        where = {"loss": self.loss} | {f"gradient of {n}": d for n, d in self.gradients.items()}
        where |= {f"updated {n}": d for n, d in self.parameters.items()}
        where |= {f"buffer {n}": d for n, d in self.buffers.items()}
        name = max(where, key=where.__getitem__)
        return name, where[name]

    @property
    def independent(self) -> bool:
        """Whether the pipeline was compared with the user's own module."""
        return self.reference.startswith(EAGER)

    def require(self) -> None:
        """Raises: VerifyError if a difference is above the tolerance."""
        if not self.passed:
            name, difference = self.largest
            raise VerifyError(
                f"{name} differs by {difference:.3g} relative, the tolerance is {self.tolerance:.3g}",
                hint="report it with the model and the plan: equal numbers are a promise",
            )


def compare(
    make: MakePipeline,
    job: Job,
    plan: Plan,
    *,
    options: Options | None = None,
    tolerance: float | None = None,
    seed: int = 1,
    captured: Captured | None = None,
    rows: int | None = None,
) -> Verification:
    """See `verify`.

    make: the class of pipelines.  captured: the model, if it is at hand; else each rank captures it.
    rows: of each micro-batch, instead of the plan's.
    """
    require_runnable_plan(plan)
    require_training(plan)
    options = replace(options or Options(), keep_gradients=True, compare=False)
    job = replace(job, optimizer=job.optimizer or (lambda params: torch.optim.SGD(params, lr=0.1)))
    batch = job.batch(seed, plan.microbatches * (rows or plan.microbatch_size))
    draws: list[tuple[str, Tensor]] | None = [] if len(set(plan.placement)) == 1 else None
    pipelined = _run_threads(make, job, plan, options, batch, draws=draws, captured=captured)
    expected, what = _reference(make, job, plan, options, batch, pipelined, draws=draws)
    kept = {name: t for name, t in expected.initial.items() if name not in pipelined.buffers}
    return Verification(
        loss=_relative(abs(pipelined.loss - expected.loss), max(abs(expected.loss), 1e-12)),
        gradients=_differences(pipelined.gradients, expected.gradients),
        parameters=_differences(
            pipelined.parameters, _updated(job, kept, pipelined.gradients, options.clip_norm)
        ),
        buffers=_differences(
            {n: t for n, t in pipelined.buffers.items() if n in expected.buffers},
            {n: t for n, t in expected.buffers.items() if n in pipelined.buffers},
        ),
        tolerance=rounding(expected.initial, options.autocast) if tolerance is None else tolerance,
        reference=what,
    )


EAGER = "the module itself, eager"


def _reference(
    make: MakePipeline,
    job: Job,
    plan: Plan,
    options: Options,
    batch: Mapping[str, Tensor],
    pipelined: _Numbers,
    *,
    draws: list[tuple[str, Tensor]] | None,
) -> tuple[_Numbers, str]:
    """What one process gives, and what it ran.

    draws: of the pipeline, if it is one rank that runs one forward after the other.
    """
    if not pipelined.random and not pipelined.python_random:
        return _run_eager(job, plan, options, batch), EAGER
    uncut = pipelined
    if draws is None:
        draws = []
        uncut = _run_threads(make, job, _uncut(plan), replace(options, compiled=False), batch, draws=draws)
    try:
        if pipelined.python_random:
            raise OtherDraws("the forward draws Python's random numbers")
        return _run_eager(job, plan, options, batch, draws), f"{EAGER}, with the same random numbers"
    except OtherDraws as other:
        return uncut, f"its own captured graph, uncut, since {other}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Numbers:
    """initial, parameters: before and after the step; the first of a pipeline only if it draws random
    numbers, so that it may have to stand for the module.  buffers: after it."""

    loss: float
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    random: bool = False
    python_random: bool = False


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
        job.optimizer(list(params.values())).step()
    return {name: params[name].detach() if name in params else t for name, t in initial.items()}


def _differences(pipelined: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
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
    """In a type whose differences are exact enough. That of two float32 has float32's digits, far below any
    tolerance, and float64 would take ten times as long."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype == torch.float32 else tensor.double()


def _largest(tensor: Tensor) -> float:
    """The largest size of an entry; not a number if any entry is none."""
    low, high = tensor.aminmax()
    return float(torch.maximum(-low.double(), high.double()).abs())  # no -0.0


def _relative(difference: float, size: float) -> float:
    return difference / size if isfinite(difference) and isfinite(size) else inf


def _uncut(plan: Plan) -> Plan:
    """The same micro-batches with all ops in one stage."""
    ops = tuple(op for stage in plan.stages for op in stage.ops)
    row = " ".join(f"0F{m} 0B{m}" for m in range(plan.microbatches))
    return replace(
        plan,
        stages=(StagePlan(ops=ops),),
        placement=(0,),
        schedule="1f1b",
        schedule_rows=(row,),
        caps=(),
        memory=KEEP_ALL,
        weights=FLUSH,
        width=1,
    )


def _run_threads(
    make: MakePipeline,
    job: Job,
    plan: Plan,
    options: Options,
    batch: Mapping[str, Tensor],
    *,
    draws: list[tuple[str, Tensor]] | None = None,
    captured: Captured | None = None,
) -> _Numbers:
    """draws: a list to write random numbers down in, for a plan of one rank."""
    ranks = len(set(plan.placement))
    results: dict[int, _Numbers] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int, channel: LocalChannel) -> None:
        try:
            with make(job, plan, options=options, channel=channel, captured=captured) as pipeline:
                random = any(op.random for op in pipeline.captured.graph.ops)
                python_random = pipeline.captured.draws_python_random
                initial = copies(pipeline.weights.params) if random or python_random else {}
                # Of another size than the plan's, the stages are captured and traced now: nothing can be
                # captured while draws are recorded, and what it draws would be counted as the step's.
                split = pipeline.batches.split(batch, training=True)
                pipeline.batches.microbatches(split, step=0, training=True)
                recorder = DrawRecorder() if draws is not None else None
                with recorder or nullcontext():
                    loss = pipeline.step(batch)
                if draws is not None and recorder is not None:
                    draws.extend(recorder.draws)
                results[rank] = _Numbers(
                    loss=loss,
                    gradients=pipeline.weights.last_gradients,
                    initial=initial,
                    buffers=dict(pipeline.weights.buffers),
                    parameters={n: p.detach() for n, p in pipeline.weights.params.items()},
                    random=random,
                    python_random=python_random,
                )
        except BaseException as error:  # handed to the caller's thread below
            errors[rank] = error

    channels = local_channels(ranks, timeout_s=options.timeout_s)
    threads = [threading.Thread(target=run, args=item) for item in enumerate(channels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        causes = [e for e in errors.values() if not isinstance(e, PeerError)]
        raise (causes or list(errors.values()))[0]
    return _Numbers(
        loss=results[0].loss,
        random=results[0].random,
        python_random=results[0].python_random,
        gradients={n: t for r in results.values() for n, t in r.gradients.items()},
        initial={n: t for r in results.values() for n, t in r.initial.items()},
        buffers={n: t for r in results.values() for n, t in r.buffers.items()},
        parameters={n: t for r in results.values() for n, t in r.parameters.items()},
    )


def _run_eager(
    job: Job,
    plan: Plan,
    options: Options,
    batch: Mapping[str, Tensor],
    draws: list[tuple[str, Tensor]] | None = None,
) -> _Numbers:
    parts = split_batch(batch, plan.microbatches)
    shares = loss_shares(parts, job.weight)
    plain = plain_step(job, parts, shares, seed=options.seed, autocast=options.autocast, draws=draws)
    return _Numbers(
        loss=sum(plain.losses), gradients=plain.gradients, initial=plain.initial, buffers=plain.buffers
    )

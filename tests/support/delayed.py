"""A pipeline whose weights are updated without a flush, and one process that does the same with a delay.

The one process runs the uncut captured graph, in float64: batch b on version max(b - 1, 0), its update on the
newest. The first `flushed` batches are on the newest version; a correction extrapolates later updates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import runs
import torch
from batches import normal
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.plan import Plan
from pipeloom.ir.weight_policies import Updates
from pipeloom.runtime.channel import local_channels
from pipeloom.schedules.registry import build_steady

STEPS = 7
WIDTH = 6
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
}


class Tied(nn.Module):
    """Layers in a row, the last of which has the weights of the first if `tied`."""

    def __init__(self, layers: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return output.square().mean()


_MODELS = {tied: partial(Tied, tied=tied) for tied in (False, True)}
_BATCH = normal(torch.float64, x=(WIDTH,))


def job_of(optimizer: str = "adamw", tied: bool = False) -> Job:
    """The same functions each time, so that tests share captures (see `runs.shared_captures`)."""
    how = {"model": _MODELS[tied], "batch": _BATCH, "loss": _loss, "optimizer": OPTIMIZERS[optimizer]}
    return Job(name=f"tied-{tied}", **how)


def steady_plan(
    job: Job, stages: int, microbatches: int, policy: str = "2bw", *, split: bool = False
) -> Plan:
    flushed = runs.even_plan(job, stages, microbatches=microbatches)
    graph = runs.capture_of(job, 2).graph
    updates = Updates(policy=policy, every=microbatches)
    body = build_steady("1f1b", flushed.stage_graph(graph), flushed.placement, updates, split_backward=split)
    return replace(flushed, weights=policy, schedule_rows=tuple(str(body).splitlines()))


@dataclass
class Trained:
    losses: list[float]
    norms: list[float | None]
    parameters: dict[str, Tensor]
    copied_bytes: int = 0


def trained(
    job: Job,
    plan: Plan,
    *,
    steps: int = STEPS,
    drains: Sequence[int] = (),
    **options: Any,
) -> Trained:
    """drains: after these batches something else is asked of the pipeline."""
    rows = plan.microbatches * plan.microbatch_size

    def work(pipeline: Pipeline) -> Trained:
        batches = [job.batch(index, rows) for index in range(steps)]
        reports, stops = [], [0, *drains, steps]
        for low, high in zip(stops, stops[1:], strict=False):
            reports += list(pipeline.steps(batches[low:high]))
            pipeline.evaluate(batches[0])
        return Trained(
            losses=[report.loss for report in reports],
            norms=[report.grad_norm for report in reports],
            parameters={n: p.detach().clone() for n, p in pipeline.weights.params.items()},
            copied_bytes=pipeline.weights.copied_bytes,
        )

    with runs.shared_captures():
        ranks = runs.each_rank(job, plan, work, **options)
    assert all(rank.losses == ranks[0].losses for rank in ranks)
    merged = runs.merged(rank.parameters for rank in ranks)
    return Trained(ranks[0].losses, ranks[0].norms, merged, sum(rank.copied_bytes for rank in ranks))


def delayed(
    job: Job,
    microbatches: int,
    *,
    flushed: int = 0,
    version: Callable[[int, str], int] = lambda index, name: max(index - 1, 0),
    corrected: Callable[[str], bool] = lambda name: True,
    steps: int = STEPS,
    clip_norm: float | None = None,
    scheduler: Any = None,
    correction: float = 0.0,
) -> Trained:
    """One process: each batch's gradient at the weights of one update before, applied to the newest.

    version: with how many updates batch `index` uses a parameter, once it is not flushed any more.
    corrected: whose updates begin otherwise, see `pipeloom.ir.weight_policies`.
    """
    whole = runs.even_plan(job, 1, microbatches=microbatches)
    losses, norms = [], []
    made, alone = Options(keep_gradients=True), local_channels(1)[0]
    with runs.shared_captures(), Pipeline(job, whole, options=made, channel=alone) as pipeline:
        params, optimizer = pipeline.weights.params, pipeline.weights.optimizer
        assert optimizer is not None
        plan = scheduler(optimizer) if scheduler else None
        pipeline.weights.step = lambda: None  # type: ignore[method-assign]
        versions = [{n: p.detach().clone() for n, p in params.items()}]
        for index in range(steps):
            late, newest, before = index >= max(flushed, 1), versions[-1], versions[-2:][0]
            for name, param in params.items():
                param.data.copy_(versions[version(index, name) if late else index][name])
            losses.append(pipeline.step(job.batch(index, 2 * microbatches)))
            grads = {n: g.clone() for n, g in pipeline.weights.grads.sums.items()}
            pipeline.weights.discard_gradients()
            corrects = {name for name in params if late and corrected(name)}
            for name, param in params.items():
                begins = torch.lerp(before[name], newest[name], 1 / (1 + correction))
                param.data.copy_(begins if name in corrects else newest[name])
                param.grad = grads.get(name)  # none of one that is frozen
            if clip_norm is not None:
                squares = torch.stack([torch.linalg.vector_norm(g) for g in grads.values()]).double().square()
                norms.append(float(squares.sum().sqrt()))
                factor = min(1.0, clip_norm / (norms[-1] + 1e-6))
                if factor < 1.0:
                    for param in params.values():
                        param.grad.mul_(factor)
            optimizer.step()
            if plan is not None:
                plan.step()
            for name in corrects:
                params[name].data.lerp_(newest[name], -correction)
            versions.append({n: p.detach().clone() for n, p in params.items()})
            for param in params.values():
                param.grad = None
    return Trained(losses, norms or [None] * steps, versions[-1])


def stashed(job: Job, plan: Plan) -> Trained:
    """One process by the rule of PipeDream, with an update after each micro-batch: stage s of d (from 0) uses
    its own version of d - 1 - s updates before, the first one while there is none.

        W(t + 1) = optimizer(W(t), grad f(w_0(t - d + 1), w_1(t - d + 2), ..., w_(d-1)(t)))
    """
    assert plan.updates is not None and plan.updates.every == 1
    stages, flushed = plan.stage_graph(runs.capture_of(job, 2).graph), plan.warm_up_with_flush
    late = {name: len(plan.stages) - 1 - s for s, names in enumerate(stages.params) for name in names}
    return delayed(
        job,
        1,
        flushed=flushed,
        version=lambda index, name: max(index - late[name], flushed),
        corrected=lambda name: late[name] > 0,
        correction=plan.delay_correction,
    )


def assert_close(found: Trained, expected: Trained, tolerance: float) -> None:
    """Replicas were compared to the last bit when their parameters were merged."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    if expected.norms[0] is not None:
        assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    worst, where = runs.difference(found.parameters, expected.parameters)
    assert worst <= tolerance, f"{where} differs by {worst:.3g}"


def assert_equal(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert torch.equal(found.parameters[name], tensor), name

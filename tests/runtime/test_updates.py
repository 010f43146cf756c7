"""What an update of the weights takes, and the norm of its gradients."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from batches import normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipeloom
from pipeloom import Cluster, Device, Job, Link, Pipeline, Plan
from pipeloom.ir.errors import InfeasibleError
from pipeloom.runtime.weights import Weights, clip_factor

RANKS, COUNT, WIDTH = 2, 8, 32


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


batch = normal(input=(WIDTH,))
JOB = Job(model=model, batch=batch, loss=lambda outputs, batch: outputs.square().mean())


def test_messages_that_are_through_make_room_for_an_update() -> None:
    plan = runs.even_plan(JOB, RANKS, microbatches=COUNT, microbatch_size=1, schedule="1f1b")

    def peak(pipeline: Pipeline) -> int:
        for step in range(2):
            pipeline.step(JOB.batch(step, COUNT))
        return pipeline.ledger.peak

    less = tuple(most - WIDTH for most in runs.each_rank(JOB, plan, peak, compare=False))
    found = runs.each_rank(JOB, replace(plan, caps=less), peak, compare=False)
    assert all(most <= cap for most, cap in zip(found, less, strict=True))


def low_model() -> nn.Module:
    return model().to(torch.bfloat16)


def low_batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"input": batch(seed, rows)["input"].bfloat16()}


def small_steps(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-5)


def low_plan(job: Job, **more: Any) -> Plan:
    """For CPUs that are not measured."""
    cpu = Device(name="cpu", memory_bytes=2**30, flops_per_s={"bfloat16": 1e9}, memory_bytes_per_s=1e9)
    cluster = Cluster(devices=(cpu,) * RANKS, within_node=Link(bandwidth_bytes_per_s=1e9))
    how: dict[str, Any] = {"ranks": RANKS, "schedule": "1f1b", "microbatches": COUNT, "microbatch_size": 1}
    return pipeloom.plan(job, cluster=cluster, planner="exact", **how, **more)


def test_master_weights_sum_and_step_in_float32(tmp_path: Path) -> None:
    """Steps far smaller than what bfloat16 can add to a weight, through a checkpoint, on two ranks."""
    job = replace(JOB, model=low_model, batch=low_batch, optimizer=small_steps)
    plan = low_plan(job, master_weights=True)
    with pytest.raises(InfeasibleError):
        low_plan(job, memory=max(low_plan(job).peaks), master_weights=True)
    torch.manual_seed(0)
    plain = low_model()
    masters = [p.detach().float() for p in plain.parameters()]
    optimizer = small_steps(masters)
    for step in range(3):
        parts = low_batch(step, COUNT)["input"].split(1)
        grads = [torch.autograd.grad(plain(x).square().mean() / COUNT, [*plain.parameters()]) for x in parts]
        for master, *each in zip(masters, *grads, strict=True):
            master.grad = torch.stack([grad.float() for grad in each]).cumsum(0)[-1]
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(master)

    def rank(pipeline: Pipeline, steps: range) -> dict[str, Tensor]:
        if steps.start:
            pipeline.load(tmp_path)
        for step in steps:
            pipeline.step(low_batch(step, COUNT))
        pipeline.save(tmp_path)
        sizes = pipeline.weights.sizes
        assert sizes["gradients"] * 3 == sizes["parameters"] * 2
        assert pipeline.expected.peaks[pipeline.rank]["parameters"] == sizes["parameters"]
        planned = plan.stages[pipeline.rank].memory
        assert all(getattr(planned, n) == sizes[n] for n in ("parameters", "gradients", "optimizer"))
        return {name: p.detach().clone() for name, p in pipeline.weights.params.items()}

    for steps in (range(2), range(2, 3)):
        first, second = runs.each_rank(job, plan, partial(rank, steps=steps), master_weights=True)
    assert all(map(torch.equal, [*first.values(), *second.values()], masters))


@pytest.mark.parametrize("params", [{}, {"frozen": nn.Parameter(torch.zeros(3, device="meta"), False)}])
def test_nothing_is_zero_on_the_device_of_the_rank(params: dict[str, nn.Parameter]) -> None:
    weights = Weights(params, {}, None, device="meta")
    found = weights.norm_squares(params)
    assert found.device.type == "meta" and found.shape == () and found.dtype == torch.float64


# Clipping by a norm that stays on the device, beside torch's own.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [1.0, 1e-9, torch.inf, torch.nan])
def test_gradients_are_clipped_as_torch_does(dtype: torch.dtype, odd: float) -> None:
    """Where the norm was not a number, some gradients stayed numbers, and were not clipped."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "row": (4,), "number": ()}
    params = {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}
    weights = Weights(params, {}, lambda own: torch.optim.SGD(own, lr=0.1))
    for name, param in params.items():
        param.grad = torch.randn(shapes[name], generator=generator).to(dtype) * min(1.0, odd)
        param.grad.view(-1)[0] = odd
        weights.grads.add(name, param.grad)
    norm = weights.norm_squares(params).sqrt()
    weights.scale_gradients(clip_factor(norm, 0.5))
    torch.nn.utils.clip_grad_norm_(params.values(), 0.5)

    def close(name: str) -> Tensor:
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        return torch.isclose(weights.grads.sums[name], params[name].grad, rtol=tolerance, equal_nan=True)

    assert all(close(name).all() for name in params)


def test_accelerators_scale_narrow_gradients_in_float32() -> None:
    """A number there took the gradients' dtype before it multiplied. The meta device stands for them."""
    dtypes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mul_.Tensor:
                dtypes.append(torch.result_type(*args))
            return func(*args, **(kwargs or {}))

    for shape in ((5, 3), ()):
        param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="meta"))
        weights = Weights({"p": param}, {}, lambda own: torch.optim.SGD(own, lr=0.1))
        weights.grads.add("p", torch.zeros_like(param))
        with Products():
            weights.scale_gradients(torch.zeros((), device="meta"))
    assert dtypes == [torch.float32] * 2

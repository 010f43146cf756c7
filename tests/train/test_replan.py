"""Another plan in the middle of a run: where ranks are slower than planned, and where it pays."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import start, until
from torch import nn

import pipeloom
from pipeloom.planner.plan_costs import PlanCosts, with_planned_state
from pipeloom.planning import captured_model, make_request
from pipeloom.tracer.job import Job
from pipeloom.train.config import Config, PipelineConfig
from pipeloom.train.replan import plan_again, request_for

WIDE = Job(
    model=lambda: nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh()))),
    batch=lambda seed, rows: {"input": torch.ones(rows, 256)},
    loss=lambda output, batch: output.square().mean(),
)
SETTINGS = PipelineConfig(
    ranks=4, planner="exact", schedule="1f1b", microbatches=8, microbatch_size=64, cluster="4 x cpu"
)


@pytest.fixture(scope="module")
def again():  # type: ignore[no-untyped-def]
    """What planning again gives where each rank takes so many times as long as planned."""
    captured = pipeloom.capture(WIDE, 64)

    def again(*pace: float, settings=SETTINGS, known=(), steps_left=1000, cost_s=1.0):  # type: ignore[no-untyped-def]
        plan = pipeloom.plan(WIDE, settings, captured=captured)
        request = make_request(settings)
        model = captured_model(WIDE, 64, request.cluster, captured=captured)
        graph = with_planned_state(captured.graph, plan)
        planned = PlanCosts(graph, model.profiles, request.cluster).simulate(plan)
        of_a_step = [busy_s / planned.steps for busy_s in planned.totals.busy_s]
        busy_s = [at * each for at, each in zip(pace, of_a_step, strict=True)]
        how = {"busy_s": busy_s, "step_s": planned.step_s, "steps_left": steps_left, "cost_s": cost_s}
        return plan, plan_again(Config(pipeline=settings), WIDE, plan, captured, known=known, **how)

    return again


def test_a_slow_rank_gets_fewer_layers(again) -> None:  # type: ignore[no-untyped-def]
    plan, found = again(3.0, 6.0, 3.0, 3.0)
    assert found.pace == pytest.approx((3, 6, 3, 3))
    assert found.plan is not None and found.other_s <= 0.8 * found.now_s
    before, after = (sum("linear" in op for op in each.stages[1].ops) for each in (plan, found.plan))
    assert after < before
    assert json.dumps(found.figures) and "rank 1 computes 2.00 times as long" in str(found)
    assert "rank 1 computes 6.00 times as long" in str(replace(found, pace=(1.0, 6.0)))


def test_the_plan_stays_where_another_does_not_pay(again) -> None:  # type: ignore[no-untyped-def]
    assert again(5.0, 5.0, 5.2, 5.0)[1] is None
    _, found = again(1.0, 2.0, 1.0, 1.0, steps_left=1, cost_s=60.0)
    assert found.plan is None and found.gain_s < found.cost_s


def test_without_a_flush_the_pace_is_that_of_one_step(again) -> None:  # type: ignore[no-untyped-def]
    _, found = again(3.0, 6.0, 3.0, 3.0, settings=replace(SETTINGS, weights="2bw"))
    assert found.pace == pytest.approx((3, 6, 3, 3))
    assert again(*found.pace, known=found.pace)[1] is None  # nothing has changed since


def test_the_caps_of_a_plan_from_a_file_stay() -> None:
    captured = pipeloom.capture(WIDE, 64)
    plan = pipeloom.plan(WIDE, SETTINGS, captured=captured, memory="64MiB")
    here = Config(pipeline=replace(SETTINGS, cluster=None))
    assert not make_request(here.pipeline).capped
    request = request_for(here, plan)
    assert request.capped and {device.memory_bytes for device in request.cluster.devices} == {64 << 20}


SLEEPS_ON_RANK_1 = """
import os, time, torch, pipeloom
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        return wait(torch.tanh(super().forward(x)))

@torch.library.custom_op("napping::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02 if os.environ.get("RANK") == "1" else 0.001)
    return x.clone()

wait.register_fake(torch.empty_like)
wait.register_autograd(lambda ctx, grad: wait(grad))

def job():
    return pipeloom.Job(
        model=lambda: nn.Sequential(*(Layer(16, 16) for _ in range(8))),
        batch=lambda seed, rows: {"input": torch.ones(rows, 16) * (1 + seed % 7)},
        loss=lambda output, batch: output.square().mean(),
    )
"""


@pytest.mark.slow
def test_a_run_goes_on_with_the_plan_that_is_better(tmp_path: Path) -> None:
    """Two processes; that it pays is sure, as the run is long."""
    (tmp_path / "napping.py").write_text(SLEEPS_ON_RANK_1)

    def lines(out: str) -> list[dict[str, object]]:
        file = tmp_path / out / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    losses = []
    for replan in (6, 0):
        out = f"run-{replan}"
        words = ("train", "--job", "napping.py:job", "--cluster", "2 x cpu", "--planner", "exact")
        more = ("--schedule", "1f1b", "--steps", 10**6, "--replan", replan, "--out", out, "--no-compare")
        process = start("-m", "pipeloom", *words, *more, cwd=tmp_path)
        until(lambda out=out, process=process: len(lines(out)) > 14 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        process.communicate()
        losses.append({line["step"]: line["loss"] for line in lines(out) if "loss" in line})
        looks = [line["replan"] for line in lines(out) if "replan" in line]
        assert [look["switched"] for look in looks[:1]] == [True] * bool(replan)
    for step in range(1, 13):
        assert losses[0][step] == pytest.approx(losses[1][step], rel=1e-5)

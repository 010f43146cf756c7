"""`pipeloom plan --ranks auto`: what it prints, what it refuses, and that it agrees with the formulas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeloom import plan_request, planning, shapes
from pipeloom.cli import main
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.plan import load_plan
from pipeloom.planner.block_costs import Affine, BlockCosts, PieceCost, block_costs
from pipeloom.planner.shape_search import PipelineShape, memory, throughput
from pipeloom.tracer.job import load_job

JOB = """
import torch
from torch import nn
from pipeloom import Job

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()

def job(repeats=True):
    return Job(
        name="tiny",
        model=Net if repeats else lambda: nn.Linear(8, 8),
        batch=lambda seed, size: {"x" if repeats else "input": torch.zeros(size, 8)},
        loss=lambda outputs, batch: outputs.mean(),
    )

def plain():
    return job(repeats=False)
"""

CLUSTER = "4 x v100-16 with 600KiB"
AUTO = ["plan", "shape_job.py:job", "--ranks", "auto", "--cluster", CLUSTER, "--global-batch", "32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shape_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shape_job", raising=False)
    return tmp_path


def run(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def models(name: str = "job") -> tuple[plan_request.CapturedModel, plan_request.CapturedModel]:
    job, cluster = load_job(f"shape_job.py:{name}"), find_cluster(CLUSTER)
    return planning.captured_model(job, 2, cluster), planning.captured_model(job, 8, cluster)


@pytest.mark.slow
def test_closed_form_prints_the_shape_that_the_formulas_choose(folder: Path) -> None:
    figures = json.loads(run(*AUTO, "--closed-form", "--weights", "2bw", "--json").stdout)
    names = ("width", "depth", "microbatch_size", "recompute")
    shape = PipelineShape(**{name: figures[name] for name in names})
    job = load_job("shape_job.py:job")
    request = planning.make_request(
        job, ranks=1, weights="2bw", cluster=find_cluster(CLUSTER), global_batch=32
    )
    asked = shapes.shape_request(request, job)
    assert figures["rows_per_s"] == pytest.approx(throughput(asked, shape))
    assert figures["peak_bytes"] == round(memory(asked, shape)) <= asked.cap_bytes
    assert figures["microbatches"] == 32 // (shape.width * shape.microbatch_size) >= shape.depth
    assert all(other["rows_per_s"] <= figures["rows_per_s"] for other in figures["next"])
    table = run(*AUTO, "--closed-form").stdout
    assert "micro-batches" in table and "shapes fit, by formulas; chosen:" in table


@pytest.mark.slow
def test_a_model_is_its_front_its_blocks_and_its_rear(folder: Path) -> None:
    """At a size that was not captured, its pieces add up to what the whole is there."""
    first, second = models()
    costs = block_costs(first, second, find_cluster(CLUSTER))
    whole = planning.captured_model(load_job("shape_job.py:job"), 5, find_cluster(CLUSTER))
    (profile,) = whole.profiles.values()
    assert costs.blocks == 4
    assert costs.block.parameter_bytes == 4 * (64 * 64 + 64)
    assert costs.front.parameter_bytes == 4 * (8 * 64 + 64)
    assert costs.rear.trained_bytes == 4 * (64 * 32 + 32)
    assert total(costs, "forward_s", 5) == pytest.approx(sum(c.forward_s for c in profile.costs.values()))
    assert total(costs, "backward_s", 5) == pytest.approx(sum(c.backward_s for c in profile.costs.values()))
    assert value(costs.input_bytes, 5) == 5 * 64 * 4 and value(costs.batch_bytes, 5) == 5 * 8 * 4


def total(costs: BlockCosts, figure: str, rows: int) -> float:
    def of(piece: PieceCost) -> float:
        return value(getattr(piece, figure), rows)

    return of(costs.front) + costs.blocks * of(costs.block) + of(costs.rear)


def value(figure: Affine, rows: int) -> float:
    return figure.constant + figure.per_row * rows


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--microbatches", "4"], 2, "--ranks auto and --microbatches were both given"),
        (["--memory", "1GiB"], 2, "--ranks auto and --memory were both given"),
        (["-o", "plan.json"], 2, "--closed-form makes no plan"),
        (["--schedule", "zb_h1"], 1, "no closed form of schedule zb_h1 with weights flush"),
        (["--treatments", "offload"], 1, "the closed form does not know of offloading"),
        (["--cluster", "2 x v100-16 + 2 x a100-40"], 1, "devices that are alike"),
        (["--cluster", "2 x v100-16 with 1KiB"], 1, "no shape fits: even"),
    ],
)
def test_what_it_refuses(folder: Path, more: list[str], status: int, said: str) -> None:
    result = run(*AUTO, "--closed-form", *more)
    assert (result.exit_code, said in result.stderr, result.stdout) == (status, True, "")


def test_it_needs_devices_a_batch_and_layers(folder: Path) -> None:
    assert "without --cluster" in run("plan", "shape_job.py:job", "--ranks", "auto", "--closed-form").stderr
    no_batch = run(*AUTO[:-2], "--closed-form")
    assert no_batch.exit_code == 2 and "without --global-batch" in no_batch.stderr
    assert "add it: --ranks auto" in run("plan", "shape_job.py:job", "--closed-form").stderr
    words = ["plan", "shape_job.py:plain", *AUTO[2:], "--closed-form"]
    assert "no repeated layers, which the closed form is for" in run(*words).stderr


def test_by_default_plans_are_simulated(folder: Path) -> None:
    """The chosen shape is at least as fast as any other whose plan is asked for by hand."""
    figures = json.loads(run(*AUTO, "--weights", "2bw", "-o", "plan.json", "--json").stdout)
    plan = load_plan(Path("plan.json"))
    assert len(plan.stages) == figures["depth"] == len(figures["stages"])
    assert (plan.weights, plan.microbatch_size) == ("2bw", figures["microbatch_size"])
    assert figures["microbatches"] * figures["microbatch_size"] * figures["width"] == 32
    assert (plan.width, plan.predicted_step_s) == (figures["width"], figures["step_s"])
    assert figures["rows_per_s"] == pytest.approx(32 / figures["step_s"])
    for width, stages, rows in (
        (1, 1, 32),
        (1, 2, 16),
        (2, 2, 8),
        (2, 2, 4),
        (4, 1, 8),
        (1, 4, 8),
        (1, 4, 4),
    ):
        by_hand = run(
            *("plan", "shape_job.py:job", "--cluster", CLUSTER, "--global-batch", "32", "--no-what-if"),
            *("--replicas", str(width), "--ranks", str(stages)),
            *("--microbatch-size", str(rows), "--weights", "2bw", "--json"),
        )
        if by_hand.exit_code == 0:
            assert json.loads(by_hand.stdout)["predicted_step_s"] >= figures["step_s"] * 0.999


@pytest.mark.slow
def test_where_nothing_fits_the_reason_is_said(folder: Path) -> None:
    words = [*AUTO[:5], "4 x v100-16 with 100KiB", *AUTO[6:]]
    said = run(*words).stderr
    assert "shapes that were tried fits; of the first: " in said and "hint: " in said
    assert "puts several stages on a rank" in run(*AUTO, "--schedule", "zb_v").stderr

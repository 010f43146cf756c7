"""`pipeloom plan --ranks auto`: what it prints, what it refuses, and that it agrees with the formulas."""

import json
from pathlib import Path

import pytest
from commands import bad, figures, run

from pipeloom import planning, shapes
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.plan import load_plan
from pipeloom.planner.shape_search import Affine, PipelineShape, block_costs, memory, throughput
from pipeloom.tracer.job import load_job

CLUSTER = "4 x v100-16 with 600KiB"
BY_CLUSTER = ("plan", "mine.py:blocks", "--cluster", CLUSTER, "--global-batch", "32")
AUTO = (*BY_CLUSTER, "--ranks", "auto")


@pytest.mark.slow
def test_closed_form_prints_the_shape_that_the_formulas_choose(folder: Path) -> None:
    best = figures(*AUTO, "--closed-form", "--weights", "2bw")
    shape = PipelineShape(**{name: best[name] for name in ("width", "depth", "microbatch_size", "recompute")})
    how = {"ranks": 1, "weights": "2bw", "cluster": find_cluster(CLUSTER), "global_batch": 32}
    asked = shapes.shape_request(planning.make_request(**how), load_job("mine.py:blocks"))
    assert best["rows_per_s"] == pytest.approx(throughput(asked, shape))
    assert best["peak_bytes"] == round(memory(asked, shape)) <= asked.cap_bytes
    assert all(other["rows_per_s"] <= best["rows_per_s"] for other in best["next"])


@pytest.mark.slow
def test_a_model_is_its_front_its_blocks_and_its_rear(folder: Path) -> None:
    """At a size that was not captured, its pieces add up to what the whole is there."""
    job, cluster = load_job("mine.py:blocks"), find_cluster(CLUSTER)
    first, second, whole = (planning.captured_model(job, size, cluster) for size in (2, 8, 5))
    costs = block_costs(first, second, cluster)
    (profile,) = whole.profiles.values()

    def at_five(figure: Affine) -> float:
        return figure.constant + figure.per_row * 5

    def total(figure: str) -> float:
        front, block, rear = (at_five(getattr(p, figure)) for p in (costs.front, costs.block, costs.rear))
        return front + costs.blocks * block + rear

    assert costs.blocks == 4
    assert costs.block.parameter_bytes == 4 * (64 * 64 + 64)
    assert costs.front.parameter_bytes == 4 * (8 * 64 + 64)
    assert costs.rear.trained_bytes == 4 * (64 * 32 + 32)
    for figure in ("forward_s", "backward_s"):
        assert total(figure) == pytest.approx(sum(getattr(c, figure) for c in profile.costs.values()))
    assert at_five(costs.input_bytes) == 5 * 64 * 4 and at_five(costs.batch_bytes) == 5 * 8 * 4


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--microbatches", "4"], 2, "--ranks auto and --microbatches"),
        (["--time-limit", "5"], 2, "--ranks auto and --time-limit"),
        (["--planner", "exact"], 2, "--planner and --closed-form"),
        (["-o", "plan.json"], 2, "--closed-form makes no plan"),
        (["--schedule", "zb_h1"], 1, "no closed form"),
        (["--cluster", "2 x v100-16 + 2 x a100-40"], 1, "devices that are alike"),
        (["--cluster", "2 x v100-16 with 1KiB"], 1, "no shape fits: even"),
    ],
)
def test_what_it_refuses(folder: Path, more: list[str], status: int, said: str) -> None:
    assert said in bad(status, *AUTO, "--closed-form", *more)


def test_it_needs_devices_a_batch_and_layers(folder: Path) -> None:
    auto = ("--ranks", "auto", "--closed-form")
    assert "without --cluster" in bad(2, "plan", "mine.py:blocks", *auto)
    assert "without --global-batch" in bad(2, *BY_CLUSTER[:-2], *auto)
    assert "add it: --ranks auto" in bad(2, "plan", "mine.py:blocks", "--closed-form")
    assert "no repeated layers" in bad(1, "plan", "mine.py:without_blocks", *BY_CLUSTER[2:], *auto)


def test_by_default_plans_are_simulated(folder: Path) -> None:
    """The chosen shape is at least as fast as any other whose plan is asked for by hand."""
    few = ("--global-batch", "8", "--weights", "2bw")
    best = figures(*AUTO, *few, "-o", "plan.json")
    plan = load_plan(Path("plan.json"))
    assert len(plan.stages) == best["depth"] == len(best["stages"])
    assert (plan.weights, plan.microbatch_size) == ("2bw", best["microbatch_size"])
    assert best["microbatches"] * best["microbatch_size"] * best["width"] == 8
    assert (plan.width, plan.predicted_step_s) == (best["width"], best["step_s"])
    assert best["rows_per_s"] == pytest.approx(8 / best["step_s"])
    for width, stages, rows in ((1, 2, 4), (2, 2, 2), (1, 4, 1)):
        sizes = ("--replicas", width, "--ranks", stages, "--microbatch-size", rows)
        done = run(*BY_CLUSTER, *sizes, "--no-what-if", *few, "--json")
        if done.exit_code == 0:
            assert json.loads(done.stdout)["predicted_step_s"] >= best["step_s"] * 0.999

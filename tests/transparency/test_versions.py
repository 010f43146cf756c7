"""Weights that are updated without a flush: the numbers of a one-process loop with a delay of one update,
with whatever else may be done; drained, saved and loaded anywhere.

The loop runs the uncut captured graph, in float64: batch b on version max(b - 1, 0), its update on the
newest.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import optimizers
import pytest
import runs
import torch
from delayed import OPTIMIZERS, STEPS, Trained, assert_equal, delayed, job_of, stashed, steady_plan, trained
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from pipeloom import Pipeline, plan
from pipeloom.checks.weight_versions import versions
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.plan import Plan, widened
from pipeloom.runtime.weights import Weights

SOFTENED = {
    "": {},
    "corrected": {"correction": 0.5},
    "warmed up": {"flushed": 3},
    "both": {"correction": 0.3, "flushed": 2},
}
"""What softens the delay: arguments of `delayed`."""


def softened(plan: Plan, *, correction: float = 0.0, flushed: int = 0) -> Plan:
    return replace(plan, delay_correction=correction, warm_up_with_flush=flushed)


def assert_close(found: Trained, expected: Trained, tolerance: float) -> None:
    """Of tied parameters gradients are added in another order."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=tolerance, atol=1e-12)


@pytest.mark.sampled("momentum-2-1-", "sgd-3-3-", "adamw-3-3-both")
@pytest.mark.parametrize(
    ("stages", "microbatches", "how"),
    [*((*shape, "") for shape in [(2, 1), (2, 2), (3, 2), (4, 12)]), *((3, 3, how) for how in SOFTENED)],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_2bw_is_a_delay_of_one_update(stages: int, microbatches: int, how: str, optimizer: str) -> None:
    job, changes = job_of(optimizer), SOFTENED[how]
    expected = delayed(job, microbatches, **changes)
    found = trained(job, softened(steady_plan(job, stages, microbatches), **changes))
    assert_equal(found, expected)
    assert not how or expected.losses[3:] != delayed(job, microbatches).losses[3:]
    size = sum(t.nbytes for t in found.parameters.values())
    assert found.copied_bytes == STEPS * size, "an update copies the parameters once, a switch nothing"


@pytest.mark.sampled("3--None", "2 x 2-corrected-0.05", "2 x 2, shares-both-0.05")
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("how", SOFTENED)
@pytest.mark.parametrize("shape", ["3", "2 x 2", "2 x 2, shares"])
def test_ties_and_clipping(shape: str, how: str, clip_norm: float | None) -> None:
    """Also of two pipelines side by side, and where replicas share out the updates."""
    job, changes, wide = job_of(tied=True), SOFTENED[how], shape != "3"
    plan = softened(steady_plan(job, 2, 2) if wide else steady_plan(job, 3, 3), **changes)
    plan = replace(widened(plan, 2), shard_optimizer="shares" in shape) if wide else plan
    found = trained(job, plan, clip_norm=clip_norm)
    assert_close(found, delayed(job, 4 if wide else 3, clip_norm=clip_norm, **changes), 1e-10)


@pytest.mark.sampled("interleaved_1f1b")
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe"])
def test_other_schedules(schedule: str) -> None:
    """Stages in a loop, and replicas in both directions."""
    job = job_of(tied=True)
    how = {"ranks": 2, "microbatches": 8, "microbatch_size": 2, "weights": "2bw", "cluster": cpu_cluster(2)}
    made = plan(job, schedule=schedule, captured=runs.capture_of(job, 2), **how)
    assert_close(trained(job, made), delayed(job, 8), 1e-9)


def test_reports_that_nobody_waited_for_are_not_the_next_ones() -> None:
    job = job_of()
    batches = [job.batch(index, 8) for index in range(STEPS)]
    losses = delayed(job, 4).losses

    def work(pipeline: Pipeline) -> list[float]:
        for _ in pipeline.steps(batches):
            break
        done = pipeline.steps_done
        found = [report.loss for report in pipeline.steps(batches[done:])]
        assert found == losses[done:] and 1 < done < STEPS
        return found

    runs.each_rank(job, steady_plan(job, 1, 4), work)


def test_a_loader_may_write_over_the_batch_before() -> None:
    job = job_of()

    def loader() -> Iterator[dict[str, torch.Tensor]]:
        batch = job.batch(0, 8)
        for index in range(STEPS):
            batch["x"].copy_(job.batch(index, 8)["x"])
            yield batch

    reports = runs.each_rank(job, steady_plan(job, 3, 4), lambda pipeline: [*pipeline.steps(loader())])
    assert [report.loss for report in reports[0]] == delayed(job, 4).losses


def test_after_a_step_that_was_broken_off_a_checkpoint_goes_on(tmp_path: Path) -> None:
    """On one rank: what was in flight is forgotten, and nothing but loading is allowed."""
    job = job_of()
    batches = [job.batch(index, 8) for index in range(STEPS)]
    with Pipeline(job, steady_plan(job, 1, 4)) as pipeline:
        losses = [report.loss for report in pipeline.steps(batches[:3])]
        pipeline.save(tmp_path)
        list(pipeline.steps(batches[:1]))
        interrupted = patch.object(pipeline.worker, "run", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            list(pipeline.steps(batches[:2]))
        with pytest.raises(PipeloomError, match="load the newest checkpoint"):
            pipeline.step(batches[3])
        pipeline.load(tmp_path)
        losses += [report.loss for report in pipeline.steps(batches[3:])]
    assert losses == delayed(job, 4).losses


TREATED = {
    "inside": {"treatments": ["recompute"]},
    "ahead": {"treatments": ["recompute"], "ahead": (0, 1, 2)},
    "offload": {"treatments": ["offload"]},
    "both": {"treatments": ["offload", "recompute"], "ahead": (1,)},
}


@pytest.mark.sampled("2bw-inside", "2bw-offload", "stash-inside", "stash-ahead")
@pytest.mark.parametrize("how", TREATED)
@pytest.mark.parametrize("policy", ["2bw", "2bw, split", "stash"])
def test_what_is_recomputed_or_offloaded_changes_nothing(policy: str, how: str) -> None:
    """A micro-batch that is in flight while the weights change is recomputed with the old ones."""
    job, (policy, *split), given = job_of(), policy.split(", "), dict(TREATED[how])
    plan = steady_plan(job, 3, 3, policy, split=bool(split))
    treated = runs.treated_plan(job, plan, *given.pop("treatments"), **given)
    found = trained(job, treated, drains=(3,) if policy == "2bw" else ())
    assert_equal(found, delayed(job, 3) if policy == "2bw" else trained(job, plan))


@pytest.mark.parametrize("drains", [(), (1, 4)])
def test_the_learning_rate_follows_the_updates(drains: tuple[int, ...]) -> None:
    job = job_of()
    found = trained(job, steady_plan(job, 3, 4), scheduler=optimizers.halving, drains=drains)
    assert_equal(found, delayed(job, 4, scheduler=optimizers.halving))
    other = delayed(job, 4)
    assert found.losses[:2] == other.losses[:2] and found.losses[3:] != other.losses[3:]


@pytest.mark.sampled("1-sgd-", "3-momentum-both")
@pytest.mark.parametrize("how", SOFTENED)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("stages", [1, 3])
def test_stash_follows_the_published_rule(stages: int, optimizer: str, how: str) -> None:
    """Stage s of d: gradients at the versions of d - 1 - s updates ago, other stages at others. What is not
    late is not corrected."""
    job = job_of(optimizer)
    plan = softened(steady_plan(job, stages, 1, "stash"), **SOFTENED[how])
    found = trained(job, plan)
    assert_equal(found, stashed(job, plan))
    if stages > 1:
        assert found.losses != delayed(job, 1).losses
    else:
        assert found.copied_bytes == 0, "nothing is in flight when it is updated"


@pytest.mark.sampled("2bw-4", "stash-2")
@pytest.mark.parametrize(("policy", "microbatches"), [("2bw", 3), ("2bw", 4), ("stash", 1), ("stash", 2)])
def test_live_versions(policy: str, microbatches: int) -> None:
    """2bw: two on each stage.  stash: at most d - s on stage s. There are as many copies, and no more."""
    job, depth, step = job_of(), 4, Weights.step
    plan = steady_plan(job, depth, microbatches, policy)
    needed = [stage.needed for stage in versions(plan.as_schedule, plan.updates)]
    assert needed == [2] * depth if policy == "2bw" else all(n <= depth - s for s, n in enumerate(needed))
    most: dict[str, tuple[float, float]] = {}

    def counted(weights: Weights) -> None:
        step(weights)
        for name in list(weights.params)[:1]:
            size = sum(p.nbytes for p in weights.params.values())
            now = len(weights._versions), weights.sizes["parameters"] / size
            most[name] = max(most.get(name, now), now)

    with patch.object(Weights, "step", counted):
        found = trained(job, plan)
    stages = plan.stage_graph(runs.capture_of(job, 2).graph)
    stage_of = {name: s for s, names in enumerate(stages.params) for name in names}
    assert {stage_of[name]: kept for name, kept in most.items()} == {
        s: (needed[s], needed[s]) for s, names in enumerate(stages.params) if names
    }
    size = sum(t.nbytes for t in found.parameters.values())
    assert found.copied_bytes <= STEPS * size, "an update copies the parameters once, a switch nothing"


SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2))
"""Depth and width."""


@dataclass(frozen=True)
class Segment:
    """Batches that one pipeline trains before the next one loads what it has saved.

    shape: depth and width.  steps: batches, by number.  drains: after which of them it is asked to evaluate.
    spoils: after saving it trains on, and then loads its own checkpoint.
    """

    shape: tuple[int, int]
    steps: range
    drains: frozenset[int] = frozenset()
    spoils: bool = False


def ends_at(stops: Sequence[int]) -> list[range]:
    """All steps, cut behind some of them."""
    bounds = [0, *sorted(set(stops) - {STEPS}), STEPS]
    return [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


EACH_ONCE = [
    Segment(shape, steps, frozenset({steps.start}), spoils=True)
    for shape, steps in zip(((2, 1), (4, 1), (2, 2), (1, 1)), ends_at((2, 4, 6)), strict=True)
]
"""Saved at depth 2, loaded at 4, then by two pipelines side by side, and by one process."""


@st.composite
def scripts(draw: st.DrawFn) -> list[Segment]:
    shapes = st.sampled_from(SHAPES)
    return [
        Segment(draw(shapes), steps, draw(st.frozensets(st.sampled_from(steps))), draw(st.booleans()))
        for steps in ends_at(draw(st.lists(st.integers(1, 6), max_size=3)))
    ]


def train_segment(segment: Segment, folder: Path, pipeline: Pipeline) -> Trained:
    job = pipeline.job
    if segment.steps.start:
        pipeline.load(folder)
        assert pipeline.steps_done == segment.steps.start

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for step in segment.steps:
            yield job.batch(step, 8)
            if step in segment.drains:
                pipeline.evaluate(job.batch(0, 8))

    losses = [report.loss for report in pipeline.steps(batches())]
    pipeline.save(folder)
    if segment.spoils:
        list(pipeline.steps([job.batch(100 + n, 8) for n in range(2)]))
        pipeline.load(folder)
        assert pipeline.steps_done == segment.steps.stop
    return Trained(losses, [], {n: p.detach().clone() for n, p in pipeline.weights.params.items()})


def changes_nothing(script: list[Segment], how: str) -> None:
    """Losses and parameters to the last bit; with two pipelines sums come in another order."""
    changes = SOFTENED[how]
    job, losses, parameters = job_of(), list[float](), dict[str, torch.Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        for segment in script:
            depth, width = segment.shape
            plan = softened(widened(steady_plan(job, depth, 4 // width), width), **changes)
            ranks = runs.each_rank(job, plan, partial(train_segment, segment, Path(folder)))
            losses += ranks[0].losses
            parameters = runs.merged(rank.parameters for rank in ranks)
    expected = delayed(job, 4, **changes)
    tolerance = 1e-11 if any(segment.shape[1] > 1 for segment in script) else 0
    assert losses == pytest.approx(expected.losses, rel=tolerance / 10, abs=0)
    assert runs.difference(parameters, expected.parameters)[0] <= tolerance


def test_saved_at_one_depth_or_width_and_loaded_at_another() -> None:
    changes_nothing(EACH_ONCE, "both")


@pytest.mark.slow
@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.data_too_large],
)
@given(scripts(), st.sampled_from([*SOFTENED]))
def test_drains_saves_and_loads_anywhere_change_nothing(script: list[Segment], how: str) -> None:
    changes_nothing(script, how)


@pytest.mark.parametrize("weights", ["2bw", "stash"])
def test_long_runs_hold_no_more_than_short_ones(weights: str) -> None:
    """Nothing waits for the sends of small messages where steps follow each other without a flush."""
    job = job_of("sgd")
    plan, batches = steady_plan(job, 2, 4, weights), [job.batch(0, 8)] * 24
    for reports in runs.each_rank(job, plan, lambda pipeline: [*pipeline.steps(batches)], compare=False):
        assert max(reports[-1].peak_bytes) <= 1.1 * max(reports[5].peak_bytes)

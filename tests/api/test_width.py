"""Planning for several pipelines side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs
from every_schedule import gpt_job

from pipeloom import planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import ConfigError, PipeloomError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planning import make_request
from pipeloom.profiler.roofline import roofline
from pipeloom.train.config import Config
from pipeloom.train.run import follow_plan

JOB = gpt_job()


def planned(cluster: str = "4 x cpu", **how: object) -> Plan:
    settings = {"ranks": 2, "replicas": 2, "microbatches": 8, "microbatch_size": 2} | how
    return planning.plan(JOB, cluster=cluster, captured=runs.capture_of(JOB), **settings)  # type: ignore[arg-type]


def test_replicas_of_a_stage_are_neighbours_and_share_the_micro_batches() -> None:
    wide, one = planned(), planned(replicas=1, microbatches=4)
    assert (wide.width, wide.replicas, wide.microbatches) == (2, 2, 8)
    assert wide.placement == (0, 2, 1, 3)
    assert wide.stages == one.stages, "a device holds its own micro-batches only"
    assert len(wide.caps) == len(wide.peaks) == len(wide.schedule_rows) == 4
    assert wide.peaks[0] == wide.peaks[1] and wide.peaks[2] == wide.peaks[3]
    assert wide.predicted_step_s > one.predicted_step_s, "replicas sum their gradients"


def test_the_smallest_device_of_a_group_limits_its_stage() -> None:
    wide = planned("cpu with 3MiB + cpu with 2MiB + 2 x cpu with 4MiB")
    assert wide.peaks[0] <= 2 << 20


def test_without_a_flush_two_sets_of_gradients_are_planned() -> None:
    wide, one = planned(weights="2bw"), planned(weights="2bw", replicas=1, microbatches=4)
    assert wide.updates is not None and wide.updates.every == 4
    both = (sum(stage.memory.gradients for stage in plan.stages) for plan in (wide, one))
    assert next(both) == 2 * next(both)


@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b"])
def test_schedules_with_several_stages_on_a_rank(schedule: str) -> None:
    wide = planned(schedule=schedule)
    assert (len(wide.stages), wide.width, len(wide.schedule_rows)) == (4, 2, 4)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"microbatches": 7}, ConfigError, "7 micro-batches per step cannot be shared evenly by 2 replicas"),
        ({"schedule": "dualpipe"}, PlanError, "dualpipe holds every stage on 2 ranks by itself"),
        ({"replicas": 3, "microbatches": 9}, PlanError, "3 replicas of 2 stages are for 6 devices"),
        ({"replicas": 0}, ConfigError, "replicas is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    how: dict[str, object], error: type[PipeloomError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        planned(**how)
    assert caught.value.hint


def test_a_global_batch_is_shared_by_the_replicas() -> None:
    request = make_request(JOB, ranks=2, replicas=2, global_batch=12)
    assert list(request.sizes()) == [1, 2, 3, 6]


@pytest.mark.parametrize(("schedule", "width"), [("1f1b", 2), ("zb_v", 1), ("zb_v", 2)])
def test_a_config_that_follows_a_plan_is_for_its_ranks(schedule: str, width: int) -> None:
    """Ranks were taken for stages: a config that followed a wide plan asked for as many stages as ranks."""
    wide = planned(schedule=schedule, replicas=width)
    settings = follow_plan(Config(), wide, ()).pipeline
    assert (settings.ranks, settings.replicas, settings.microbatches) == (2, width, 8)


@pytest.mark.parametrize("memory_bytes_per_s", [1e6, 1e15])
def test_what_replicas_send_each_other_after_an_update_takes_its_time(memory_bytes_per_s: float) -> None:
    """Each of two steps half of the parameters, and then gets the other half: half of a sum over both."""
    graph = runs.graph_of(JOB)
    device = replace(cpu_cluster(1).devices[0], memory_bytes_per_s=memory_bytes_per_s)
    cluster = Cluster(devices=(device,) * 4, within_node=Link(bandwidth_bytes_per_s=1e6))
    plan = planned()
    whole, shared = (
        PlanCosts(graph, roofline(graph, device), cluster).stages(replace(plan, shard_optimizer=share))
        for share in (False, True)
    )
    for stage, (one, other) in enumerate(zip(whole, shared, strict=True)):
        names = plan.replicated(plan.stage_graph(graph)).params[stage]
        sizes = [p.bytes for p in graph.parameters if p.name in names and p.trainable]
        sent_s = sum(sizes) / 2 / 1e6
        even_s, most_s = one.step_s / 2, one.step_s * max(sizes) / sum(sizes)
        assert other.step_s - sent_s == pytest.approx(even_s, abs=most_s + 1e-5)
        assert other.step_s > sent_s


def test_a_shared_out_optimizer_is_planned_for_by_rank() -> None:
    whole, shared = planned(), planned(shard_optimizer=True)
    ratio = sum(s.memory.optimizer for s in whole.stages) / sum(s.memory.optimizer for s in shared.stages)
    assert shared.shard_optimizer and ratio == pytest.approx(2)
    assert all(less < more for less, more in zip(shared.peaks, whole.peaks, strict=True))
    with pytest.raises(ConfigError, match="every stage has one replica"):
        planned(shard_optimizer=True, replicas=1)
    assert planned("2 x cpu", schedule="dualpipe", replicas=1, shard_optimizer=True).shard_optimizer

"""Plans for CPUs keep their caps by the graphs of their stages; pipelines side by side are planned."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from batches import normal
from every_schedule import gpt_job
from runs import assert_same, capture_of, each_rank, even_plan, graph_of, pipelined, plain
from torch import Tensor, nn

from pipeloom import Job, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import ConfigError, InfeasibleError, PipeloomError, PlanError
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import TRIES, CapturedModel, PlanRequest, plan_within_caps, traced_peaks
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planning import make_request
from pipeloom.profiler.roofline import roofline
from pipeloom.train.config import Config
from pipeloom.train.run import follow_plan

ROWS, COUNT, CAP = 4, 4, 240_000


class Unknown(nn.Module):
    """The table does not know `logcumsumexp`, which keeps its result and needs much scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).logcumsumexp(1)
        return x.square().mean()


JOB = Job(model=Unknown, batch=normal(x=(64, 16)), optimizer=zoo.sgd, name="unknown")


def costs_of(job: Job) -> Mapping[str, Profile]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="roofline profile .* estimated as elementwise")
        return planning.estimate(capture_of(job, ROWS).graph, cpu_cluster(2))


def profiled(job: Job) -> ProfiledModel:
    return ProfiledModel(size=ROWS, graph=graph_of(job, ROWS), profiles=costs_of(job))


def captured() -> CapturedModel:
    return CapturedModel(**vars(profiled(JOB)), captured=capture_of(JOB, ROWS))


def request_for(memory: int, **how: Any) -> PlanRequest:
    how = {"planner": "dawnpiper", "treatments": ["recompute"], "microbatches": COUNT} | how
    return make_request(ranks=2, cluster=cpu_cluster(2, memory=memory), **how)


def planned(memory: int) -> Plan:
    return plan_with_advice(request_for(memory), captured())


def peaks_as_traced(plan: Plan) -> tuple[int, ...]:
    return traced_peaks(
        plan, capture_of(JOB, ROWS), PlanCosts(graph_of(JOB, ROWS), costs_of(JOB), cpu_cluster(2))
    )


def test_a_plan_keeps_its_cap_by_its_traced_stages_too() -> None:
    by_the_table, plan = plan_with_advice(request_for(CAP), profiled(JOB)), planned(CAP)
    assert max(peaks_as_traced(by_the_table)) > CAP >= max(by_the_table.peaks)
    assert max(peaks_as_traced(plan)) <= CAP
    assert plan.caps == (CAP, CAP)
    batches = [JOB.batch(seed, ROWS * COUNT) for seed in range(2)]
    assert_same(pipelined(JOB, plan, batches), plain(JOB, batches, COUNT), tolerance=1e-6)
    # More memory is compared with plans that keep it in the same way.
    more = next(c for c in request_for(CAP).changes(plan, captured()) if "memory" in c.what)
    assert more.step_s == pytest.approx(planned(round(1.1 * CAP)).predicted_step_s, rel=0.02)


def test_changes_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, limits = planned(CAP), []

    def again(request: PlanRequest, *_: object, **how: object) -> Plan:
        limits.append(request.options.time_limit)
        return plan

    monkeypatch.setattr(PlanRequest, "plan", again)
    request_for(CAP, planner="auto", time_limit=9).changes(plan, captured())
    assert len(limits) > 1 and sum(limits) <= 9


@pytest.mark.slow
def test_where_no_plan_does_the_advice_holds_as_traced() -> None:
    with pytest.raises(InfeasibleError, match="rank 0 holds 218.4 KiB when its stage is traced") as caught:
        planned(210_000)
    advised = re.match(r"give each device at least ([\d.]+ KiB)", str(caught.value.hint))
    assert advised is not None, caught.value.hint
    cap = parse_bytes(advised[1])
    assert max(peaks_as_traced(planned(cap))) <= cap


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe"])
def test_a_cap_too_small_for_several_stages_is_said_to_be(schedule: str) -> None:
    with pytest.raises(InfeasibleError):
        request_for(1, schedule=schedule, treatments=None).plan(captured(), explained=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "treatments", "share"),
    [
        ("1f1b", [], 1.0),
        ("zb_h1", [], 1.0),
        ("gpipe", ["recompute", "offload"], 0.7),
        ("interleaved_1f1b", [], 1.0),
        ("dualpipe", [], 1.0),
        ("gpipe", ["recompute"], 0.7),
        ("gpipe", ["offload"], 0.9),
    ],
)
def test_it_is_what_ranks_expect(
    schedule: str, treatments: list[Treatment], share: float, tmp_path: Path
) -> None:
    job, link = zoo.job("gpt"), Link(bandwidth_bytes_per_s=1e11)
    known = cpu_cluster(2)
    devices = tuple(replace(d, host_link=link, host_memory_bytes=1 << 30) for d in known.devices)
    cluster = replace(known, devices=devices)
    how = {"planner": "dawnpiper", "treatments": treatments, "schedule": schedule}

    def made(memory: int) -> Plan:
        request = make_request(ranks=2, microbatches=8, cluster=cluster, memory=memory, **how)
        return request.plan(profiled(job))

    plan = made(round(share * max(made(1 << 40).peaks)) if share < 1 else 1 << 40)
    assert plan.memory.offloads == ("offload" in treatments)
    expected = each_rank(
        job, plan, lambda p: [p.expected.peak_bytes(rank) for rank in range(2)], offload_dir=tmp_path
    )
    costs = PlanCosts(graph_of(job, ROWS), costs_of(job), cluster)
    assert [list(traced_peaks(plan, capture_of(job, ROWS), costs))] * 2 == expected


def plans(peaks: Sequence[int], asked: list[int]) -> Callable[[Cluster], Plan]:
    """Makes a plan whose one rank holds as much as it may, down to the least of `peaks`."""
    some = even_plan(JOB, 1, microbatches=1)

    def make(cluster: Cluster) -> Plan:
        cap = cluster.devices[0].memory_bytes
        asked.append(cap)
        fitting = [peak for peak in peaks if peak <= cap]
        if not fitting:
            raise InfeasibleError("nothing fits")
        return replace(some, peaks=(max(fitting),), caps=(cap,))

    return make


ONE = cpu_cluster(1, memory=1000)


def test_the_cap_is_lowered_by_what_was_not_seen() -> None:
    asked: list[int] = []
    plan = plan_within_caps(plans(range(1, 2000), asked), ONE, lambda plan: [plan.peaks[0] + 150])
    assert asked == [1000, 850] and plan.peaks == (850,) and plan.caps == (1000,)
    # What is far below its cap is not traced.
    plan = plan_within_caps(plans([250], []), ONE, lambda plan: pytest.fail("it was traced"))
    assert plan.peaks == (250,)


@pytest.mark.parametrize(
    ("peaks", "tries", "said"),
    [
        ([2000], 1, "nothing fits"),  # the first error is that of the planner
        ([900], 2, "when its stage is traced"),
        (range(1, 2000), TRIES, "when its stage is traced"),
    ],
)
def test_it_gives_up(peaks: Sequence[int], tries: int, said: str) -> None:
    asked: list[int] = []
    with pytest.raises(InfeasibleError, match=said):
        plan_within_caps(plans(peaks, asked), ONE, lambda plan: [1001])
    assert len(asked) == tries and sorted(asked, reverse=True) == asked


GPT = gpt_job()


def side_by_side(cluster: str = "4 x cpu", **how: object) -> Plan:
    how = {"ranks": 2, "replicas": 2, "microbatches": 8, "microbatch_size": 2, "planner": "exact"} | how
    return planning.plan(GPT, cluster=cluster, captured=capture_of(GPT), **how)


def test_replicas_of_a_stage_are_neighbours_and_share_the_micro_batches() -> None:
    wide, one = side_by_side(), side_by_side(replicas=1, microbatches=4)
    assert (wide.width, wide.replicas, wide.microbatches) == (2, 2, 8)
    assert wide.placement == (0, 2, 1, 3)
    assert wide.stages == one.stages, "a device holds its own micro-batches only"
    assert len(wide.caps) == len(wide.peaks) == len(wide.schedule_rows) == 4
    assert wide.peaks[0] == wide.peaks[1] and wide.peaks[2] == wide.peaks[3]
    assert wide.predicted_step_s > one.predicted_step_s, "replicas sum their gradients"
    several = side_by_side(schedule="interleaved_1f1b")
    assert (len(several.stages), several.width, len(several.schedule_rows)) == (4, 2, 4)
    request = make_request(ranks=2, replicas=2, global_batch=12)
    assert list(request.sizes()) == [1, 2, 3, 6]


def test_the_smallest_device_of_a_group_limits_its_stage() -> None:
    wide = side_by_side("cpu with 3MiB + cpu with 2MiB + 2 x cpu with 4MiB")
    assert wide.peaks[0] <= 2 << 20


def test_without_a_flush_two_sets_of_gradients_are_planned() -> None:
    wide, one = side_by_side(weights="2bw"), side_by_side(weights="2bw", replicas=1, microbatches=4)
    assert wide.updates is not None and wide.updates.every == 4
    two, single = (sum(stage.memory.gradients for stage in plan.stages) for plan in (wide, one))
    assert two == 2 * single


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"microbatches": 7}, ConfigError, "7 micro-batches per step cannot be shared evenly by 2 replicas"),
        ({"global_batch": 7}, ConfigError, "7 rows cannot be shared evenly by 2"),
        ({"schedule": "dualpipe"}, PlanError, "dualpipe holds every stage on 2 ranks by itself"),
        ({"replicas": 3, "microbatches": 9}, PlanError, "3 replicas of 2 stages are for 6 devices"),
        ({"replicas": 0}, ConfigError, "replicas is 0"),
        ({"replicas": 1, "shard_optimizer": True}, ConfigError, "every stage has one replica"),
        ({"delay_correction": 0.5}, ConfigError, "weights=2bw"),
        ({"warm_up_with_flush": 5, "weights": "flush"}, ConfigError, "no gradient is late"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    how: dict[str, object], error: type[PipeloomError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        side_by_side(**how)
    assert caught.value.hint


def test_sizes_that_are_named_for_a_global_batch_suit_the_replicas() -> None:
    two, three = (make_request(replicas=replicas, global_batch=16 - replicas * 2) for replicas in (2, 3))
    with pytest.raises(ConfigError, match="12 rows") as caught:
        two.microbatches_of(4)
    assert "2, 3, 6 rows" in str(caught.value.hint), "4 rows are three micro-batches"
    with pytest.raises(ConfigError, match="10 rows") as caught:
        three.sizes()
    assert "multiple of 3" in str(caught.value.hint)


@pytest.mark.parametrize(("schedule", "width"), [("1f1b", 2), ("zb_v", 1), ("zb_v", 2)])
def test_a_config_that_follows_a_plan_is_for_its_ranks(schedule: str, width: int) -> None:
    wide = side_by_side(schedule=schedule, replicas=width)
    settings = follow_plan(Config(), wide, ()).pipeline
    assert (settings.ranks, settings.replicas, settings.microbatches) == (2, width, 8)


@pytest.mark.parametrize("memory_bytes_per_s", [1e6, 1e15])
def test_what_replicas_send_each_other_after_an_update_takes_its_time(memory_bytes_per_s: float) -> None:
    """Each of two steps half of the parameters, and then gets the other half: half of a sum over both."""
    graph = graph_of(GPT)
    device = replace(cpu_cluster(1).devices[0], memory_bytes_per_s=memory_bytes_per_s)
    cluster = Cluster(devices=(device,) * 4, within_node=Link(bandwidth_bytes_per_s=1e6))
    plan = side_by_side()
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
    whole, shared = side_by_side(), side_by_side(shard_optimizer=True)
    ratio = sum(s.memory.optimizer for s in whole.stages) / sum(s.memory.optimizer for s in shared.stages)
    assert shared.shard_optimizer and ratio == pytest.approx(2)
    assert all(less < more for less, more in zip(shared.peaks, whole.peaks, strict=True))
    assert side_by_side("2 x cpu", schedule="dualpipe", replicas=1, shard_optimizer=True).shard_optimizer

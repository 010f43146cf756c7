"""Plans for CPUs keep their caps by the graphs of their stages; pipelines side by side are planned."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import nets
import pytest
import torch
from batches import normal
from every_schedule import gpt_job
from refusals import refused
from runs import assert_same, capture_of, each_rank, graph_of, pipelined, plain
from torch import Tensor, nn

from pipeloom import Job, planning
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import ConfigError, InfeasibleError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import CapturedModel, PlanRequest, traced_peaks
from pipeloom.planner.joint.search import CLOSEST
from pipeloom.planner.joint.search_record import searched_for
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planning import make_request
from pipeloom.profiler.roofline import roofline

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


JOB = Job(model=Unknown, batch=normal(x=(64, 16)), optimizer=nets.sgd, name="unknown")


def costs_of(job: Job) -> Mapping[str, Profile]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="roofline profile .* estimated as elementwise")
        return planning.estimate(capture_of(job, ROWS).graph, cpu_cluster(2))


def profiled(job: Job) -> ProfiledModel:
    return ProfiledModel(size=ROWS, graph=graph_of(job, ROWS), profiles=costs_of(job))


def captured() -> CapturedModel:
    return CapturedModel(**vars(profiled(JOB)), captured=capture_of(JOB, ROWS))


def request_for(memory: int, **how: Any) -> PlanRequest:
    usual = {"planner": "dawnpiper", "schedule": "1f1b", "treatments": ["recompute"], "microbatches": COUNT}
    return make_request(ranks=2, cluster=cpu_cluster(2, memory=memory), **usual | how)


@cache
def planned(memory: int) -> Plan:
    return plan_with_advice(request_for(memory), captured())


def peaks_as_traced(plan: Plan, job: Job = JOB, cluster: Cluster | None = None) -> tuple[int, ...]:
    costs = PlanCosts(graph_of(job, ROWS), costs_of(job), cluster or cpu_cluster(2))
    return traced_peaks(plan, capture_of(job, ROWS), costs)


def test_a_plan_keeps_its_cap_by_its_traced_stages_too() -> None:
    by_the_table, plan = plan_with_advice(request_for(CAP), profiled(JOB)), planned(CAP)
    assert max(peaks_as_traced(by_the_table)) > CAP >= max(by_the_table.peaks)
    assert max(peaks_as_traced(plan)) <= CAP
    assert plan.caps == (CAP, CAP)
    batches = [JOB.batch(seed, ROWS * COUNT) for seed in range(2)]
    assert_same(pipelined(JOB, plan, batches), plain(JOB, batches, COUNT), tolerance=1e-6)


def test_changes_share_the_time_limit() -> None:
    plan = planned(CAP)
    with patch.object(PlanRequest, "plan", autospec=True, return_value=plan) as again:
        request_for(CAP, planner="auto", time_limit=9).changes(plan, captured())
    limits = [call.args[0].options.time_limit for call in again.call_args_list]
    assert len(limits) > 1 and sum(limits) <= 9


@pytest.mark.slow
def test_where_no_plan_does_the_advice_holds_as_traced() -> None:
    said = refused(InfeasibleError, planned, 210_000)
    advised = re.search(r"give each device at least ([\d.]+ KiB)", said)
    assert "traced" in said and advised is not None, said
    cap = parse_bytes(advised[1])
    assert max(peaks_as_traced(planned(cap))) <= cap


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "treatments", "share"),
    [
        ("1f1b", [], 1.0),
        ("gpipe", ["recompute", "offload"], 0.7),
        ("zb_h1", [], 1.0),
        ("dualpipe", [], 1.0),
    ],
)
def test_it_is_what_ranks_expect(schedule, treatments, share, tmp_path):
    job, link = nets.job("gpt"), Link(bandwidth_bytes_per_s=1e11)
    known = cpu_cluster(2)
    devices = tuple(replace(d, host_link=link, host_memory_bytes=1 << 30) for d in known.devices)
    cluster = replace(known, devices=devices)
    how = {"planner": "dawnpiper", "treatments": treatments, "schedule": schedule}

    def made(memory: int) -> Plan:
        request = make_request(ranks=2, microbatches=8, cluster=cluster, memory=memory, **how)
        return request.plan(profiled(job))

    plan = made(round(share * max(made(1 << 40).peaks)) if share < 1 else 1 << 40)
    assert plan.memory.offloads == ("offload" in treatments)
    (expected, others) = each_rank(
        job, plan, lambda p: tuple(map(p.expected.peak_bytes, range(2))), offload_dir=tmp_path
    )
    assert peaks_as_traced(plan, job, cluster) == expected == others


GPT = gpt_job()


def side_by_side(cluster: str = "4 x cpu", **how: object) -> Plan:
    of_each = {"ranks": 2, "microbatches": 8, "microbatch_size": 2}
    how = {**of_each, "replicas": 2, "planner": "exact", "schedule": "1f1b"} | how
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
    late, one = side_by_side(weights="2bw"), side_by_side(weights="2bw", replicas=1, microbatches=4)
    assert late.updates is not None and late.updates.every == 4
    two, single = (sum(stage.memory.gradients for stage in plan.stages) for plan in (late, one))
    assert two == 2 * single, "without a flush two sets of gradients are planned"
    smallest = side_by_side("cpu with 3MiB + cpu with 2MiB + 2 x cpu with 4MiB")
    assert smallest.peaks[0] <= 2 << 20


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"microbatches": 7}, ConfigError, "7 micro-batches"),
        ({"global_batch": 7}, ConfigError, "7 rows"),
        ({"global_batch": 0}, ConfigError, "global_batch is 0"),
        ({"schedule": "dualpipe"}, PlanError, "dualpipe"),
        ({"replicas": 3, "microbatches": 9}, PlanError, "6 devices"),
        ({"replicas": 0}, ConfigError, "replicas is 0"),
        ({"replicas": 1, "shard_optimizer": True}, ConfigError, "one replica"),
        ({"delay_correction": 0.5}, ConfigError, "weights=2bw"),
        ({"warm_up_with_flush": 5, "weights": "flush"}, ConfigError, "no gradient is late"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(how, error, says):
    assert says in refused(error, side_by_side, **how)


def test_sizes_that_are_named_for_a_global_batch_suit_the_replicas() -> None:
    assert list(make_request(ranks=2, replicas=2, global_batch=12).sizes()) == [1, 2, 3, 6]
    said = refused(ConfigError, make_request(replicas=2, global_batch=12).microbatches_of, 4)
    assert "12 rows" in said and "2, 3, 6 rows" in said, "4 rows are three micro-batches"
    assert "multiple of 3" in refused(ConfigError, make_request(replicas=3, global_batch=10).sizes)


TWO = find_cluster("2 x a100-40")


@pytest.mark.whole_search
@pytest.mark.parametrize(
    ("cluster", "count", "width"),
    [
        (TWO, {"microbatches": 8}, 2),
        (replace(TWO, within_node=Link(bandwidth_bytes_per_s=1e8)), {"microbatches": 8}, 1),
        ("2 x a100-40 with 400KiB", {"microbatches": 8}, 1),
        (TWO, {"microbatches": 7}, 1),
        (TWO, {"global_batch": 6}, 1),
    ],
)
def test_ranks_are_shared_out_as_makes_the_step_fastest(cluster, count, width):
    """Replicas of the whole model; but not where sums take long, they do not fit, or one would get more."""
    how: dict[str, Any] = {"captured": capture_of(GPT), "microbatch_size": 2, "treatments": "none"}
    plan = planning.plan(GPT, **how, cluster=cluster, **count)
    assert (plan.width, plan.ranks, len(plan.schedule_rows)) == (width, 2, 2)
    told = searched_for(plan)["widths"]
    assert told[str(width)] == plan.predicted_step_s
    assert plan.predicted_step_s == min(s for s in told.values() if not isinstance(s, str))
    assert "global_batch" not in count or "evenly" in told["2"]


@pytest.mark.whole_search
@pytest.mark.parametrize(("within", "width"), [(0.0, 1), (0.01, 2)])
def test_replicas_that_are_hardly_slower_are_taken_where_predictions_are_as_rough(within, width):
    cluster = replace(TWO, within_node=Link(bandwidth_bytes_per_s=2e9))
    request = make_request(cluster=cluster, microbatches=8, microbatch_size=2).changed(simpler_within=within)
    plan, _ = planning.plan_size(request, GPT, captured=capture_of(GPT))
    told = searched_for(plan)
    assert told["widths"]["1"] < told["widths"]["2"] < 1.05 * told["widths"]["1"]
    assert plan.width == width and ("one pipeline" in told["passed_over"]) == (width == 2)


@pytest.mark.whole_search
@pytest.mark.parametrize(
    "said",
    [
        {"ranks": 2},
        {"replicas": 1},
        {"cluster": "a100-40"},
        {"cluster": "a100-40 + v100-16"},
        {"schedule": "1f1b"},
        {"planner": "exact"},
        {"chunks": 2},
        {"weights": "2bw"},
        {"shard_optimizer": True},
        {"granularity": "module"},
    ],
)
def test_who_asks_for_a_pipeline_gets_one(said: dict[str, Any]) -> None:
    assert make_request(cluster=TWO, weights="flush").chooses_width
    assert not make_request(**{"cluster": TWO} | said).chooses_width


class Impatient:
    """Ctrl-C when the search of another number of pipelines begins."""

    seen = False

    def weighed(self, count: int) -> None: ...

    def trying(self, what: str, best: tuple[str, float] | None, bound_s: float) -> None:
        if best is None and self.seen:
            raise KeyboardInterrupt
        self.seen |= best is not None


@pytest.mark.whole_search
def test_a_plan_that_was_found_is_taken_after_ctrl_c() -> None:
    request = make_request(watch=Impatient(), cluster=TWO, microbatches=8, microbatch_size=2)
    plan, model = planning.plan_size(request, GPT, captured=capture_of(GPT))
    told = searched_for(plan)
    assert told["ended"] == "interrupted" and list(told["widths"]) == ["2"]
    assert not request.changes(plan, model)


@pytest.mark.slow
@pytest.mark.whole_search
def test_some_pipelines_side_by_side_are_faster_than_one_and_than_replicas_of_the_model() -> None:
    how: dict[str, Any] = {"captured": capture_of(GPT), "microbatch_size": 2, "microbatches": 8}
    cluster = "2 nodes of 2 x v100-16"
    plan = planning.plan(GPT, cluster=cluster, **how)
    shapes = [planning.plan(GPT, cluster=cluster, ranks=4 // w, replicas=w, **how) for w in (1, 2, 4)]
    fastest = min(shapes, key=lambda shape: shape.predicted_step_s)
    assert plan.width == fastest.width
    assert plan.predicted_step_s <= fastest.predicted_step_s * (1 + CLOSEST)


def test_what_replicas_send_each_other_after_an_update_takes_its_time() -> None:
    """Each of two steps half of the parameters, and then gets the other half: half of a sum over both."""
    graph = graph_of(GPT)
    device = replace(cpu_cluster(1).devices[0], memory_bytes_per_s=1e6)
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


def test_caps_of_one_of_several_pipelines_hold_for_a_shared_out_optimizer() -> None:
    """Stages of a rank are taken to hold an even share; what passes its caps is planned again for less."""
    free = side_by_side(schedule="zb_v", shard_optimizer=True)
    capped = side_by_side(schedule="zb_v", shard_optimizer=True, memory=int(1.02 * max(free.peaks)))
    assert capped.peaks == free.peaks
    free = side_by_side(shard_optimizer=True)
    plan = side_by_side(shard_optimizer=True, memory=int(0.98 * max(free.peaks)))
    assert max(plan.peaks) <= plan.caps[0]

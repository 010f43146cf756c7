"""The passes before training, joined: what plans have, and schedules with several stages per rank."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import nets
import pytest
import torch
from deep import TANH
from every_schedule import gpt_job
from refusals import refused
from runs import capture_of, graph_of
from torch import Tensor, nn

from pipeloom import Job, Options, PlanSettings, planning, verify
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import MiB
from pipeloom.ir.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import format_bytes
from pipeloom.lowering.passes import lower
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.placement import stages_for
from pipeloom.planner.plan_table import limits, plan_rows
from pipeloom.schedules import registry
from pipeloom.schedules.formats import program_text
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.job_calls import at_length

SKIPS, GPT = nets.job("skips"), gpt_job()


def plan(job: object = SKIPS, **how: object) -> Plan:
    how = {"ranks": 2, "microbatches": 2, "microbatch_size": 2, "captured": capture_of(job)} | how
    return planning.plan(job, **how)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, "bfloat16"])
def test_mixed_precision_that_loses_gradients_is_refused(dtype: torch.dtype) -> None:
    """In float16 an RMS norm left the layer before it with gradients of zero, and said nothing."""
    for make in (Options, partial(planning.capture, TANH, 2)):
        said = refused(ConfigError, make, autocast=dtype)
        assert f"is {dtype!r}" in said and "use torch.bfloat16" in said


def test_profiles_and_clusters_that_do_not_belong_to_a_plan_are_refused() -> None:
    cluster, graph = cpu_cluster(2), capture_of(SKIPS).graph
    large = planning.estimate(planning.capture(SKIPS, 8).graph, cluster)["cpu"]
    right = planning.estimate(graph, cluster)["cpu"]
    made = replace(plan(cluster=cluster), batch=())
    for call, said in (
        (partial(plan, cluster=cluster, microbatch_size=4), "micro-batches of 2 rows, the plan is for 4"),
        (partial(plan, cluster=cluster, profiled=large), r"the profile is of micro-batches .*\[8"),
        (partial(planning.simulate, made, graph, large, cluster), r"the profile is of micro-batches .*\[8"),
        (partial(planning.simulate, made, graph, right, cpu_cluster(1)), "2 devices, the cluster has 1"),
        (partial(planning.simulate, made, graph, {"gpu": right}, cluster), "no profile for device cpu"),
    ):
        assert re.search(said, refused(PlanError, call))


def test_one_profile_stands_for_one_kind_of_device_and_devices_of_one_name_compute_alike() -> None:
    graph, mixed = capture_of(SKIPS).graph, find_cluster("1 x a100-40 + 1 x v100-32")
    profile = planning.estimate(graph, mixed)[mixed.devices[0].name]
    assert "v100-32" in refused(PlanError, plan, cluster=mixed, profiled=profile)
    first, second = cpu_cluster(2).devices
    faster = replace(cpu_cluster(2), devices=(first, replace(second, memory_bytes_per_s=1e9)))
    assert "different rates" in refused(ConfigError, planning.estimate, graph, faster)


@pytest.mark.parametrize(
    ("momentum", "more"),
    [(0.9, {"replicas": 2, "shard_optimizer": True}), (0.0, {"weights": "2bw", "clips": True})],
)
def test_a_graph_without_an_optimizer_is_simulated_with_the_state_of_the_plan(momentum, more):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    job, cluster = replace(nets.job("gpt"), optimizer=sgd), cpu_cluster(2 * more.get("replicas", 1))
    unknown = capture_of(job).graph
    graph = planning.with_updates(unknown, job)
    assert not any(p.given_update for p in unknown.parameters)
    made, costs = plan(job, cluster=cluster, **more), planning.estimate(graph, cluster)
    known, guessed = (planning.simulate(made, g, costs, cluster).peaks for g in (graph, unknown))
    assert [p["optimizer"] for p in guessed] == [p["optimizer"] for p in known]


def test_a_plan_has_the_caps_of_the_devices_that_it_was_made_for() -> None:
    sizes = (64 * MiB, 32 * MiB)
    unequal = cpu_cluster(2).with_memory(sizes)
    for how, caps in (
        ({"cluster": unequal}, sizes),
        ({"cluster": unequal, "memory": "48MiB"}, (48 * MiB,) * 2),
        ({"cluster": "2 x rtx-2080ti with 1GiB"}, (1024 * MiB,) * 2),
        ({"memory": "48MiB"}, (48 * MiB,) * 2),
        ({}, ()),
    ):
        assert plan(**how).caps == caps


def planned(schedule: str, memory: str | None = None) -> Plan:
    """Of the small GPT, on two CPUs."""
    how = {"microbatches": 4, "microbatch_size": 1, "captured": capture_of(GPT, 1)}
    cluster = cpu_cluster(2, memory=memory)
    return plan(GPT, planner="exact", schedule=schedule, cluster=cluster, memory=memory, **how)


def simulated(made: Plan, memory: str | None = None) -> planning.Timeline:
    graph, cluster = graph_of(GPT, 1), cpu_cluster(2, memory=memory)
    return planning.simulate(replace(made, batch=()), graph, planning.estimate(graph, cluster), cluster)


def test_a_split_backward_is_split_wherever_the_stages_are_placed() -> None:
    rows = plan(cluster=cpu_cluster(2), schedule="interleaved_1f1b", split_backward=True).schedule_rows
    assert "I0" in rows[0] and "B" not in rows[0]


@pytest.mark.parametrize("name", ["dualpipe", "zb_v"])
def test_the_planner_cuts_for_the_placement_and_replicas_cost_what_each_of_them_holds(name: str) -> None:
    """Both ranks of a bidirectional schedule hold all parameters, of a V what its own stages read; a tied
    one that two stages of a rank read is there once."""
    found, graph = planned(name), graph_of(GPT, 1)
    stages, placement = registry.default_placement(name, 2)
    assert found.placement == placement and found.schedule == name
    assert len(found.stages) == stages_for(name, 2) == len(stages.stages) // stages.replicas
    step = simulated(found)
    assert step.step_s == pytest.approx(found.predicted_step_s)
    total = sum(p.bytes for p in graph.parameters)
    params = found.replicated(found.stage_graph(graph)).params
    for rank, peak in enumerate(step.peaks):
        own = {n for s, home in enumerate(found.placement) if home == rank for n in params[s]}
        assert peak["parameters"] == sum(graph.parameter[n].bytes for n in own)
        assert (peak["parameters"] == total) == (name == "dualpipe")


def test_a_file_of_actions_is_a_schedule(tmp_path: Path) -> None:
    """As torch writes one: two stages on each of two ranks, with transfers."""
    file = tmp_path / "theirs.csv"
    stages, placement = registry.default_placement("looped_bfs", 2)
    file.write_text(program_text(lower(registry.build("looped_bfs", stages, placement, 4), stages)))
    made = planned(str(file))
    assert made.placement == (0, 1, 0, 1)
    file.unlink()
    verify(GPT, made).require()
    assert f"cannot read {file}" in refused(ScheduleError, planned, str(file))
    file.write_text("0F0,0B0\n1F0,1B0\n")
    assert "1 micro-batches, not 4" in refused(ScheduleError, planned, str(file))


def test_ranks_of_several_stages_are_filled_by_all_of_them() -> None:
    found = planned("zb_v", memory="1MiB")
    step = simulated(found, "1MiB")
    assert found.peaks == tuple(step.peak_bytes(rank) for rank in range(2))
    assert [row.filled for row in plan_rows(found)] == [found.peaks[r] / 2**20 for r in found.placement]
    assert "no rank is full" in limits(found)[-1] and format_bytes(max(found.peaks)) in limits(found)[-1]


def test_rows_and_limits_of_a_stage_of_two_directions_and_of_one_alone_on_its_rank() -> None:
    both, one = planned("chimera"), planned("1f1b")
    assert [row.ranks for row in plan_rows(both)] == [(0, 1), (1, 0)]
    assert [row.ranks for row in plan_rows(one)] == [(0,), (1,)]
    peaks = (10**9, 7)
    assert tuple(row.peak_bytes for row in plan_rows(replace(one, peaks=peaks))) == peaks
    assert "data parallelism" not in " ".join(limits(both))
    first, second = both.stages
    bare = replace(second, memory=replace(second.memory, parameters=0))
    assert "data parallelism" in " ".join(limits(replace(both, stages=(first, bare))))


def test_a_plan_for_several_lengths_has_the_mean_step_and_room_for_the_longest() -> None:
    """The head takes most of a short sequence, attention most of a long one: the cut is between."""
    how = {"ranks": 2, "microbatches": 4, "planner": "exact", "cluster": "2 x a100-40", "microbatch_size": 2}
    models = [capture_of(at_length(GPT, length), 2).graph for length in (4, 16)]
    cluster = find_cluster("2 x a100-40")

    def mean_s(made: Plan) -> float:
        made, steps = replace(made, batch=()), []
        for graph in models:
            costs = planning.estimate(graph, cluster)
            steps.append(planning.simulate(made, graph, costs, cluster).step_s)
        return sum(steps) / 2

    mixed, short, long = (planning.plan(GPT, lengths=text, **how) for text in ("4:1,16:1", "4:1", "16:1"))
    means = [mean_s(made) for made in (mixed, short, long)]
    assert mixed.predicted_step_s == pytest.approx(means[0]) and means[0] <= min(means) * (1 + 1e-9)
    assert mixed.batch == long.batch != short.batch
    refused(InfeasibleError, planning.plan, GPT, lengths="4:99,16:1", memory=max(short.peaks), **how)
    bare = replace(GPT, batch=lambda seed, rows: {"x": torch.zeros(rows)})
    assert "length" in refused(ConfigError, planning.plan, bare, lengths="4:1", **how)


class ConstantThenSquare(nn.Module):
    """One half takes as long for any sequence, the other grows with the square of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.tanh(torch.tanh(self.weight @ self.weight) @ self.weight)
        x = x * constant.mean()
        for _ in range(3):
            x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        return x.square().mean()


def test_with_several_lengths_memory_that_changes_nothing_gains_nothing() -> None:
    job = Job(model=ConstantThenSquare, batch=lambda seed, rows: {"x": torch.zeros(rows, 1024, 64)})
    how = {"ranks": 2, "schedule": "1f1b", "planner": "exact", "cluster": "2 x a100-40"}
    request = planning.make_request(lengths="64:1,1024:1", microbatch_size=2, **how)
    made, model = planning.plan_size(request, job)
    gains = {change.what: change.gain for change in request.changes(made, model)}
    assert gains["10 % more memory"] == pytest.approx(0, abs=1e-9)


def test_all_sizes_share_a_time_limit() -> None:
    request = planning.make_request(ranks=2, cluster="2 x a100-40", global_batch=16, time_limit=60)
    with patch.object(PlanRequest, "plan", autospec=True, side_effect=PlanRequest.plan) as plan_of_one:
        planning.plan_at_size(request, TANH, planning.best_plan)
    limits = [call.args[0].options.time_limit for call in plan_of_one.call_args_list]
    assert len(limits) > 3 and sum(limits) <= 60


@pytest.mark.parametrize("sized", [True, False])
def test_what_is_planned_last_has_the_rest_of_a_time_limit(sized, monkeypatch):
    clock, left = [0.0], list[tuple[int, float]]()

    def refuse(*_: object, **how: object) -> None:
        clock[0] += 10
        if how:
            raise InfeasibleError("too large")

    def note(request: PlanRequest, *_: object) -> None:
        left.append((request.options.time_limit, 60 - clock[0]))

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(PlanRequest, "plan", refuse)
    monkeypatch.setattr(planning, "plan_with_advice", note)
    monkeypatch.setattr(planning, "best_words", refuse)
    request = planning.make_request(ranks=2, cluster="2 x a100-40", global_batch=16, time_limit=60)
    if sized:
        planning.best_plan(request, lambda size: planning._model_for(request, TANH, size))
    else:
        planning.plan_size(request, TANH)
    assert len(left) == 1 and left[0][0] == max(1, left[0][1]) < 60


def test_lengths_and_parts_go_with_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, as on accelerators, what ranks of this machine will run is measured before it is planned."""
    precisions = []

    def profile(captured: Captured, **_: object) -> Profile:
        precisions.append(captured.autocast)
        return replace(planning.estimate(captured.graph, cpu_cluster(1))["cpu"], source="measured")

    monkeypatch.setattr(planning, "profile", profile)
    monkeypatch.setenv("PIPELOOM_KEEP_PROFILES", "0")
    monkeypatch.setenv("PIPELOOM_CONTENTION", "1")
    captured = planning.capture(GPT, 2, autocast=torch.bfloat16)
    how = {"lengths": "4:1,16:1", "split_words": 2}
    settings = PlanSettings(ranks=2, microbatch_size=2, planner="exact", **how)
    made = planning.plan_here(GPT, settings, captured, device="cpu")
    assert set(made.split_words.values()) == {2}
    assert len(precisions) == 2 and set(precisions) == {captured.autocast}

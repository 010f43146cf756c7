"""Plans for CPUs keep their caps by the graphs of their stages, not only by the table of ops."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from runs import assert_same, capture_of, even_plan, graph_of, pipelined, plain, shared_captures, threads
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import TRIES, CapturedModel, plan_within_caps, traced_peaks
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planning import make_request
from pipeloom.runtime.transports.local_channel import LocalChannel

ROWS, COUNT = 4, 4


class Unknown(nn.Module):
    """The table does not know `logcumsumexp`, which keeps its result and needs much scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).logcumsumexp(1)
        return x.square().mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 64, 16, generator=torch.Generator().manual_seed(seed))}


JOB = Job(model=Unknown, batch=batch, optimizer=zoo.sgd, name="unknown")


def planned(memory: int, *, checked: bool) -> Plan:
    cluster = cpu_cluster(2, memory=memory)
    how = make_request(
        JOB, ranks=2, microbatches=COUNT, cluster=cluster, planner="dawnpiper", treatments=["recompute"]
    )
    return plan_with_advice(how, captured_model() if checked else profiled_model(JOB))


def profiled_model(job: Job) -> ProfiledModel:
    return ProfiledModel(size=ROWS, graph=graph_of(job, ROWS), profiles=costs_of(job, ROWS))


def captured_model() -> CapturedModel:
    captured = capture_of(JOB, ROWS)
    graph = graph_of(JOB, ROWS)
    return CapturedModel(size=ROWS, graph=graph, profiles=costs_of(JOB, ROWS), captured=captured)


def peaks_as_traced(plan: Plan) -> tuple[int, ...]:
    captured = capture_of(JOB, ROWS)
    return traced_peaks(plan, captured, PlanCosts(graph_of(JOB, ROWS), costs_of(JOB, ROWS), cpu_cluster(2)))


def costs_of(job: Job, rows: int) -> Mapping[str, Profile]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="roofline profile .* estimated as elementwise")
        return planning.estimate(capture_of(job, rows).graph, cpu_cluster(2))


def test_a_plan_keeps_its_cap_by_its_traced_stages_too() -> None:
    cap = 240_000
    by_the_table, plan = planned(cap, checked=False), planned(cap, checked=True)
    assert max(peaks_as_traced(by_the_table)) > cap >= max(by_the_table.peaks)
    assert max(peaks_as_traced(plan)) <= cap
    assert plan.caps == (cap, cap)
    batches = [batch(seed, ROWS * COUNT) for seed in range(2)]
    assert_same(pipelined(JOB, plan, batches), plain(JOB, batches, COUNT), tolerance=1e-6)


@pytest.mark.slow
def test_where_no_plan_does_the_advice_holds_as_traced() -> None:
    with pytest.raises(InfeasibleError, match="rank 0 holds 218.4 KiB when its stage is traced") as caught:
        planned(210_000, checked=True)
    assert caught.value.hint is not None
    advised = re.match(r"give each device at least ([\d.]+ KiB)", caught.value.hint)
    assert advised is not None, caught.value.hint
    cap = parse_bytes(advised[1])
    assert max(peaks_as_traced(planned(cap, checked=True))) <= cap


def test_more_memory_is_compared_with_plans_that_keep_it() -> None:
    cap = 240_000
    cluster = cpu_cluster(2, memory=cap)
    how = make_request(
        JOB, ranks=2, microbatches=COUNT, cluster=cluster, planner="dawnpiper", treatments=["recompute"]
    )
    more = next(c for c in how.changes(planned(cap, checked=True), captured_model()) if "memory" in c.what)
    best = planned(round(1.1 * cap), checked=True)
    assert more.step_s == pytest.approx(best.predicted_step_s, rel=0.02)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe"])
def test_a_cap_too_small_for_several_stages_is_said_to_be(schedule: str) -> None:
    """Half of one byte was said to be a device without memory."""
    cluster = cpu_cluster(2, memory=1)
    how = make_request(
        JOB, ranks=2, microbatches=COUNT, cluster=cluster, planner="dawnpiper", schedule=schedule
    )
    with pytest.raises(InfeasibleError):
        how.plan(captured_model(), explained=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "treatments", "share"),
    [
        ("1f1b", [], 1.0),
        ("zb_h1", [], 1.0),
        pytest.param("interleaved_1f1b", [], 1.0, marks=pytest.mark.slow),
        pytest.param("dualpipe", [], 1.0, marks=pytest.mark.slow),
        pytest.param("gpipe", ["recompute"], 0.7, marks=pytest.mark.slow),
        pytest.param("gpipe", ["offload"], 0.9, marks=pytest.mark.slow),
        ("gpipe", ["recompute", "offload"], 0.7),
    ],
)
def test_it_is_what_ranks_expect(
    schedule: str, treatments: list[Treatment], share: float, tmp_path: Path
) -> None:
    job = zoo.job("gpt")
    captured, link = capture_of(job, ROWS), Link(bandwidth_bytes_per_s=1e11)
    known = cpu_cluster(2)
    devices = tuple(replace(d, host_link=link, host_memory_bytes=1 << 30) for d in known.devices)

    def made(memory: int) -> Plan:
        how = make_request(
            job,
            ranks=2,
            microbatches=2 * COUNT,
            cluster=replace(known, devices=devices),
            memory=memory,
            planner="dawnpiper",
            treatments=treatments,
            schedule=schedule,
        )
        return how.plan(profiled_model(job))

    plan = made(round(share * max(made(1 << 40).peaks)) if share < 1 else 1 << 40)
    assert plan.memory.offloads == ("offload" in treatments)

    def expected(rank: int, channel: LocalChannel) -> list[int]:
        with Pipeline(job, plan, options=Options(offload_dir=tmp_path), channel=channel) as pipeline:
            return [pipeline.expected.peak_bytes(r) for r in range(2)]

    with shared_captures():
        ranks = threads(2, expected)
    costs = PlanCosts(graph_of(job, ROWS), costs_of(job, ROWS), replace(known, devices=devices))
    found = traced_peaks(plan, captured, costs)
    assert [list(found)] * 2 == ranks


def _plans(peaks: Sequence[int], asked: list[int]) -> Callable[[Cluster], Plan]:
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


def test_the_cap_is_lowered_by_what_was_not_seen() -> None:
    asked: list[int] = []
    cluster = cpu_cluster(1, memory=1000)
    plan = plan_within_caps(_plans(range(1, 2000), asked), cluster, lambda plan: [plan.peaks[0] + 150])
    assert asked == [1000, 850] and plan.peaks == (850,) and plan.caps == (1000,)


def test_what_is_far_below_its_cap_is_not_traced() -> None:
    cluster = cpu_cluster(1, memory=1000)
    plan = plan_within_caps(_plans([250], []), cluster, lambda plan: pytest.fail("it was traced"))
    assert plan.peaks == (250,)


def test_the_first_error_is_that_of_the_planner() -> None:
    with pytest.raises(InfeasibleError, match="nothing fits"):
        plan_within_caps(_plans([2000], []), cpu_cluster(1, memory=1000), lambda plan: [1])


@pytest.mark.parametrize(("peaks", "tries"), [([900], 2), (range(1, 2000), TRIES)])
def test_it_gives_up(peaks: Sequence[int], tries: int) -> None:
    asked: list[int] = []
    with pytest.raises(InfeasibleError, match="when its stage is traced"):
        plan_within_caps(_plans(peaks, asked), cpu_cluster(1, memory=1000), lambda plan: [1001])
    assert len(asked) == tries and sorted(asked, reverse=True) == asked

"""Advice where no plan fits is followed here as it is typed, and leads to a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import zoo
from runs import capture_of
from torch import Tensor, nn

from pipeloom import Job, plan, plan_advice, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import CapturedModel, PlanRequest
from pipeloom.planner import planners
from pipeloom.planner.stage_cost.tensors import Readers
from pipeloom.planning import captured_model, make_request

SIZE = 4


def request_for(cluster: str, **more: object) -> tuple[PlanRequest, CapturedModel]:
    job = zoo.job("gpt2")
    how = make_request(**{"ranks": 2, "microbatches": 4, "cluster": cluster} | more)
    return how, captured_model(job, SIZE, how.cluster, captured=capture_of(job, SIZE))


def pieces_of(how: PlanRequest, model: CapturedModel) -> list[str]:
    with pytest.raises(InfeasibleError) as caught:
        plan_with_advice(how, model)
    return str(caught.value.hint).split(", or ")


def followed(how: PlanRequest, advice: str) -> PlanRequest:
    """The request as a piece of advice wants it."""
    devices = how.cluster.devices
    if stages := re.fullmatch(r"use (\d+) (?:stages|ranks \(--ranks \d+\))(?: on \d+ devices)?", advice):
        count = int(stages[1])
        return replace(how.changed(ranks=count), cluster=replace(how.cluster, devices=devices[:1] * count))
    if way := re.search(r"--treatments (\w+)", advice):
        return how.changed(treatments=way[1])
    if other := re.match(r"use planner (\w+)", advice):
        return how.changed(planner=other[1])
    sizes = dict(re.findall(r"(\S+(?: device)?) at least (\S+ \w+)", advice))
    assert sizes, advice
    said = [sizes.get("each device") or sizes.get(device.name) for device in devices]
    given = [parse_bytes(size or device.memory_bytes) for size, device in zip(said, devices, strict=True)]
    return replace(how, cluster=how.cluster.with_memory(given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("share", "how", "kinds"),
    [
        (0.9, {"planner": "equal"}, None),
        (0.9, {"planner": "exact"}, "give, use, let"),
        (0.9, {"planner": "exact", "schedule": "zb_h1"}, "give, use, let"),
        (0.9, {"planner": "pipedream"}, "give, use, use"),
        (0.9, {"treatments": ("offload",)}, None),
        (0.6, {"planner": "exact", "schedule": "zb_v"}, None),
        (0.001, {}, "give"),
        (0.001, {"planner": "dawnpiper"}, "give"),
        (0.001, {"planner": "balanced"}, "give"),
        # The least that is tried took longer than all that may be tried: then nothing was advised.
        (0.6, {"schedule": "zb_v"}, None),
    ],
)
def test_every_piece_leads_to_a_plan(share: float, how: dict[str, object], kinds: str | None) -> None:
    free, model = request_for("2 x a100-40", **how)
    most = max(free.plan(model).peaks)
    tight, _ = request_for(f"2 x a100-40 with {int(share * most)}B", **how)
    if tight.fits(model):
        tight, _ = request_for(f"2 x a100-40 with {int(share * most / 3)}B", **how)
    pieces = pieces_of(tight, model)
    assert kinds is None or ", ".join(piece.split()[0] for piece in pieces) == kinds
    for piece in pieces:
        assert followed(tight, piece).fits(model), piece


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        # The hint said "17.6 MiB to 30.2 MiB", and not of which.
        ("a100-40 with 200KiB + v100-32 with 300KiB", "each device"),
        # The hint wanted 624 GiB of the larger device, as much more as the smaller one needs.
        pytest.param("a100-40 + v100-32 with 1KiB", "v100-32-sxm", marks=pytest.mark.slow),
    ],
)
def test_devices_that_need_more_are_named(cluster: str, named: str) -> None:
    how, model = request_for(cluster)
    hint = pieces_of(how, model)[0]
    assert re.fullmatch(rf"give {named} at least \S+ \S+", hint)
    enough = followed(how, hint)
    assert enough.fits(model)
    if named != "each device":
        large, small = enough.cluster.devices
        tighter = replace(small, memory_bytes=int(small.memory_bytes / 1.05))
        assert not replace(how, cluster=replace(how.cluster, devices=(large, tighter))).fits(model)


@pytest.mark.parametrize(("cap", "sizes"), [("100KiB", 0), ("300KiB", 1)])
def test_what_cannot_help_is_not_looked_for(cap: str, sizes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows were sought where parameters alone do not fit, and each schedule's refusal was explained."""
    how, model = request_for(f"2 x a100-40 with {cap}")
    explain, sought = Mock(wraps=planners.explain_infeasible), Mock(return_value=0)
    monkeypatch.setattr(planners, "explain_infeasible", explain)
    with pytest.raises(InfeasibleError):
        plan_with_advice(how, model, sought)
    assert (explain.call_count, sought.call_count) == (1, sizes)


@pytest.mark.slow
def test_the_largest_micro_batch_is_named_by_planners_that_free_nothing() -> None:
    job, (how, _) = zoo.job("gpt2"), request_for("2 x a100-40", planner="equal")
    most = max(planning.plan_size(how.changed(microbatch_size=2), job)[0].peaks)
    tight, _ = request_for(f"2 x a100-40 with {most + 50_000}B", planner="equal")
    with pytest.raises(InfeasibleError) as caught:
        planning.plan_size(tight.changed(microbatch_size=16), job)
    size = re.search(r"use micro-batches of (?:at most )?(\d+) row", str(caught.value.hint))
    assert size is not None
    smaller = tight.changed(microbatch_size=int(size[1]))
    assert planning.plan_size(smaller, job)[0].microbatch_size == int(size[1]) >= 2


class Seen(nn.Module):
    """A buffer that one layer reads and a later one updates: what lies between stays together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(24))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == 4:
                x = x + self.seen
            if index == 14:
                self.seen.add_(x.detach().mean(0))
        return x.square().mean()


SEEN = Job(model=Seen, batch=lambda seed, rows: {"x": torch.randn(rows, 4)}, name="seen")
FEW = {"microbatch_size": 2, "microbatches": 4, "planner": "balanced"}


@pytest.mark.parametrize(
    ("schedule", "stages", "why", "most"),
    [
        ("1f1b", 60, "60 stages for 55 ops", 30),
        ("1f1b", 40, "40 stages, but ops that share an updated buffer", 30),
        ("zb_v", 30, "zb_v on 30 ranks is for 60 stages, the model has 55 ops", 15),
        ("zb_v", 20, "zb_v on 20 ranks is for 40 stages, but ops that share an updated buffer", 15),
        ("dualpipe", 40, "dualpipe on 40 ranks is for 40 stages, but ops that share", 30),
    ],
)
def test_who_uses_at_most_so_many_gets_a_plan(schedule: str, stages: int, why: str, most: int) -> None:
    captured = capture_of(SEEN)
    wiring = Readers(captured.graph)
    assert (len(wiring.ops), len(wiring.cut_points) - 1) == (55, 30)
    how = {"cluster": "60 x cpu", "schedule": schedule, "captured": captured, **FEW}
    with pytest.raises(PlanError, match=why) as caught:
        plan(SEEN, ranks=stages, **how)
    assert f"use at most {most} {'stages' if schedule == '1f1b' else 'ranks'}" in str(caught.value.hint)
    assert max(plan(SEEN, ranks=most, **how).placement) + 1 == most


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_no_more_are_advised_than_there_are_devices(schedule: str) -> None:
    job = zoo.job("bert")
    with pytest.raises(PlanError, match="55 ops\nhint: use at most 3 (stages|ranks)"):
        plan(job, ranks=60, cluster="3 x cpu", schedule=schedule, captured=capture_of(job), **FEW)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.9])
def test_this_machine_has_as_many_processes_as_are_asked_for(share: float) -> None:
    job = zoo.job("gpt2")
    captured = capture_of(job)
    costs = planning.estimate(captured.graph, cpu_cluster(1))["cpu"]
    how = {"captured": captured, "profiled": costs, "treatments": (), "microbatches": 4, "microbatch_size": 2}
    how["memory"] = int(max(plan(job, ranks=2, **how).peaks) * share)
    with pytest.raises(InfeasibleError) as caught:
        plan(job, ranks=2, **how)
    found = re.search(r"use (\d+) stages \(--ranks \1\)(,|$)", str(caught.value.hint))
    assert found is not None and "devices" not in str(caught.value.hint), caught.value.hint
    assert len(plan(job, ranks=int(found[1]), **how).stages) == int(found[1])


def test_more_processes_of_this_machine_have_less_memory_each() -> None:
    """Without a cap, each has its share of the machine's; more stages were tried with as much each."""
    here = make_request(ranks=2)
    there = replace(here, local=False)
    whole, of_eight, elsewhere = (
        sum(device.memory_bytes for device in devices)
        for devices in (here.cluster.devices, plan_advice._as_many(here, 8), plan_advice._as_many(there, 8))
    )
    assert of_eight <= whole and elsewhere == 4 * whole
    capped = make_request(ranks=2, memory="1GiB")
    assert [device.memory_bytes for device in plan_advice._as_many(capped, 3)] == [1 << 30] * 3

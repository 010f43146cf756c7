"""Advice where no plan fits is followed here as it is typed, and leads to a plan."""

import re
from dataclasses import replace
from math import inf

import nets
import pytest
import torch
from refusals import refused
from runs import capture_of
from torch import Tensor, nn

from pipeloom import Job, plan, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import CapturedModel, PlanRequest
from pipeloom.planner.stage_cost.tensors import Readers
from pipeloom.planning import captured_model, make_request

SIZE = 4


def request_for(cluster: str, **more: object) -> tuple[PlanRequest, CapturedModel]:
    job = nets.job("gpt2")
    how = make_request(**{"ranks": 2, "microbatches": 4, "cluster": cluster} | more)
    return how, captured_model(job, SIZE, how.cluster, captured=capture_of(job, SIZE))


def pieces_of(how: PlanRequest, model: CapturedModel) -> list[str]:
    return refused(InfeasibleError, plan_with_advice, how, model).partition("hint: ")[2].split(", or ")


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


@pytest.mark.sampled("0.9-how0-None", "0.001-how4-give")
@pytest.mark.parametrize(
    ("share", "how", "kinds"),
    [
        (0.9, {"planner": "equal"}, None),
        (0.9, {"planner": "exact", "schedule": "zb_h1"}, "give, use, let"),
        (0.9, {"planner": "pipedream"}, "give, use, use"),
        (0.9, {"treatments": ("offload",)}, None),
        (0.001, {"planner": "dawnpiper"}, "give"),
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


@pytest.mark.slow
@pytest.mark.whole_search
@pytest.mark.parametrize(
    ("cluster", "named"),
    [("a100-40 with 200KiB + v100-32 with 300KiB", "each device"), ("a100-40 + v100-32 with 1KiB", "v100")],
)
def test_devices_that_need_more_are_named(cluster: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LIMIT_S", "REFINED_S"):  # the least is found however busy the machine is
        monkeypatch.setattr(f"pipeloom.plan_advice.{limit}", inf)
    how, model = request_for(cluster)
    hint = pieces_of(how, model)[0]
    assert re.fullmatch(rf"give {named}\S* at least \S+ \S+", hint)
    enough = followed(how, hint)
    assert enough.plan(model).peaks
    if named != "each device":
        large, small = enough.cluster.devices
        tighter = replace(small, memory_bytes=int(small.memory_bytes / 1.05))
        less = replace(how, cluster=replace(how.cluster, devices=(large, tighter)))
        refused(InfeasibleError, less.plan, model, explained=False)


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
        ("1f1b", 60, "55 ops", 30),
        ("zb_v", 20, "share an updated buffer", 15),
        ("dualpipe", 40, "share an updated buffer", 30),
    ],
)
def test_who_uses_at_most_so_many_gets_a_plan(schedule: str, stages: int, why: str, most: int) -> None:
    captured = capture_of(SEEN)
    wiring = Readers(captured.graph)
    assert (len(wiring.ops), len(wiring.cut_points) - 1) == (55, 30)
    how = {"cluster": "60 x cpu", "schedule": schedule, "captured": captured, **FEW}
    said = refused(PlanError, plan, SEEN, ranks=stages, **how)
    assert why in said and f"use at most {most} {'stages' if schedule == '1f1b' else 'ranks'}" in said
    assert max(plan(SEEN, ranks=most, **how).placement) + 1 == most


def test_who_has_too_many_stages_per_rank_is_told_how_many_there_may_be() -> None:
    how = {"cluster": "10 x cpu", "captured": capture_of(SEEN), "schedule": "interleaved_1f1b", **FEW}
    said = refused(PlanError, plan, SEEN, ranks=5, chunks=7, **how)
    assert "share an updated buffer" in said and "--chunks 6" in said
    assert len(plan(SEEN, ranks=5, chunks=6, **how | {"microbatches": 5}).stages) == 30


def test_no_more_are_advised_than_there_are_devices() -> None:
    said = refused(PlanError, plan, SEEN, ranks=60, cluster="3 x cpu", captured=capture_of(SEEN), **FEW)
    assert "55 ops" in said and "use at most 3 stages" in said


@pytest.mark.slow
def test_this_machine_has_as_many_processes_as_are_asked_for() -> None:
    job = nets.job("gpt2")
    captured = capture_of(job)
    costs = planning.estimate(captured.graph, cpu_cluster(1))["cpu"]
    how = {"captured": captured, "profiled": costs, "treatments": (), "microbatches": 4, "microbatch_size": 2}
    how["memory"] = int(max(plan(job, ranks=2, **how).peaks) * 0.7)
    hint = refused(InfeasibleError, plan, job, ranks=2, **how).partition("hint: ")[2]
    found = re.search(r"use (\d+) stages \(--ranks \1\)(,|$)", hint)
    assert found is not None and "devices" not in hint, hint
    assert len(plan(job, ranks=int(found[1]), **how).stages) == int(found[1])

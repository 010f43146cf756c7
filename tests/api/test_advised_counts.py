"""Advice on numbers of stages, followed as it is typed: in ranks where a schedule puts several on each."""

import re
from dataclasses import replace

import pytest
import torch
import zoo
from runs import capture_of
from torch import Tensor, nn

from pipeloom import Job, plan, plan_advice, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.planner.stage_cost.tensors import Readers

HOW = {"microbatch_size": 2, "microbatches": 4, "planner": "balanced"}


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


@pytest.mark.parametrize(
    ("schedule", "stages", "why", "most"),
    [
        ("1f1b", 60, "60 stages for 55 ops", 32),
        ("1f1b", 40, "40 stages, but ops that share an updated buffer", 32),
        ("zb_v", 30, "zb_v on 30 ranks is for 60 stages, the model has 55 ops", 16),
        ("zb_v", 20, "zb_v on 20 ranks is for 40 stages, but ops that share an updated buffer", 16),
        ("interleaved_1f1b", 20, "20 ranks is for 40 stages, but ops that share an updated buffer", 16),
        ("dualpipe", 40, "dualpipe on 40 ranks is for 40 stages, but ops that share", 32),
    ],
)
def test_who_uses_at_most_so_many_gets_a_plan(schedule: str, stages: int, why: str, most: int) -> None:
    """The hint named 55 stages where the next refusal left 32, and 32 stages where 16 ranks would do."""
    job, cluster = SEEN, "60 x cpu"
    wiring = Readers(capture_of(job).graph)
    assert (len(wiring.ops), len(wiring.cut_points) - 1) == (55, 32)
    with pytest.raises(PlanError, match=why) as caught:
        plan(job, ranks=stages, cluster=cluster, schedule=schedule, captured=capture_of(job), **HOW)
    found = re.match(r"use at most (\d+) (stages|ranks)", str(caught.value.hint))
    assert found is not None, caught.value.hint
    advised = int(found[1])
    assert advised == most and found[2] == ("stages" if schedule == "1f1b" else "ranks")
    made = plan(job, ranks=advised, cluster=cluster, schedule=schedule, captured=capture_of(job), **HOW)
    assert max(made.placement) + 1 == advised


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_no_more_are_advised_than_there_are_devices(schedule: str) -> None:
    job = zoo.job("bert")
    with pytest.raises(PlanError, match="55 ops\nhint: use at most 3 (stages|ranks)"):
        plan(job, ranks=60, cluster="3 x cpu", schedule=schedule, captured=capture_of(job), **HOW)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, pytest.param(0.9, marks=pytest.mark.slow)])
def test_this_machine_has_as_many_processes_as_are_asked_for(share: float) -> None:
    """The hint was "use 4 stages on 4 devices", where nobody had named any."""
    job = zoo.job("gpt2")
    captured = capture_of(job)
    costs = planning.estimate(captured.graph, cpu_cluster(1))["cpu"]
    how = {"captured": captured, "profiled": costs, "treatments": (), "microbatches": 4, "microbatch_size": 2}
    free = plan(job, ranks=2, **how)
    tight = how | {"memory": int(max(free.peaks) * share)}
    with pytest.raises(InfeasibleError) as caught:
        plan(job, ranks=2, **tight)
    found = re.search(r"use (\d+) stages \(--ranks \1\)(,|$)", str(caught.value.hint))
    assert found is not None and "devices" not in str(caught.value.hint), caught.value.hint
    assert len(plan(job, ranks=int(found[1]), **tight).stages) == int(found[1])


@pytest.mark.parametrize(
    ("schedule", "local", "said"),
    [
        ("1f1b", True, "use 4 stages (--ranks 4)"),
        ("1f1b", False, "use 4 stages on 4 devices"),
        ("zb_v", True, "use 4 ranks (--ranks 4)"),
        ("zb_v", False, "use 4 ranks (--ranks 4) on 4 devices"),
    ],
)
def test_how_more_stages_are_advised(schedule: str, local: bool, said: str) -> None:
    how = replace(planning.make_request(zoo.job("gpt2"), ranks=2, schedule=schedule), local=local)
    assert plan_advice._stages_sentence(how, 4) == said


def test_more_processes_of_this_machine_have_less_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cap, each has its share of the machine's; more stages were tried with as much each."""
    job = zoo.job("gpt2")
    local = planning.make_request(job, ranks=2)
    described = replace(local, local=False)
    whole = sum(device.memory_bytes for device in local.cluster.devices)
    assert sum(device.memory_bytes for device in plan_advice._as_many(local, 8)) <= whole
    assert sum(device.memory_bytes for device in plan_advice._as_many(described, 8)) == 4 * whole
    capped = planning.make_request(job, ranks=2, memory="1GiB")
    assert [device.memory_bytes for device in plan_advice._as_many(capped, 3)] == [1 << 30] * 3

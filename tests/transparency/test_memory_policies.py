"""Any mix of kept, recomputed and offloaded residuals gives the gradients that keeping all of them gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import zoo
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from ledgers import sends_are_through_at_once
from runs import Numbers, capture_of, even, pipelined, plan_for, threads
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import MemoryPolicy, Residual, Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import cut
from pipeloom.runtime.offload.file_tier import FileCopy, FileTier
from pipeloom.runtime.transports.local_channel import LocalChannel
from pipeloom.tracer.stage.functions import Tensors
from pipeloom.tracer.stage.trace import stage_residuals
from pipeloom.verification import verify

WIDTH, ROWS = 6, 2
LAYERS = (
    "linear",
    "tanh",
    "gelu",
    "norm",
    "batch_norm",
    "dropout",
    "skip",
    "older",
    "view",
    "shared",
    "in_place",
)

SCHEDULES = [
    ("gpipe", False, (0, 1)),
    ("1f1b", False, (0, 1, 2)),
    ("1f1b", True, (0, 1)),
    ("zb_h1", True, (0, 1)),
    ("zb_v", True, (0, 1, 1, 0)),
    ("interleaved_1f1b", False, (0, 1, 0, 1)),
]


class Random(nn.Module):
    """Layers in a row; what keeps many kinds of residuals, and some that cannot be made again."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.shared = nn.Linear(WIDTH, WIDTH)
        makes = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "skip": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
        }
        self.own = nn.ModuleDict({str(i): makes[k]() for i, k in enumerate(layers) if k in makes})
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = [x]
        for i, kind in enumerate(self.layers):
            own = self.own[str(i)] if str(i) in self.own else None
            match kind:
                case "linear" | "norm" | "batch_norm":
                    x = own(x)  # type: ignore[misc]
                case "skip":
                    x = torch.tanh(x + own(x))  # type: ignore[misc]
                case "tanh":
                    x = torch.tanh(x)
                case "gelu":
                    x = nn.functional.gelu(x)
                case "dropout":
                    x = nn.functional.dropout(x, 0.3, training=self.training)
                case "older":
                    x = torch.sigmoid(x) * kept[len(kept) // 2]
                case "view":
                    x = x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH).sin()
                case "shared":
                    x = self.shared(x)
                case _:
                    x = (x * 0.5).add_(0.1).tanh_()
            kept.append(x)
        return nn.functional.cross_entropy(self.last(x), y)


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=g).double()
    return {"x": x, "y": torch.randint(3, (rows,), generator=g)}


def drawn_policy(data: st.DataObject, found: list[dict[str, Residual]]) -> MemoryPolicy:
    def treatments(residual: Residual) -> st.SearchStrategy[Treatment]:
        return st.sampled_from(["keep", "offload", *([] if residual.obstacle else ["recompute"])])

    return MemoryPolicy(
        stages=tuple(
            {name: data.draw(treatments(r), label=f"{s}/{name}") for name, r in residuals.items()}
            for s, residuals in enumerate(found)
        ),
        ahead=tuple(s for s in range(len(found)) if data.draw(st.booleans(), label=f"{s} ahead")),
    )


def assert_equal_to_the_last_bit(found: Numbers, expected: Numbers) -> None:
    assert found.losses == expected.losses
    for name in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for n, tensor in theirs.items():
            assert torch.equal(ours[n], tensor), f"{name} of {n}"


@settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=3, max_size=8).map(tuple),
    how=st.sampled_from(SCHEDULES),
    microbatches=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_random_policies(
    layers: tuple[str, ...], how: tuple[str, bool, tuple[int, ...]], microbatches: int, data: st.DataObject
) -> None:
    compare_random(layers, how, microbatches, data)


@pytest.mark.slow
@settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=3, max_size=10).map(tuple),
    how=st.sampled_from(SCHEDULES),
    microbatches=st.sampled_from([2, 4, 6]),
    data=st.data(),
)
def test_more_random_policies(
    layers: tuple[str, ...], how: tuple[str, bool, tuple[int, ...]], microbatches: int, data: st.DataObject
) -> None:
    compare_random(layers, how, microbatches, data)


def compare_random(
    layers: tuple[str, ...], how: tuple[str, bool, tuple[int, ...]], microbatches: int, data: st.DataObject
) -> None:
    schedule, split, placement = how
    job = Job(model=lambda: Random(layers).double(), batch=batch, optimizer=zoo.sgd, name="random")
    captured = capture_of(job)
    graph = captured.graph
    stage_of = even(graph, len(placement))
    stages = cut(graph, stage_of)
    if len(stages.stages) < len(placement):
        return
    plan = plan_for(
        captured, stage_of, microbatches=microbatches, schedule=schedule, split=split, placement=placement
    )
    policy = drawn_policy(data, [stage_residuals(captured, stages, s) for s in range(len(placement))])
    batches = [batch(seed, ROWS * microbatches) for seed in (1, 2)]
    expected = pipelined(job, plan, batches)
    assert_equal_to_the_last_bit(pipelined(job, replace(plan, memory=policy), batches), expected)


def all_away(job: Job, stages: int, *, ahead: tuple[int, ...] = (), **how: object) -> Plan:
    """Every second residual offloaded, every other one recomputed where it can be."""
    captured = capture_of(job)
    stage_of = even(captured.graph, stages)
    graph = cut(captured.graph, stage_of)
    policy = MemoryPolicy(
        stages=tuple(
            {
                name: "offload" if place % 2 or residual.obstacle else "recompute"
                for place, (name, residual) in enumerate(stage_residuals(captured, graph, s).items())
            }
            for s in range(stages)
        ),
        ahead=ahead,
    )
    return replace(plan_for(captured, stage_of, microbatches=4, **how), memory=policy)  # type: ignore[arg-type]


OTHERS = [name for name in (*zoo.OWN, *zoo.FAMILIES) if name != "gpt"]
FAMILIES = ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, dropout: bool) -> None:
    """One of two stages recomputes ahead of its backward, the other one inside."""
    compare_family(name, dropout, ahead=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_split_backwards(name: str, dropout: bool) -> None:
    compare_family(name, dropout, ahead=(1,), schedule="zb_h1", split=True)


def compare_family(name: str, dropout: bool, *, ahead: tuple[int, ...], **how: object) -> None:
    if dropout and name not in zoo.DROPOUT:
        return
    job = zoo.with_dropout(name) if dropout else zoo.job(name)
    plan = all_away(job, 2, ahead=ahead, **how)
    batches = [job.batch(seed, 8) for seed in (1, 2)]
    expected = pipelined(job, replace(plan, memory=MemoryPolicy()), batches)
    assert_equal_to_the_last_bit(pipelined(job, plan, batches, evaluate=batches), expected)


@pytest.mark.slow
@settings(
    max_examples=3,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize("name", ["gpt", *OTHERS])
@given(data=st.data())
def test_random_policies_of_families(name: str, data: st.DataObject) -> None:
    job = zoo.job(name)
    schedule, split, placement = data.draw(st.sampled_from(SCHEDULES))
    captured = capture_of(job)
    stage_of = even(captured.graph, len(placement))
    stages = cut(captured.graph, stage_of)
    plan = plan_for(captured, stage_of, microbatches=4, schedule=schedule, split=split, placement=placement)
    policy = drawn_policy(data, [stage_residuals(captured, stages, s) for s in range(len(placement))])
    batches = [job.batch(seed, 8) for seed in (1, 2)]
    expected = pipelined(job, plan, batches)
    assert_equal_to_the_last_bit(pipelined(job, replace(plan, memory=policy), batches), expected)


@pytest.mark.slow
def test_autocast_and_accumulation() -> None:
    job = zoo.job("gpt")
    captured = capture_of(job, 2, autocast=torch.bfloat16)
    stage_of = even(captured.graph, 2)
    graph = cut(captured.graph, stage_of)
    found = [stage_residuals(captured, graph, s) for s in range(2)]
    policy = MemoryPolicy(
        stages=tuple({n: "offload" if i % 2 else "recompute" for i, n in enumerate(f)} for f in found)
    )
    plan = plan_for(captured, stage_of, microbatches=4)
    batches = [job.batch(1, 16)]
    how = {"autocast": torch.bfloat16, "accumulate": 2, "clip_norm": 0.5}
    expected = pipelined(job, plan, batches, **how)
    assert_equal_to_the_last_bit(pipelined(job, replace(plan, memory=policy), batches, **how), expected)


def test_verify_compares_a_plan_with_a_policy() -> None:
    job = zoo.job("gpt", double=True)
    compared = verify(job, all_away(job, 2), tolerance=1e-10)
    assert compared.passed and compared.reference == "the module itself, eager"


def test_a_model_cut_between_modules_is_refused() -> None:
    job = replace(zoo.job("gpt"), model=lambda: Unexportable())
    captured = capture_of(job)
    assert captured.cut is not None
    plan = plan_for(captured, {op.name: 0 for op in captured.graph.ops}, microbatches=1)
    offloading = replace(plan, memory=MemoryPolicy(stages=({"saved.0": "offload"},)))
    with pytest.raises(PlanError, match="to offload residual saved.0 of stage 0, but this model is cut"):
        Pipeline(job, offloading)


class Unexportable(nn.Module):
    """Decides by its data, which torch.export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(zoo.VOCABULARY, 8)
        self.head = nn.Linear(8, zoo.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.tokens(input_ids)
        if float(h.detach().sum()) > 1e9:
            h = h * 2
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@pytest.fixture
def messages_are_through_at_once() -> Iterator[None]:
    with sends_are_through_at_once():
        yield


@pytest.fixture
def copies_are_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving, coming = FileTier.start_offload, FileTier.start_reload

    def start_offload(self: FileTier, action: str, residuals: Tensors) -> FileCopy:
        copy = leaving(self, action, residuals)
        copy.offloaded.wait()
        return copy

    def start_reload(self: FileTier, copy: FileCopy) -> None:
        coming(self, copy)
        copy.reloaded.wait()

    monkeypatch.setattr(FileTier, "start_offload", start_offload)
    monkeypatch.setattr(FileTier, "start_reload", start_reload)


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(n, marks=pytest.mark.slow) for n in zoo.FAMILIES)])
def test_the_peak_is_as_simulated(
    name: str, schedule: str, messages_are_through_at_once: None, copies_are_through_at_once: None
) -> None:
    job = zoo.job(name)
    plan = all_away(job, 2, schedule=schedule)

    def work(rank: int, channel: LocalChannel) -> tuple[int, int, int, int]:
        with Pipeline(job, plan, options=Options(), channel=channel) as pipeline:
            for seed in range(2):
                pipeline.step(job.batch(seed, 8))
            host = pipeline.measured().peak_bytes(rank, "host")
            assert host == pipeline.ledger.host_peak
            foreseen, ledger = pipeline.expected, pipeline.ledger
            return (sum(foreseen.peaks[rank].values()), ledger.peak, foreseen.peak_bytes(rank, "host"), host)

    for expected, measured, expected_host, host in threads(2, work):
        assert abs(expected - measured) <= 0.03 * measured
        assert expected_host == host


@pytest.mark.slow
def test_however_slow_copies_are_a_rank_holds_no_more(
    messages_are_through_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows say what has left before the next residuals come, so slower copies only take longer."""
    job = zoo.job("gpt")
    plan = all_away(job, 2, schedule="gpipe")
    write, gate = FileTier._write, threading.Event()

    def peaks(plan: Plan, seconds: float) -> list[int]:
        def slow(self: FileTier, copy: FileCopy) -> None:
            gate.wait(seconds)
            write(self, copy)

        def work(rank: int, channel: LocalChannel) -> int:
            with Pipeline(job, plan, options=Options(), channel=channel) as pipeline:
                for seed in range(2):
                    pipeline.step(job.batch(seed, 8))
                return pipeline.ledger.peak

        monkeypatch.setattr(FileTier, "_write", slow)
        return threads(2, work)

    highest = peaks(plan, 0.1)
    capped = replace(plan, caps=tuple(highest))
    for seconds in (0.0, 0.02, 0.1):
        assert all(peak <= cap for peak, cap in zip(peaks(capped, seconds), capped.caps, strict=True))

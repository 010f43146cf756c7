"""Measuring op by op: what is run, how often, on which values, and what is found to be kept."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import batches
import nets
import pytest
import torch
from runs import capture_of
from torch import nn
from torch.nn import functional as fn

from pipeloom import Device, Job, planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.compiled_profiles import pieces_of
from pipeloom.ir.errors import CaptureError, ConfigError
from pipeloom.profiler import measure_modules
from pipeloom.profiler.compiled_pieces import piece_signatures, time_piece
from pipeloom.profiler.measure_op import OpArguments, Timer
from pipeloom.profiler.measure_ops import measure
from pipeloom.profiler.roofline import roofline
from pipeloom.tracer.capture import capture

module = importlib.import_module("pipeloom.profiler.measure_ops")


class Mixed(nn.Module):
    """Two equal layers, a product of a value with itself, an attention with dropout, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = layer(h).relu()
        h = self.norm(self.frozen(h * h))
        q = h.view(len(ids), -1, 2, 4).transpose(1, 2)
        mask = torch.arange(ids.shape[1]) < 3
        h = fn.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5).sum((1, 2))
        return fn.cross_entropy(h, target)


def batch(seed: int, size: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 7, (size, 5), generator=g),
        "target": torch.randint(0, 4, (size,), generator=g),
    }


@pytest.fixture(scope="module")
def captured():
    return capture(Job(model=Mixed, batch=batch, name="mixed"), 3)


@pytest.fixture(scope="module")
def profile(captured):
    """Nothing is taken off for autograd's engine: on a busy machine it can seem slower than a small op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "autograd_overhead_s", lambda timer: 0.0)
        return measure(captured, batch=batch(0, 3), budget_s=0.01)


def by_target(captured, profile, name: str):
    return [(op, profile.costs[op.name]) for op in captured.graph.ops if f".{name}." in op.target]


def test_every_op_has_a_cost(captured, profile):
    assert profile.costs.keys() == {op.name for op in captured.graph.ops}
    assert (profile.source, profile.device, profile.graph) == ("measured", "cpu", captured.graph.fingerprint)
    assert profile.batch == ("ids[3,5]int64", "target[3]int64")
    for op, cost in by_target(captured, profile, "transpose"):
        assert op.view and (cost.forward_s, cost.input_grad_s, cost.saves) == (0.0, 0.0, ())


def test_linear_layers(captured, profile):
    (first, cost), (second, same), (frozen, fixed) = by_target(captured, profile, "linear")
    times = [(c.forward_s, c.input_grad_s, c.weight_grad_s) for c in (cost, same)]
    assert times[0] == times[1] and cost.saves == first.inputs and same.saves == second.inputs
    assert fixed.saves == () and fixed.weight_grad_s == 0.0 and fixed.input_grad_s > 0


def test_scratch_is_what_is_gone_afterwards(captured, profile):
    """cross_entropy makes log-probabilities, which it keeps, and gradients of them, which it does not."""
    ((_, cost),) = by_target(captured, profile, "cross_entropy_loss")
    logits = 3 * 4 * 4
    assert (cost.extra_saved_bytes, cost.transient_bytes) == (logits + 4, 0)
    assert cost.grad_transient_bytes == logits
    assert cost.saves == ("target",)


def test_integers_are_real_or_valid(captured):
    nodes = {n.name: n for n in captured.module.graph.nodes}
    given = batch(5, 3)
    arguments = OpArguments(captured, torch.device("cpu"), given)
    (embedding,) = [op for op in captured.graph.ops if op.target.startswith("aten.embedding")]
    made = arguments.of(nodes[embedding.name])
    assert any(torch.equal(t, given["ids"]) for t in made.values() if t.dtype == torch.int64)
    (attention,) = [op for op in captured.graph.ops if "attention" in op.target]
    masks = [t for t in arguments.of(nodes[attention.name]).values() if t.dtype == torch.bool]
    assert [m.flatten()[:5].tolist() for m in masks] == [[True, True, True, False, False]]
    blind = OpArguments(captured, torch.device("cpu"), {}).of(nodes[embedding.name])
    assert all(int(t.max()) == 0 for t in blind.values() if t.dtype == torch.int64)


def test_a_failing_op_is_named(captured, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(module, "measure_op", fail)
    with pytest.raises(CaptureError, match="of mixed fails .* no kernel"):
        measure(captured)


def test_a_slow_op_runs_no_more_often_than_it_must(captured, monkeypatch):
    """Of an op whose run takes long, one forward is watched, and timed once more. Equal ops run once."""
    calls = []
    call_node = importlib.import_module("pipeloom.profiler.measure_op").call_node

    def count(node, arguments):
        calls.append(node.name)
        return call_node(node, arguments)

    monkeypatch.setattr("pipeloom.profiler.measure_op.call_node", count)
    monkeypatch.setattr(module, "autograd_overhead_s", lambda timer: 0.0)
    ticks, threads = itertools.count(), torch.get_num_threads()
    slow = measure(captured, budget_s=10.0, clock=lambda: float(next(ticks)))
    assert torch.get_num_threads() == threads
    linears = [op.name for op, _ in by_target(captured, slow, "linear")]
    assert [name for name in calls if name in linears] == [linears[0]] * 2 + [linears[2]] * 2
    assert all(slow.costs[name].forward_s == 1.0 for name in linears)


@pytest.mark.parametrize(
    ("seconds", "taken"), [((0.3, 0.2), 0.2), ((0.02, 0.04, 0.03), 0.02), ((3e-4, 1e-4, 2e-4), 2e-4)]
)
def test_the_shortest_of_long_runs_counts_and_of_others_the_median(seconds, taken):
    """A long run may have waited for pages of its large tensors."""
    marks = itertools.chain([0.0, seconds[-1]] * (len(seconds) > 2), *([0.0, s] for s in seconds))
    timer = Timer(torch.device("cpu"), lambda: next(marks))
    assert timer(lambda: None, 0.0) == taken


# Pieces of all kinds of models can be run on made-up numbers. Nothing is compiled here.


class Ticks:
    """A clock on which everything takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def uncompiled(function: Any, **how: Any) -> Any:
    return function


@pytest.mark.sampled("gpt")
@pytest.mark.parametrize("name", nets.NAMES)
def test_pieces_of_all_families_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", uncompiled)
    captured = capture_of(nets.job(name))
    pieces = pieces_of(captured.graph)
    signatures = piece_signatures(captured, pieces)
    assert sum(len(piece.ops) for piece in pieces.stages) == sum(not op.cheap for op in captured.graph.ops)
    for index in {signature: index for index, signature in enumerate(signatures)}.values():
        times = time_piece(captured, pieces, index, Timer(torch.device("cpu"), Ticks()), budget_s=0.0)
        assert times in ((1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 1.0, 0.0))


class Steep(nn.Sequential):
    """Decides by its data, which torch.export refuses."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input if bool(input.sum() > -1e9) else -input)


def squares(model: Callable[[], nn.Module], width: int) -> Job:
    return Job(
        model=model,
        batch=lambda seed, rows: {"input": torch.full((rows, width), 0.01 * seed)},
        loss=lambda output, batch: output.square().mean(),
    )


DEVICE = Device(
    name="d", memory_bytes=1, flops_per_s={"float32": 1e10}, memory_bytes_per_s=1e11, launch_s=1e-9
)
CLUSTER = replace(cpu_cluster(1), devices=(DEVICE,))


def test_an_lstm_of_the_cpu_counts_as_products() -> None:
    """16 steps of 8 rows pass both matrices; their gradients take twice that."""
    lstm, rows = nn.LSTM(64, 128), torch.randn(16, 8, 64, requires_grad=True)
    outputs: list[torch.Tensor] = []
    kernels = measure_modules._Roofline(DEVICE)
    product_s = 2 * 16 * 8 * 4 * 128 * (64 + 128) / 1e10
    assert product_s <= kernels.once(lambda: outputs.append(lstm(rows)[0])) < 1.2 * product_s
    assert 2 * product_s <= kernels.once(outputs[0].sum().backward) < 2.4 * product_s


def test_whole_modules_take_on_a_described_device_what_their_ops_do() -> None:
    """Times by kernel, and what is kept for the backward: of a model cut between its modules, and of its
    ops."""

    def job(kind: type[nn.Sequential]) -> Job:
        def model() -> nn.Module:
            blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)]
            return kind(*blocks)

        return squares(model, 256)

    sums = []
    for kind in (Steep, nn.Sequential):
        captured = planning.capture(job(kind), 64)
        assert bool(captured.graph.fallback) == (kind is Steep)
        (profile,) = planning.estimate(captured.graph, CLUSTER, captured=captured).values()
        assert profile.source == "roofline" and profile.device == "d"
        costs = profile.costs.values()
        kept = {name for cost in costs for name in cost.saves}
        kept_bytes = sum(captured.graph.value[name].bytes for name in kept)
        forward_s, backward_s = sum(c.forward_s for c in costs), sum(c.backward_s for c in costs)
        sums.append((forward_s, backward_s, sum(c.extra_saved_bytes for c in costs) + kept_bytes))
    assert sums[0] == pytest.approx(sums[1], rel=0.1)
    with pytest.raises(ConfigError, match="modules"):
        planning.estimate(planning.capture(job(Steep), 64).graph, CLUSTER)


def test_modules_are_measured_by_the_time_of_their_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_modules, "thread_time", Ticks())
    lists = [["table"], ["layers", "frozen", "norm"]]
    captured = planning.capture(Job(model=Mixed, batch=batch, modules=lists), 3)
    costs = planning.profile(captured).costs
    assert {cost.input_grad_s + cost.weight_grad_s for cost in costs.values()} <= {0.0, 1.0}


class Masked(nn.Module):
    """The last stage makes a product with an entry of the batch again, and does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        e = self.embed(x)
        h = self.block(e * mask)
        if float(h.sum()) > 1e9:
            h = -h
        return (self.head(h.tanh()) + e).square().mean()


def test_ops_that_want_probabilities_are_measured() -> None:
    class Likely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            likely = self.layer(x).sigmoid()
            return fn.binary_cross_entropy(likely, likely.detach()) + torch.bernoulli(likely).mean()

    captured = capture(Job(model=Likely, batch=batches.normal(x=(6,))), 64)
    assert measure(captured, batch=batches.normal(x=(6,))(0, 64), budget_s=0.01).costs


def test_entries_that_an_op_does_not_read_are_not_saved_by_it() -> None:
    captured = planning.capture(Job(model=Masked, batch=batches.normal(x=(4,), mask=(4,))), 2)
    costs = planning.estimate(captured.graph, CLUSTER, captured=captured)["d"].costs
    assert "mask" in costs["embed"].saves and "mask" not in costs["head"].saves
    planning.plan(Job(model=Masked, batch=batches.normal(x=(4,), mask=(4,))), cluster="2 x a100-40")


def test_modules_of_one_text_that_run_other_kernels_have_costs_of_their_own() -> None:
    class Repeated(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(8, 8), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.layer(x).tanh()
            return x

    job = squares(lambda: Steep(*map(Repeated, (1, 1, 8, 1)), nn.Linear(8, 1)), 8)
    captured = planning.capture(job, 4)
    costs = planning.estimate(captured.graph, CLUSTER, captured=captured)["d"].costs
    once, often, again = (costs[name] for name in ("1", "2", "3"))
    assert [once.forward_s, again.forward_s] == pytest.approx([often.forward_s / 8] * 2)
    assert often.extra_saved_bytes > once.extra_saved_bytes


DROPOUT = ("gpt2", "t5")
JOBS = {name: nets.job(name) for name in (*nets.FAMILIES, "gpt", "two_encoders")} | {
    f"{name} with dropout": nets.with_dropout(name) for name in DROPOUT
}


@pytest.mark.sampled("gpt", "convnet")
@pytest.mark.parametrize("name", JOBS)
def test_the_table_keeps_what_autograd_keeps(name):
    captured = capture_of(JOBS[name])
    measured = measure(captured, batch=JOBS[name].batch(0, 2), budget_s=0.0)
    estimated = roofline(captured.graph, cpu_cluster(1).devices[0])
    assert estimated.notes == ()
    for op in captured.graph.ops:
        real, table = measured.costs[op.name], estimated.costs[op.name]
        assert set(table.saves) == set(real.saves), f"{op.name} ({op.target})"
        assert table.extra_saved_bytes == real.extra_saved_bytes, f"{op.name} ({op.target})"
        if real.weight_grad_s > 0 and not op.view:
            assert table.weight_grad_s > 0, f"{op.name} ({op.target})"

"""Residuals that are dropped and made again, bit for bit; and those that cannot be."""

from __future__ import annotations

import random
from collections import Counter

import nets
import pytest
import torch
from deep import ACTIVATION, DEPTH, GELU, ROWS, TANH, checkpoints
from memory import Allocated, allocations
from runs import Sums, capture_of, even
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import Residual, Treatment
from pipeloom.ir.stages import StageGraph, cut
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.random import call_seeded, seeded
from pipeloom.tracer.stage.functions import DiscardSink, StageFunctions, Tensors, activation_bytes
from pipeloom.tracer.stage.trace import stage_functions, stage_residuals

Policy = dict[str, Treatment]


def state_of(captured: Captured) -> dict[str, Tensor]:
    graph = captured.graph
    buffers = [b.name for b in graph.buffers if b.name not in captured.constants]
    names = [*(p.name for p in graph.parameters), *buffers]
    return captured.blueprint.materialise(0, names) | dict(captured.constants)


def one_stage(job: Job, policy: Policy, **how: bool) -> tuple[Tensor, Sums, Tensors, dict[str, int]]:
    """Loss, gradients, what was made again ahead of the backward, and sizes; of the uncut model.

    Its backward runs whole and split; both must give the same.
    """
    captured = capture_of(job)
    functions = stage_functions(
        captured, cut(captured.graph, even(captured.graph, 1)), 0, treatments=policy, **how
    )
    with torch.no_grad():
        found = []
        for split in (False, True, False, True):  # the second time without measuring
            state, sums = state_of(captured), Sums()
            outputs, residuals = functions.forward(state, job.batch(0, 2), 7)
            kept = activation_bytes(residuals)
            for name in [n for n in outputs if n.startswith("buffer:")]:
                state[name.removeprefix("buffer:")] = outputs[name]
            again = functions.recompute(state, residuals) if functions.recomputed else {}
            residuals |= again
            if split:
                _, carried = functions.backward_input(state, residuals, {functions.loss: torch.ones(())})
                assert activation_bytes(carried) == functions.carried_bytes
                functions.backward_weight(state, carried, sums)
                assert not carried
            else:
                functions.backward(state, residuals, {functions.loss: torch.ones(())}, sums)
            assert not residuals
            found.append(sums)
        for other in found[1:]:
            assert other.keys() == sums.keys()
            assert all(torch.equal(other[n], g) for n, g in sums.items()) or how.get("compiled")
    return outputs[functions.loss], sums, again, {"kept": kept} | dict(functions.peak_bytes)


def facts(job: Job) -> dict[str, Residual]:
    captured = capture_of(job)
    return stage_residuals(captured, cut(captured.graph, even(captured.graph, 1)), 0)


@pytest.mark.sampled("convnet")
@pytest.mark.parametrize("name", nets.NAMES)
def test_gradients_are_the_same_to_the_last_bit(name: str) -> None:
    job = nets.job(name)
    loss, gradients, _, _ = one_stage(job, {})
    can = [r for r in facts(job).values() if not r.obstacle]
    choose = random.Random(name)
    for share, ahead in ((0.5, True), (0.5, False), (1.0, False)):
        dropped = [r for r in can if choose.random() < share]
        found, sums, again, sizes = one_stage(job, {r.name: "recompute" for r in dropped}, ahead=ahead)
        assert {slot.name for slot in again} == ({r.name for r in dropped} if ahead else set())
        gone = sum(r.bytes for r in dropped)
        assert activation_bytes(again) == (gone if ahead else 0)
        assert sizes["kept"] == sum(r.bytes for r in facts(job).values()) - gone
        assert torch.equal(found, loss) and sums.keys() == gradients.keys()
        assert all(torch.equal(sums[n], g) for n, g in gradients.items())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.a(x)), 0.5)
        return (self.c(torch.tanh(self.b(h))) - y).square().mean()


class Seen(nn.Module):
    """Normalises by a mean of what it has seen, which every forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) * self.seen)
        self.seen.mul_(0.9).add_(h.detach().mean(0))
        return (self.b(h) - y).square().mean()


@pytest.mark.parametrize(
    ("model", "word", "name"),
    [(Dropped, "draws random numbers", "native_dropout"), (Seen, "reads buffer seen, which", "tanh")],
)
def test_what_cannot_be_made_again_is_kept(model: type[nn.Module], word: str, name: str) -> None:
    job = Job(model=model, batch=nets.vector_batch)
    found = facts(job)
    kept = [n for n, r in found.items() if word in r.obstacle]
    assert kept and all(n.startswith(name) for n in kept)
    rest: Policy = {n: "recompute" for n, r in found.items() if not r.obstacle}
    (loss, gradients, _, _), (same, sums, _, _) = one_stage(job, {}), one_stage(job, rest)
    assert torch.equal(same, loss) and all(torch.equal(sums[n], g) for n, g in gradients.items())
    with pytest.raises(PlanError, match=name):
        one_stage(job, {kept[0]: "recompute"})


def test_a_chain_ends_at_what_the_stage_receives_and_then_keeps_it() -> None:
    job = nets.job("gpt")
    captured = capture_of(job)
    graph = cut(captured.graph, even(captured.graph, 2))
    first = next(r for r in stage_residuals(captured, graph, 1).values() if r.sources)
    received = {s.removeprefix("input:") for s in first.sources if s.startswith("input:")}
    assert received
    functions = stage_functions(captured, graph, 1, treatments={first.name: "recompute"})
    assert received <= functions.kept_inputs


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_compiled_stages_recompute_too(ahead: bool) -> None:
    job = nets.job("gpt")
    everything: Policy = {name: "recompute" for name in facts(job)}
    loss, gradients, _, _ = one_stage(job, {})
    found, sums, _, _ = one_stage(job, everything, compiled=True, ahead=ahead)
    assert torch.allclose(found, loss) and sums.keys() == gradients.keys()
    assert all(torch.allclose(sums[n], g, atol=1e-6) for n, g in gradients.items())


# Random numbers of a pipeline are none of the user's.


def test_a_failing_draw_does_not_keep_the_turn() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        call_seeded(0, "call", torch.bernoulli, torch.tensor([2.0]))
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(0, "outer"):
        inner = call_seeded(0, "inner", torch.rand, 3)
        outer = torch.rand(3)
    assert torch.equal(inner, call_seeded(0, "inner", torch.rand, 3))
    assert torch.equal(outer, call_seeded(0, "outer", torch.rand, 3))


# What a backward makes again is there from its first reader to its last, and no longer.


def stages_of(job: Job, count: int) -> tuple[Captured, StageGraph]:
    captured = capture_of(job, ROWS)
    return captured, cut(captured.graph, even(captured.graph, count))


def kept_bytes(functions: StageFunctions) -> int:
    return sum(functions.residual_bytes.values())


def run(captured: Captured, functions: StageFunctions, *, split: bool) -> dict[str, Allocated]:
    """What the allocator handed out during each function's second run, which nothing measures from inside."""
    graph = captured.graph
    state = captured.blueprint.materialise(0, [p.name for p in graph.parameters])
    inputs = TANH.batch(0, ROWS) | {n: torch.ones(graph.value[n].shape) for n in functions.received}
    grads = {n: torch.ones(graph.value[n].shape) for n in (*functions.sent, functions.loss) if n is not None}
    with torch.no_grad():
        for _ in range(2):
            seen = {}
            with allocations() as seen["forward"]:  # it sees what is freed only of what it saw made
                _, residuals = functions.forward(state, inputs, 0)
            if split:
                with allocations() as seen["input_grad"]:
                    _, residuals = functions.backward_input(state, residuals, grads)
                with allocations() as seen["weight_grad"]:
                    functions.backward_weight(state, residuals, DiscardSink())
            else:
                with allocations() as seen["backward"]:
                    functions.backward(state, residuals, grads, DiscardSink())
    return seen


@pytest.mark.slow
def test_a_deep_chain_peaks_at_its_checkpoints_and_one_segment() -> None:
    captured, stages = stages_of(TANH, 1)
    residuals = stage_residuals(captured, stages, 0)
    assert [r.bytes for r in residuals.values()] == [ACTIVATION] * DEPTH
    gradients = 2  # of a layer's output and of what its tanh read
    for distance in (1, 4, DEPTH):
        policy = checkpoints(residuals, distance)
        functions = stage_functions(captured, stages, 0, treatments=policy)
        kept, segment = DEPTH // distance, distance - 1
        assert kept_bytes(functions) == kept * ACTIVATION
        predicted = functions.peak_bytes["backward"]
        assert predicted == (segment + gradients) * ACTIVATION
        seen = run(captured, functions, split=False)
        assert functions.peak_bytes["backward"] == predicted == seen["backward"].peak
    ahead = stage_functions(captured, stages, 0, treatments=policy, ahead=True)
    assert kept_bytes(ahead) + ahead.peak_bytes["backward"] == (DEPTH + gradients) * ACTIVATION


def calls(functions: StageFunctions, *names: str) -> Counter[str]:
    parts = [functions.functions[name].part for name in names]
    return Counter(str(n.target) for part in parts for n in part.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("job", [TANH, GELU], ids=["tanh", "gelu"])
def test_a_split_backward_makes_nothing_twice(job: Job) -> None:
    """What tanh makes, both read; what gelu makes, only W, and I has what gelu makes it of."""
    captured, stages = stages_of(job, 2)
    names = list(stage_residuals(captured, stages, 1))
    gelus: dict[str, Treatment] = {name: "recompute" for name in names if name.startswith("gelu")}
    policy = gelus if job is GELU else checkpoints(names, 4)
    functions = stage_functions(captured, stages, 1, treatments=policy)
    whole, first, second = (calls(functions, n) for n in ("backward", "input_grad", "weight_grad"))
    for op in ("aten.addmm.default", "aten.tanh.default", "aten.gelu.default"):
        assert whole[op] == first[op] + second[op]
    assert first["aten.tanh.default"] == (0 if job is GELU else len(policy))
    assert second["aten.gelu.default"] == len(gelus)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "distance"), [(TANH, 1), (GELU, 4)], ids=["tanh", "gelu"])
def test_i_frees_nothing_that_w_reads(job: Job, distance: int) -> None:
    captured, stages = stages_of(job, 2)
    policy = checkpoints(stage_residuals(captured, stages, 1), distance)
    functions = stage_functions(captured, stages, 1, treatments=policy)
    predicted = dict(functions.peak_bytes)
    seen = run(captured, functions, split=True)
    assert functions.peak_bytes["input_grad"] == predicted["input_grad"] == seen["input_grad"].peak
    assert functions.peak_bytes["weight_grad"] == predicted["weight_grad"] == seen["weight_grad"].peak

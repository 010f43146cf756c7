"""What a backward makes again is there from its first reader to its last, and no longer."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
import zoo
from deep import ACTIVATION, DEPTH, GELU, ROWS, TANH, checkpoints
from memory import Allocated, allocations
from runs import capture_of, even
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.stages import StageGraph, cut
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.stage.functions import Sink, StageFunctions
from pipeloom.tracer.stage.trace import stage_functions, stage_residuals


class Nowhere(Sink):
    """A sink that keeps no gradient, so that only what a backward itself holds is counted."""

    def add(self, name: str, grad: Tensor) -> None:
        pass

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        pass


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
                    functions.backward_weight(state, residuals, Nowhere())
            else:
                with allocations() as seen["backward"]:
                    functions.backward(state, residuals, grads, Nowhere())
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


class Blocks(nn.Module):
    """Eight blocks of GPT-2, 64 wide."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=zoo.VOCABULARY,
            n_positions=64,
            n_embd=64,
            n_layer=8,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


@pytest.mark.slow
def test_a_transformer_peaks_at_a_quarter() -> None:
    """What flows past the blocks is kept, every second sum of it, and nothing else that can be made again."""
    job = Job(model=Blocks, batch=partial(zoo.token_batch, length=64))
    captured = capture_of(job, 4)
    stages = cut(captured.graph, even(captured.graph, 1))
    residuals = stage_residuals(captured, stages, 0)
    sums = [name for name in residuals if re.fullmatch(r"add(_\d+)?", name)]
    dropped: dict[str, Treatment] = {
        n: "recompute" for n, r in residuals.items() if not r.obstacle and n not in sums[1::2]
    }
    kept, ahead, inside = (
        stage_functions(captured, stages, 0, treatments=policy, ahead=moment)
        for policy, moment in (({}, False), (dropped, True), (dropped, False))
    )
    everything, at_once, lazily = (kept_bytes(f) + f.peak_bytes["backward"] for f in (kept, ahead, inside))
    assert at_once == everything and lazily < everything / 4


@pytest.mark.slow
def test_what_has_one_reader_is_there_for_that_alone() -> None:
    captured, stages = stages_of(GELU, 1)
    made = {n: "recompute" for n in stage_residuals(captured, stages, 0) if n.startswith("gelu")}
    whole, inside = (stage_functions(captured, stages, 0, treatments=policy) for policy in ({}, made))
    assert kept_bytes(whole) - kept_bytes(inside) == len(made) * ACTIVATION
    assert inside.peak_bytes["backward"] <= whole.peak_bytes["backward"] + ACTIVATION


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

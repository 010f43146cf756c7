"""Each part of a stage by the planner's model against the graphs that its rank runs."""

from collections.abc import Callable
from itertools import product

import nets
import pytest
import torch
from ledgers import calm
from parts import Parts, model_of, parts_of, some_recomputed
from runs import capture_of, even
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.stages import cut

Formula = Callable[[Tensor, Tensor], Tensor]


class OfTwo(nn.Module):
    """A loss of two tensors that parameters make, which nothing else saves."""

    def __init__(self, formula: Formula, rows: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(32, 32)), nn.Parameter(torch.rand(rows, 32))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.a + x.mean(), self.b + x.mean()).mean()


def whole_stage(model: Callable[[], nn.Module]) -> Parts:
    """Of all ops of a model whose output is its loss."""
    job = Job(
        model=model, batch=lambda seed, size: {"x": torch.rand(size, 4)}, loss=lambda outputs, batch: outputs
    )
    captured = capture_of(job, 2)
    graph = captured.graph
    return parts_of(captured, model_of(graph, 1), cut(graph, even(graph, 1)), 0, {})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [32, 1])
@pytest.mark.parametrize(
    "formula",
    [
        lambda a, b: a * b,
        lambda a, b: a * b * 2.0 * (a + b),
        lambda a, b: a / b,
        lambda a, b: -b @ -a,  # what is added to a parameter's gradient at once is another test's
        lambda a, b: a @ b.mT,
        lambda a, b: (a**3) * b,
        lambda a, b: a.rsqrt() + b,
        lambda a, b: a.square() + b.exp(),
    ],
)
def test_a_backward_lets_go_of_what_it_is_done_with(formula: Formula, rows: int) -> None:
    found = whole_stage(lambda: OfTwo(formula, rows))
    assert found.residuals[0] == found.residuals[1]
    assert found.backward[0] == pytest.approx(found.backward[1], abs=4 * 32 + 8)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_next_states_of_buffers_stay_until_the_forward_ends(share: float) -> None:
    captured = capture_of(nets.job("convnet"), 2)
    stages, model = cut(captured.graph, even(captured.graph, 2)), model_of(captured.graph, 2)
    for stage in range(2):
        found = parts_of(captured, model, stages, stage, some_recomputed(model, stages, stage, share, 1))
        assert found.residuals[0] == found.residuals[1]
        assert found.forward[0] == pytest.approx(found.forward[1], abs=8)


QUICK = ("gpt",)
FAMILIES = (*QUICK, *nets.FAMILIES)


@pytest.mark.sampled(*QUICK)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_families_with_any_treatments(family: str) -> None:
    captured = capture_of(nets.job(family), 2)
    for count in (2,) if family in QUICK else (2, 3):
        stages, model = cut(captured.graph, even(captured.graph, count)), model_of(captured.graph, count)
        for stage, share in product(range(count), (0.0, 0.5, 1.0)):
            given = some_recomputed(model, stages, stage, share, stage)
            for ahead in (False, True) if given else (False,):
                found = parts_of(captured, model, stages, stage, given, ahead=ahead)
                assert abs(found.error) <= 0.03, (count, stage, share, ahead, found)


class WithBias(nn.Module):
    """Attention whose scores have a bias that learns: on a CPU it runs as separate products."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.rand(2, 4, length, 8)) for _ in range(3))
        self.bias = nn.Parameter(torch.rand(2, 4, length, length))

    def forward(self, x: Tensor) -> Tensor:
        made = [p + x.mean() for p in (self.q, self.k, self.v, self.bias)]
        return nn.functional.scaled_dot_product_attention(*made[:3], attn_mask=made[3]).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [4, 8, 32])
def test_attention_in_separate_products(length: int) -> None:
    found = whole_stage(lambda: WithBias(length))
    assert found.residuals[0] == found.residuals[1]
    query, scores = 4 * 2 * 4 * length * 8, 4 * 2 * 4 * length * length
    # The forward lets go of its operands one by one, the backward of the gradient that it is given.
    assert -8 <= found.forward[0] - found.forward[1] <= 3 * query + scores
    assert 0 <= found.backward[0] - found.backward[1] <= 2 * query


@pytest.mark.sampled(*QUICK)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_halves_of_a_backward_hold_and_hand_on(family: str) -> None:
    captured = capture_of(nets.job(family), 2)
    for count in (2,) if family in QUICK else (2, 3):
        stages, model = cut(captured.graph, calm(captured.graph, count)), model_of(captured.graph, count)
        for stage in range(count):
            found = parts_of(captured, model, stages, stage, {})
            for planned, real in (found.carried, found.ingoing, found.weights):
                assert abs(planned - real) <= 0.01 * found.whole, found

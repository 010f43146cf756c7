"""Stage-by-stage initialisation gives the bits of the constructor, and holds only what is asked for."""

import copy
from collections.abc import Callable

import pytest
import torch
import zoo
from initial import assert_bits, made
from memory import allocations
from torch import Tensor, nn


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("double", [False, True])
def test_every_model_of_the_zoo(name: str, double: bool) -> None:
    assert_bits(zoo.job(name, double=double).model)


def test_the_generator_is_left_as_it_was() -> None:
    plan = made(zoo.GPT)
    before = torch.get_rng_state()
    plan.materialise(3, ["tokens.weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_names_share_memory() -> None:
    found = made(zoo.TiedThrice).materialise(0, ["a.weight", "c.weight"])
    assert found["a.weight"].data_ptr() == found["c.weight"].data_ptr()


def test_parameters_that_are_copies_of_each_other() -> None:
    assert_bits(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2))
    assert_bits(lambda: (lambda m: nn.ModuleList([m, copy.deepcopy(m)]))(nn.Linear(4, 4)))
    assert_bits(lambda: (lambda m: nn.ModuleList([m, copy.deepcopy(m)]))(nn.BatchNorm1d(4)))

    def by_data() -> nn.Module:
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        a.weight.data = b.weight.data.clone() * 2
        b.bias.data[1:].fill_(0.5)
        return nn.ModuleList([a, b])

    assert_bits(by_data)


@pytest.mark.parametrize(
    "init",
    [
        nn.init.orthogonal_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.eye_,
        lambda w: nn.init.sparse_(w, 0.5),
        lambda w: w.data.bernoulli_(torch.full_like(w, 0.25)),
        lambda w: w.data.copy_(torch.multinomial(torch.ones(5), 5).float()),
    ],
)
def test_initialisers(init: Callable[[Tensor], object]) -> None:
    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for layer in layers:
            init(layer.weight)
        return layers

    assert_bits(build)


def test_a_constructor_that_reads_values_is_run_whole() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("order", torch.tensor(torch.randperm(4).tolist()))

    assert_bits(Reads, whole=True)


def test_peak_memory_is_what_is_asked_for_and_one_parameter() -> None:
    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
        for layer in layers:
            nn.init.normal_(layer.weight)
        return layers

    plan = made(build)
    size = 512 * 512 * 4
    wanted = [f"{i}.weight" for i in range(4, 8)]
    with allocations() as memory:
        found = plan.materialise(0, wanted)
    assert memory.end >= len(found) * size == 4 * size
    assert memory.peak <= (len(wanted) + 1) * size + 2**16, f"{memory.peak / size:.2f} parameters at once"

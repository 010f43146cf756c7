"""Constructors whose parameters came out different from one process, or needed the whole model."""

import torch
from initial import assert_bits, made
from torch import nn


def test_dtype_changed_after_construction() -> None:
    """`.double()` exchanges the data under a parameter: replaying by object gave the old dtype."""
    assert_bits(lambda: nn.Linear(4, 3).to(torch.bfloat16))
    assert_bits(lambda: nn.Sequential(nn.Linear(4, 3).half(), nn.Linear(3, 4).double()))


def test_layout_changed_after_construction() -> None:
    assert_bits(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))

    def transposed() -> nn.Module:
        layer = nn.Linear(4, 3)
        layer.weight = nn.Parameter(torch.randn(4, 3).t())
        return layer

    assert_bits(transposed)


def test_a_constructor_that_seeds() -> None:
    """A generator of its own was left advanced by the first replay, and `manual_seed` was not replayed."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            own = torch.Generator().manual_seed(5)
            self.register_buffer("fixed", torch.randn(4, 4, generator=own))
            self.register_buffer("also", torch.randn(4, 4, generator=own))
            own.manual_seed(5)
            self.register_buffer("again", torch.randn(4, generator=own))
            torch.manual_seed(11)
            self.last = nn.Linear(4, 4)

    plan = made(Features)
    assert_bits(Features)
    assert torch.equal(plan.materialise(0, ["also"])["also"], plan.materialise(1, ["also"])["also"])


def test_trunc_normal() -> None:
    """PyTorch 2.13 draws until all values are within the bounds, which no fake tensor can tell."""

    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for layer in layers:
            nn.init.trunc_normal_(layer.weight)
            nn.init.trunc_normal_(layer.bias, 0.0, 1.0, 1.5, 3.0)
        return layers

    assert_bits(build)


def test_a_model_made_on_the_meta_device_to_look_at() -> None:
    """segmentation_models_pytorch does: what draws there moves no generator on, but did in the replay."""

    def build() -> nn.Module:
        with torch.device("meta"):
            shape = nn.Linear(6, 5)
            nn.init.trunc_normal_(shape.weight)
        return nn.Linear(*reversed(shape.weight.shape))

    assert_bits(build)


def test_unneeded_draws_that_depend_on_values() -> None:
    """`bernoulli_` of a tensor ran on uninitialised probabilities, which may be outside 0 to 1."""

    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        for layer in layers:
            layer.weight.data.bernoulli_(torch.full_like(layer.weight, 0.25))
        return layers

    assert_bits(build)


def test_a_constructor_run_whole_leaves_the_generator() -> None:
    before = torch.get_rng_state()
    made(lambda: nn.Linear(int(torch.randint(2, 5, (1,)).item()), 3))
    assert torch.equal(torch.get_rng_state(), before)

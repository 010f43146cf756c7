"""Stage-by-stage initialisation gives the bits of the constructor, and holds only what is asked for."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from memory import allocations
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.blueprint import Blueprint, make_blueprint
from pipeloom.tracer.random import python_state


def made(build: Callable[[], nn.Module]) -> Blueprint:
    return make_blueprint(build, FakeTensorMode(allow_non_fake_inputs=True))


def real(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = build()
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def assert_bits(build: Callable[[], nn.Module], *, whole: bool = False) -> None:
    """Tensors that share memory do so again, and the generator is left as it was."""
    expected = real(build, 3)
    before = torch.get_rng_state()
    plan, names = made(build), list(expected)
    assert bool(plan.why_whole) == whole, plan.why_whole
    for wanted in (names, names[len(names) // 2 :], names[-1:]):
        found = plan.materialise(3, wanted)
        assert list(found) == wanted
        for name in wanted:
            assert found[name].dtype == expected[name].dtype, name
            assert found[name].stride() == expected[name].stride(), name
            assert torch.equal(found[name], expected[name]), name
            same = [n for n in wanted if expected[n].data_ptr() == expected[name].data_ptr()]
            assert same == [n for n in wanted if found[n].data_ptr() == found[name].data_ptr()], name
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", nets.NAMES)
@pytest.mark.parametrize("double", [False, True])
def test_every_model_of_the_zoo(name: str, double: bool) -> None:
    assert_bits(nets.job(name, double=double).model)


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


# Constructors that copy modules damaged the heap: see `pipeloom.tracer.blueprint`.


def _twice(module: nn.Module) -> nn.Module:
    return nn.ModuleList([module, copy.deepcopy(module)])


def tied_twice() -> nn.Module:
    pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    pair[1].weight = pair[0].weight
    return _twice(pair)


class Shares(nn.Module):
    """Buffers that share memory, one of them with something attached."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.randn(3, 4))
        self.register_buffer("row", self.whole[1])
        self.register_buffer("turned", self.whole.t())
        self.row.note = ["attached"]


def test_the_mode_is_never_copied(monkeypatch) -> None:
    def copied(self: FakeTensorMode, memo: object) -> None:
        raise AssertionError("the mode of fake tensors was copied")

    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", copied, raising=False)
    plan = made(lambda: _twice(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Shares())))
    assert not plan.why_whole
    assert len({t.fake_mode for t in [*plan.model.parameters(), *plan.model.buffers()]}) == 1


def test_copies_share_memory_where_the_originals_do() -> None:
    def build() -> nn.Module:
        both = _twice(Shares())
        both[1].row.fill_(7.0)
        return both

    assert_bits(build)
    plan = made(build)
    found = plan.materialise(0, ["0.whole", "0.row", "1.whole", "1.row", "1.turned"])
    assert found["1.row"].data_ptr() == found["1.whole"][1].data_ptr()
    assert plan.model[1].row.note == ["attached"]
    assert plan.model[1].row.note is not plan.model[0].row.note


# Constructors whose parameters came out different from one process, or needed the whole model.


def of_other_data() -> nn.Module:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    a.weight.data = b.weight.data.clone() * 2
    b.bias.data[1:].fill_(0.5)
    return nn.ModuleList([a, b])


def transposed() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).t())
    return layer


def looks_at_a_shape() -> nn.Module:
    """segmentation_models_pytorch does: what draws on the meta device moves no generator on, but did in the
    replay."""
    with torch.device("meta"):
        shape = nn.Linear(6, 5)
        nn.init.trunc_normal_(shape.weight)
    return nn.Linear(*reversed(shape.weight.shape))


def draws_by_values() -> nn.Module:
    """`bernoulli_` of a tensor that nobody needs ran on uninitialised probabilities, which may be outside 0
    to 1."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    for layer in layers:
        layer.weight.data.bernoulli_(torch.full_like(layer.weight, 0.25))
    return layers


def initialised(init: Callable[[Tensor], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for layer in layers:
            init(layer.weight)
        return layers

    return build


@pytest.mark.parametrize(
    "build",
    [
        *map(
            initialised,
            [
                nn.init.orthogonal_,
                nn.init.eye_,
                lambda w: nn.init.sparse_(w, 0.5),
                # PyTorch 2.13 draws until all values are within the bounds, which no fake tensor can tell.
                lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 0.5, 1.0),
                lambda w: w.data.copy_(torch.multinomial(torch.ones(5), 5).float()),
            ],
        ),
        of_other_data,
        lambda: _twice(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))),
        tied_twice,
        # These exchange the data under a parameter: replaying by object gave the old dtype.
        lambda: nn.Linear(4, 3).to(torch.bfloat16),
        lambda: nn.Sequential(nn.Linear(4, 3).half(), nn.Linear(3, 4).double()),
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        transposed,
        looks_at_a_shape,
        draws_by_values,
    ],
)
def test_parts_have_the_bits_of_the_constructor(build: Callable[[], nn.Module]) -> None:
    assert_bits(build)


def reads_values() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("order", torch.tensor(torch.randperm(4).tolist()))
    return layer


def has_a_gradient() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    return _twice(layer)


@pytest.mark.parametrize("kind", ["reads", "gradient", "pt", "safetensors"])
def test_what_is_run_whole(tmp_path: Path, kind: str) -> None:
    """A constructor that reads values, copies a tensor with a gradient, or loads its weights."""
    save, load = (save_file, load_file) if kind == "safetensors" else (torch.save, torch.load)
    save(nn.Linear(4, 4).state_dict(), tmp_path / "weights")

    def loads() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.load_state_dict(load(tmp_path / "weights"))
        return layer

    assert_bits({"reads": reads_values, "gradient": has_a_gradient}.get(kind, loads), whole=True)


def test_what_was_there_before_is_refused_and_left_as_it_is() -> None:
    there = nn.Linear(4, 4)
    for build in (lambda: there, lambda: nn.Sequential(there)):
        with pytest.raises(CaptureError, match="already"):
            made(build)
    assert type(there.weight) is nn.Parameter
    assert_bits(lambda: copy.deepcopy(there))


def test_a_constructor_that_seeds() -> None:
    """A generator of its own was left advanced by the first replay, and `manual_seed` was not replayed."""

    def features() -> nn.Module:
        first = nn.Linear(4, 4)
        own = torch.Generator().manual_seed(5)
        first.register_buffer("fixed", torch.randn(4, 4, generator=own))
        first.register_buffer("also", torch.randn(4, 4, generator=own))
        own.manual_seed(5)
        first.register_buffer("again", torch.randn(4, generator=own))
        torch.manual_seed(11)
        return nn.Sequential(first, nn.Linear(4, 4))

    assert_bits(features)
    assert len({float(made(features).materialise(seed, ["0.also"])["0.also"].sum()) for seed in (0, 1)}) == 1


def test_a_constructor_that_draws_by_python_or_numpy_draws_the_same_each_time() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.mul_(random.random()).add_(torch.from_numpy(np.random.rand(4, 4)))
        return layer

    before = python_state()
    first, second = made(build).materialise(3, ["weight"]), made(build).materialise(3, ["weight"])
    assert torch.equal(first["weight"], second["weight"])
    assert python_state() == before


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match="weight"):
        made(lambda: nn.LazyLinear(4))

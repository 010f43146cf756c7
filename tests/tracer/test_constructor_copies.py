"""Constructors that copy modules damaged the heap: see `pipeloom.tracer.blueprint`."""

import copy

import torch
from initial import assert_bits, made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def _twice(module: nn.Module) -> nn.Module:
    return nn.ModuleList([module, copy.deepcopy(module)])


class Shares(nn.Module):
    """Buffers that share memory, one of them with something attached."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.randn(3, 4))
        self.register_buffer("row", self.whole[1])
        self.register_buffer("turned", self.whole.t())
        self.row.note = ["attached"]


def test_the_mode_is_never_copied(monkeypatch) -> None:
    """Its copy gave back weak references that it did not own; the process died in a later test."""

    def copied(self: FakeTensorMode, memo: object) -> None:
        raise AssertionError("the mode of fake tensors was copied")

    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", copied, raising=False)
    for layer in (lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), Shares):
        plan = made(lambda layer=layer: _twice(layer()))
        assert not plan.why_whole
        assert len({t.fake_mode for t in [*plan.model.parameters(), *plan.model.buffers()]}) == 1


def test_copies_have_the_bits_of_the_constructor() -> None:
    assert_bits(lambda: _twice(nn.BatchNorm1d(4)))
    assert_bits(lambda: _twice(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))))
    assert_bits(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2))


def test_copies_share_memory_where_the_originals_do() -> None:
    def build() -> nn.Module:
        both = _twice(Shares())
        both[1].row.fill_(7.0)
        return both

    assert_bits(build)
    plan = made(build)
    names = ["0.whole", "0.row", "1.whole", "1.row", "1.turned"]
    found = plan.materialise(0, names)
    assert found["1.row"].data_ptr() == found["1.whole"][1].data_ptr()
    assert found["1.turned"].data_ptr() == found["1.whole"].data_ptr() != found["0.whole"].data_ptr()
    assert plan.model[1].row.note == ["attached"]
    assert plan.model[1].row.note is not plan.model[0].row.note


def test_tied_parameters_stay_tied_in_a_copy() -> None:
    def build() -> nn.Module:
        pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        pair[1].weight = pair[0].weight
        return _twice(pair)

    assert_bits(build)
    named: dict[str, Tensor] = dict(made(build).model.named_parameters(remove_duplicate=False))
    assert named["1.0.weight"] is named["1.1.weight"] is not named["0.0.weight"]


def test_a_tensor_with_a_gradient_is_copied_by_running_the_constructor() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer(torch.ones(1, 4)).sum().backward()
        return _twice(layer)

    assert_bits(build, whole=True)

"""Initialisation by parts against the constructor itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeloom.tracer.blueprint import Blueprint, make_blueprint


def made(build: Callable[[], nn.Module]) -> Blueprint:
    return make_blueprint(build, FakeTensorMode(allow_non_fake_inputs=True))


def real(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = build()
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def assert_bits(build: Callable[[], nn.Module], *, whole: bool = False) -> None:
    plan, expected = made(build), real(build, 3)
    assert bool(plan.why_whole) == whole, plan.why_whole
    names = list(expected)
    halves = [names, names[len(names) // 2 :], names[: len(names) // 2], names[-1:]]
    for wanted in halves:
        found = plan.materialise(3, wanted)
        assert list(found) == wanted
        for name in wanted:
            assert found[name].dtype == expected[name].dtype, name
            assert found[name].stride() == expected[name].stride(), name
            assert torch.equal(found[name], expected[name]), name

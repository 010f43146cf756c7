"""Pieces of all kinds of models can be run on made-up numbers. Nothing is compiled here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from runs import capture_of

from pipeloom.compiled_profiles import pieces_of
from pipeloom.profiler.compiled_pieces import piece_signatures, time_piece
from pipeloom.profiler.measure_op import Timer


class Ticks:
    """A clock on which everything takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def uncompiled(function: Any, **how: Any) -> Any:
    return function


@pytest.mark.sampled("gpt2", "two_encoders")
@pytest.mark.parametrize("name", zoo.NAMES)
def test_pieces_of_all_families_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", uncompiled)
    captured = capture_of(zoo.job(name))
    pieces = pieces_of(captured.graph)
    signatures = piece_signatures(captured, pieces)
    assert sum(len(piece.ops) for piece in pieces.stages) == sum(not op.cheap for op in captured.graph.ops)
    for index in {signature: index for index, signature in enumerate(signatures)}.values():
        times = time_piece(captured, pieces, index, Timer(torch.device("cpu"), Ticks()), budget_s=0.0)
        assert times.forward_s == (1.0, 1.0) and times.backward_s in ((1.0, 1.0), (0.0, 0.0))

"""Stage costs: what they hold, and what they refuse."""

from __future__ import annotations

import pytest

from pipeloom.ir.action import B, F, I, Kind, W
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.text import from_json, to_json


def cost(**more: object) -> StageCost:
    times = {"forward_s": 1.0, "backward_s": 2.5, "input_grad_s": 1.5, "weight_grad_s": 0.5}
    return StageCost(**(times | more))  # type: ignore[arg-type]


def test_seconds_by_kind() -> None:
    mine = cost(other_s={"COMPRESS": 0.25})
    assert [mine.seconds(kind) for kind in (F, B, I, W)] == [1.0, 2.5, 1.5, 0.5]
    assert [mine.seconds(Kind(letters)) for letters in ("COMPRESS", "OTHER")] == [0.25, 0.0]


def test_a_slow_device_takes_longer_and_holds_the_same() -> None:
    slow = cost(step_s=1.0, other_s={"COMPRESS": 0.25}, residual_bytes=7).slowed(2.0)
    assert [slow.seconds(k) for k in (F, B, I, W, Kind("COMPRESS"))] == [2, 5, 3, 1, 0.5]
    assert (slow.step_s, slow.residual_bytes) == (2.0, 7)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"forward_s": -1.0}, "forward_s = -1.0"),
        ({"step_s": float("nan")}, "step_s = nan"),
        ({"residual_bytes": -4}, "residual_bytes = -4.0"),
        ({"transient_bytes": {"F": -1}}, r"transient_bytes\[F\] = -1.0"),
        ({"static_bytes": {"weights": 1}}, "'weights'"),
    ],
)
def test_refuses(more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cost(**more)


def test_json_round_trip() -> None:
    mine = cost(static_bytes={"parameters": 3}, tied_bytes={"wte": 2})
    assert from_json(to_json(mine), StageCost, what="test") == mine
    assert equal_costs(3, residual_bytes=2)[2].residual_bytes == 2

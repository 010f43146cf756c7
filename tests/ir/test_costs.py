"""Stage costs: what they hold, and what they refuse."""

import pytest

from pipeloom.ir.action import STEP, B, F, I, Kind, W
from pipeloom.ir.costs import StageCost
from pipeloom.ir.errors import ConfigError


def cost(**more: object) -> StageCost:
    times = {"forward_s": 1.0, "backward_s": 2.5, "input_grad_s": 1.5, "weight_grad_s": 0.5}
    return StageCost(**(times | more))


def test_seconds_by_kind() -> None:
    stage = cost(step_s=1.0, other_s={"COMPRESS": 0.25})
    assert [stage.seconds(k) for k in (F, B, I, W, STEP, Kind("COMPRESS"))] == [1, 2.5, 1.5, 0.5, 1, 0.25]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"forward_s": -1.0}, "forward_s = -1.0"),
        ({"step_s": float("nan")}, "step_s = nan"),
        ({"residual_bytes": -4}, "residual_bytes = -4"),
        ({"transient_bytes": {"F": -1}}, r"transient_bytes\[F\] = -1"),
        ({"static_bytes": {"weights": 1}}, "'weights'"),
    ],
)
def test_refuses(more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cost(**more)

"""What bench/zero_bubble.py says splitting costs: like against like, also where rows mix B, I and W."""

from __future__ import annotations

import pytest
from backward_figures import Measured, actions_of, split_line

TWO = (("a", "b"), ("c", "d"))
FOUR = (("a",), ("b",), ("c",), ("d",))


def rounds(
    table: dict[tuple[int, str], list[float]], count: int = 3
) -> list[dict[tuple[int, str], list[float]]]:
    """The last round ten times as slow, as if something else had run beside it."""
    return [table] * (count - 1) + [{key: [10 * s for s in row] for key, row in table.items()}]


BASE = Measured(ops=TWO, microbatches=4, rounds=rounds({(s, "B"): [4.0] * 4 for s in range(2)}))
SPLIT = Measured(
    ops=TWO, microbatches=4, rounds=rounds({(s, k): [2.1] * 4 for s in range(2) for k in ("I", "W")})
)
WHOLE = {(s, "B"): [2.0] * 3 for s in range(4)}
PARTS = {(s, k): [1.1] for s in range(4) for k in ("I", "W")}
MIXED = Measured(ops=FOUR, microbatches=4, rounds=rounds(WHOLE | PARTS))
VEE = Measured(
    ops=FOUR, microbatches=4, rounds=rounds({(s, k): [1.2] * 4 for s in range(4) for k in ("I", "W")})
)
ALL = {"1f1b": BASE, "zb_h1": SPLIT, "dualpipev": MIXED, "zb_v": VEE}


def test_rows_that_mix_are_held_against_their_own_full_backwards() -> None:
    found = actions_of("dualpipev", "1f1b", ALL)
    assert found["split_over_full"] == pytest.approx(1.1)
    assert found["compared_with"] == ["dualpipev"]
    assert found["split_share"] == 0.25
    assert found["backward_s"] == pytest.approx(3 * 2.0 + 2.2)  # 4 stages x (3 B and one split of 4)
    assert found["backward_over_1f1b"] == pytest.approx(8.2 / 8.0)


def test_a_v_is_held_against_stages_like_its_own() -> None:
    assert actions_of("zb_h1", "1f1b", ALL)["split_over_full"] == pytest.approx(1.05)
    found = actions_of("zb_v", "1f1b", ALL)
    assert (found["split_over_full"], found["compared_with"]) == (pytest.approx(1.2), ["dualpipev"])


def test_what_has_no_like_is_left_out_and_named() -> None:
    some = {"1f1b": BASE, "zb_v": VEE}
    found = actions_of("zb_v", "1f1b", some)
    assert (found["split_over_full"], found["stages_left_out"]) == (None, [0, 1, 2, 3])
    assert "its stages have no like that runs B" in split_line("zb_v", found, "1f1b")
    assert actions_of("1f1b", "1f1b", some)["split_over_full"] is None

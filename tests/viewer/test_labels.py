from itertools import combinations

import numpy as np
import pytest

from pipeloom.ir.action import KINDS, ActionKind, Kind, register_kind
from pipeloom.viewer.labels import COLOURS, OTHER, colour, group_name, label


@pytest.mark.parametrize(
    ("action", "group", "short", "meaning"),
    [
        ("0F3", "F", "3", "stage 0: forward of micro-batch 3"),
        ("12W7", "W", "7", "stage 12: weight gradient of micro-batch 7"),
        ("1RECOMPUTE2", "RECOMPUTE", "2", "stage 1: recompute of micro-batch 2"),
        ("0SEND_F2>1", "SEND", "2", "stage 0 sends the outputs of micro-batch 2 to stage 1"),
        ("0RECV_B2<1", "wait", "2", "stage 0 waits for the gradients of micro-batch 2 from stage 1"),
        ("3STEP", "STEP", "", "stage 3: optimizer step"),
        ("3REDUCE", "REDUCE", "", "stage 3: sum tied gradients"),
    ],
)
def test_an_action_is_told_in_words(action: str, group: str, short: str, meaning: str) -> None:
    what = label(action)
    assert (what.action, what.group, what.short, what.meaning) == (action, group, short, meaning)


def test_text_that_is_no_instruction_is_shown_as_it_is() -> None:
    what = label("clip gradients")
    assert (what.group, what.stage, what.microbatch, what.meaning) == (
        "clip gradients",
        None,
        None,
        "clip gradients",
    )
    assert colour(what.group) == OTHER


def test_every_kind_of_computing_has_its_own_colour() -> None:
    named = [k for k in ("F", "B", "I", "W") if k in KINDS]
    assert len({COLOURS[k] for k in named}) == len(named) == 4


def test_a_registered_kind_is_drawn_with_its_meaning() -> None:
    kind = register_kind("VIEWERTEST", ActionKind(label="viewer's test"))
    try:
        assert label("0VIEWERTEST1").meaning == "stage 0: viewer's test of micro-batch 1"
        assert group_name(kind) == "viewer's test"
    finally:
        del KINDS[Kind("VIEWERTEST")]
        label.cache_clear()


def test_further_stages_of_a_rank_are_lighter() -> None:
    shades = [colour("B", shade) for shade in range(5)]
    assert sorted(shades[:4]) == shades[:4]
    assert shades[3] == shades[4]


SEEN_AS = {
    "all colours": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
"""What eyes make of linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1."""

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def lab(hex_colour: str, eyes: np.ndarray) -> np.ndarray:
    """CIELAB, where a distance of 2 can just be told apart side by side."""
    srgb = np.array([int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(eyes @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_AS)
def test_kinds_and_stages_are_told_apart_by_all_eyes(eyes: str) -> None:
    seen = {(k, n): lab(colour(k, n), np.array(SEEN_AS[eyes])) for k in "FBIW" for n in (0, 1)}
    for (one, a), (other, b) in combinations(seen.items(), 2):
        assert np.linalg.norm(a - b) > 12, f"{one} and {other} look alike with {eyes}"

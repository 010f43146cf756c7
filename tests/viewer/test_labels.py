import pytest

from pipeloom.ir.action import ActionKind, register_kind
from pipeloom.viewer.labels import COLOURS, colour, group_name, label


@pytest.mark.parametrize(
    ("action", "group", "short", "meaning"),
    [
        ("clip gradients", "clip gradients", "", "clip gradients"),
        ("0F3", "F", "3", "stage 0: forward of micro-batch 3"),
        ("12W7", "W", "7", "stage 12: weight gradient of micro-batch 7"),
        ("1RECOMPUTE2", "RECOMPUTE", "2", "stage 1: recompute of micro-batch 2"),
        ("0SEND_F2>1", "SEND", "2", "stage 0 sends the outputs of micro-batch 2 to stage 1"),
        ("0RECV_B2<1", "wait", "2", "stage 0 waits for the gradients of micro-batch 2 from stage 1"),
        ("3STEP", "STEP", "", "stage 3: optimizer step"),
        ("3REDUCE", "REDUCE", "", "stage 3: sum gradients over ranks"),
    ],
)
def test_an_action_is_told_in_words(action: str, group: str, short: str, meaning: str) -> None:
    what = label(action)
    assert (what.action, what.group, what.short, what.meaning) == (action, group, short, meaning)


def test_every_kind_of_computing_has_its_own_colour() -> None:
    assert len({COLOURS[kind] for kind in "FBIW"} | {colour("clip gradients")}) == 5


def test_a_registered_kind_is_drawn_with_its_meaning() -> None:
    kind = register_kind("VIEWERTEST", ActionKind(label="viewer's test"))
    assert label("0VIEWERTEST1").meaning == "stage 0: viewer's test of micro-batch 1"
    assert group_name(kind) == "viewer's test"


def test_further_stages_of_a_rank_are_lighter() -> None:
    shades = [colour("B", shade) for shade in range(5)]
    assert sorted(shades[:4]) == shades[:4]
    assert shades[3] == shades[4]

"""Idle time in words, and the critical path folded."""

from __future__ import annotations

import pytest

from pipeloom.ir.explanation import REASONS, Explanation, Idle, PathStep
from pipeloom.viewer.path import fold
from pipeloom.viewer.reasons import merged, sentence, sources


def idle(reason: str, start_s: float = 0.0, end_s: float = 1.0, **more: object) -> Idle:
    return Idle(rank=0, start_s=start_s, end_s=end_s, reason=reason, **more)  # type: ignore[arg-type]


WAIT = {"action": "0B5", "waits_for": "1B5", "on_rank": 1}
ROOT = {**WAIT, "root": "3B4", "root_rank": 3}


@pytest.mark.parametrize(
    ("reason", "more", "text"),
    [
        ("warm-up", {"action": "0F0"}, "rank 0 waits for its first micro-batch"),
        ("warm-up", WAIT, "rank 0 waits for its first micro-batch: 0B5 needs 1B5 of rank 1"),
        ("order", ROOT, "rank 0 waits for 1B5 of rank 1: it is late as rank 3 was busy with 3B4"),
        ("imbalance", ROOT, "was busy with 3B4, and has more work in a step"),
        ("transfer", WAIT, "rank 0 waits for 1B5 of rank 1: a message is on its way"),
        ("copy", {"action": "0B5"}, "rank 0 waits for a copy that 0B5 needs"),
        ("reduce", {"action": "0STEP"}, "rank 0 waits for other ranks and the sum over them before 0STEP"),
        ("overhead", {"action": "0B5"}, "rank 0 has all that 0B5 needs, and has not begun"),
        ("drain", {"waits_for": "1B7", "on_rank": 1}, "rank 0 is done; 1B7 of rank 1 ends last"),
        ("drain", {}, "rank 0 is done"),
    ],
)
def test_every_reason_is_a_sentence(reason: str, more: dict[str, object], text: str) -> None:
    assert text in sentence(idle(reason, **more))


def test_every_reason_has_a_sentence() -> None:
    assert all(sentence(idle(reason, **ROOT)) for reason in REASONS)


def test_sources_add_up_and_are_sorted() -> None:
    waits = (
        idle("order", 0, 1, **ROOT),
        idle("order", 1, 3, **ROOT),
        idle("order", 3, 4, **WAIT, root_rank=0),
        idle("transfer", 4, 9, **WAIT),
        idle("drain", 9, 10),
    )
    found = sources(Explanation(source="predicted", ranks=2, step_s=10.0, idle=waits, path=()))
    assert [(s.reason, s.seconds, s.share) for s in found] == [
        ("transfer", 5.0, 0.25),
        ("order", 3.0, 0.15),
        ("order", 1.0, 0.05),
        ("drain", 1.0, 0.05),
    ]
    assert found[1].text == "rank 0 waits for B of rank 1, held up by rank 3"
    assert found[2].text == "rank 0 waits for B of rank 1, whose input it made late itself"
    assert [(reason, seconds, len(own)) for reason, seconds, _, own in merged(found)] == [
        ("transfer", 5.0, 1),
        ("order", 4.0, 2),
        ("drain", 1.0, 1),
    ]


def path(*words: str) -> list[PathStep]:
    """`1F0` is the forward on rank 1; `1>2` a message; `!1B0` overhead before it."""
    found = []
    for i, word in enumerate(words):
        kind, action, to_rank = "compute", word, -1
        if ">" in word:
            kind, to_rank = "transfer", int(word[-1])
        if word.startswith("!"):
            kind, action = "overhead", word[1:]
        rank = int(action[0])
        found.append(
            PathStep(
                kind=kind,
                rank=rank,
                action=action,
                start_s=float(i),
                end_s=i + 1.0,  # type: ignore[arg-type]
                to_rank=to_rank,
            )
        )
    return found


def folded(*words: str) -> list[str]:
    return [str(f) for f in fold(path(*words))]


def test_a_way_through_stages_is_one_leg_and_repeats_are_folded() -> None:
    assert folded("0F0", "0>1", "1F0", "1>2", "2F0", "2B0", "1B0", "0B0") == [
        "F0 through stages 0…2",
        "B0 through stages 2…0",
    ]
    middle = [f"2{kind}{m}" for m in range(5) for kind in "FB"]
    assert folded("0F0", "1F0", *middle) == ["F0 through stages 0…2", "2B0 2F1, 4 times, to 2B3 2F4", "2B4"]
    assert folded("0F0", "0F1", "0B0") == ["0F0 0F1 0B0"]
    assert folded("0F0", "!0B0", "0B0") == ["0F0 overhead before 0B0 0B0"]


def test_folds_cover_the_path() -> None:
    steps = path("0F0", "0>1", "1F0", *[f"1{kind}{m}" for m in range(9) for kind in "IFW"], "1B9", "0B9")
    found = fold(steps)
    assert found[0].start_s == 0.0 and found[-1].end_s == steps[-1].end_s
    assert [a.end_s for a in found[:-1]] == [b.start_s for b in found[1:]]


def test_thousands_of_pieces_are_folded_fast() -> None:
    steps = path(*[f"{rank}F{m}" for m in range(3000) for rank in (0, 1)])
    assert [str(f) for f in fold(steps)] == ["F0 through stages 0, 1, 3000 times, to 1F2999"]
    assert fold([]) == []

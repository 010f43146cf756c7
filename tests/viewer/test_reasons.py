"""Idle time and the critical path in words."""

from __future__ import annotations

import pytest

from pipeloom.ir.explanation import REASONS, Explanation, Idle, PathStep
from pipeloom.viewer.reasons import merged, path_lines, sentence, sources


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
        kind = "transfer" if ">" in word else "overhead" if word.startswith("!") else "compute"
        action = word.removeprefix("!")
        found.append(
            PathStep(kind=kind, rank=int(action[0]), action=action, start_s=float(i), end_s=i + 1.0)  # type: ignore[arg-type]
        )
    return found


def test_a_path_is_its_kinds_and_its_ends() -> None:
    kinds, *pieces = path_lines(path("0F0", "0>1", "1F0", "!1B0"))
    assert kinds == "compute 2 (50.0 %), transfer 1 (25.0 %), overhead 1 (25.0 %)"
    assert pieces[3].endswith("overhead before 1B0 on rank 1")
    kinds, *pieces = path_lines(path(*[f"0F{m}" for m in range(100)]))
    assert [text.split()[4:][:1] for text in pieces[19:22]] == [["0F19"], [], ["0F80"]]
    assert pieces[20] == "60 more"
    assert path_lines([]) == [""]

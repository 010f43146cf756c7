"""What fuzzing shares: nouns to damage, one change anywhere in a JSON value, and what counts as an answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from random_ops import wired

from pipeloom.checks.schedules import check
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.plan import Plan, StagePlan, load_plan
from pipeloom.ir.profile import OpCost

GRAPH, _ = wired([[], [0], [1]], [2] * 3, [1] * 3, [OpCost(forward_s=1.0)] * 3)
PLAN = Plan(
    graph=GRAPH.fingerprint,
    planner="test",
    placement=(0, 1),
    schedule="1f1b",
    microbatches=2,
    caps=(10, 10),
    stages=(StagePlan(ops=("op0", "op1")), StagePlan(ops=("op2",))),
    schedule_rows=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
)
PLAIN = st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([10**9, 2**64, 1.5])

NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "", "-1", "007", "999999999", "4294967296", "9" * 30, "endless", "1_0", "٣", "²"]
).map(lambda text: "9" * 5000 if text == "endless" else text)
KINDS = st.sampled_from(
    ["F", "B", "I", "W", "f", "FOO", "SEND_F", "RECV_B", "STEP", "REDUCE", "OFFLOAD", "", "&"]
)
SCRAPS = st.sampled_from(
    [">", "<", "&", ",", " ", "\n", "\r", "\0", '"', "(", ";", ")OVERLAP_F_B", "UNSHARD"]
)
WORDS = st.builds("{}{}{}{}{}".format, NUMBERS, KINDS, NUMBERS, st.just("") | SCRAPS, st.just("") | NUMBERS)
GOOD = st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 2))
LINES = st.lists(st.one_of(GOOD, GOOD, GOOD, WORDS, st.text(max_size=8)), max_size=8).map(" ".join)


def json_values(words: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        PLAIN | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )


def changed(draw: st.DrawFn, at: Any, words: st.SearchStrategy[str]) -> Any:
    """One thing somewhere in a JSON value becomes something else, goes, or comes twice."""
    if isinstance(at, dict) and at and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(at)))
        if draw(st.integers(0, 7)) == 0:
            return {k: v for k, v in at.items() if k != key}
        return {**at, key: changed(draw, at[key], words)}
    if isinstance(at, list) and at and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(at) - 1))
        what = draw(st.sampled_from(["change", "change", "drop", "twice"]))
        middle = {"change": [changed(draw, at[index], words)], "drop": [], "twice": [at[index]] * 2}
        return at[:index] + middle[what] + at[index + 1 :]
    return draw(json_values(words))


def ours(read: Callable[[], Any]) -> Any:
    """What is read, or None for an error of ours that says what to do."""
    try:
        return read()
    except PipeloomError as error:
        assert error.message and error.hint, error
        assert len(str(error)) < 4000
        return None


def read_plan(folder: Path) -> None:
    """As commands do, and held against the graph that it is for."""
    plan = ours(lambda: load_plan(folder / "plan.json"))
    if plan is not None:
        schedule = ours(lambda: plan.as_schedule)
        cut = ours(lambda: plan.replicated(plan.stage_graph(GRAPH)))
        if schedule is not None and cut is not None:
            ours(lambda: check(schedule, cut))

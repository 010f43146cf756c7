"""Random text into everything that reads text: a noun comes back, or one of our errors with a hint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pipeloom.checks import check, check_program
from pipeloom.ir import codec
from pipeloom.ir.action import parse_action, parse_actions, parse_instruction
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.graph import Op, OpGraph, Value
from pipeloom.ir.plan import Plan, StagePlan, load_plan
from pipeloom.ir.schedule import Schedule, parse_pairs, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules.formats import parse_schedule, read_schedule

CALM = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=CALM)
LONG = settings(max_examples=5_000, deadline=None, suppress_health_check=CALM)

NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "", "-1", "007", "999999999", "4294967296", "9" * 30, "endless", "1_0", "٣", "²"]
).map(lambda text: "9" * 5000 if text == "endless" else text)
KINDS = st.sampled_from(
    ["F", "B", "I", "W", "f", "FOO", "SEND_F", "RECV_B", "STEP", "REDUCE", "OFFLOAD", "", "&"]
)
SCRAPS = st.sampled_from(
    [">", "<", "&", ",", " ", "\n", "\r", "\0", '"', "(", ";", ")OVERLAP_F_B", "UNSHARD"]
)
WORDS = st.builds(
    lambda *parts: "".join(parts),
    NUMBERS,
    KINDS,
    NUMBERS,
    st.one_of(st.just(""), SCRAPS),
    st.one_of(st.just(""), NUMBERS),
)
GOOD = st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 2))
LINES = st.lists(st.one_of(GOOD, GOOD, GOOD, WORDS, st.text(max_size=8)), max_size=8).map(" ".join)
TEXTS = st.one_of(
    st.text(max_size=60),
    WORDS,
    st.lists(LINES, max_size=4).map("\n".join),
    st.lists(st.lists(st.one_of(GOOD, GOOD, WORDS), max_size=6).map(",".join), max_size=4).map("\n".join),
    st.lists(SCRAPS | GOOD, max_size=12).map("".join),
)


def ours(read: Callable[[], Any]) -> Any:
    """What is read, or None for an error of ours that says what to do."""
    try:
        return read()
    except PipeloomError as error:
        assert error.message and error.hint, error
        assert len(str(error)) < 4000
        return None


def actions(text: str) -> None:
    for read in (parse_action, parse_instruction):
        found = ours(lambda read=read: read(text))  # type: ignore[misc]
        assert found is None or str(found) == text
    pair = ours(lambda: parse_actions(text))
    assert pair is None or "&".join(map(str, pair)) == text


def rows(text: str) -> None:
    lines = tuple(text.splitlines())
    found = ours(lambda: parse_rows(lines))
    if found is None:
        return
    pairs = parse_pairs(lines)
    made = ours(lambda: Schedule(name="text", microbatches=3, placement=(0, 1, 0), rows=found, pairs=pairs))
    if made is not None:
        assert parse_rows(tuple(str(made).split("\n"))) == tuple(found)
        ours(lambda: check(made, chain(3)))


def program(text: str) -> None:
    found = ours(lambda: parse_program(2, (0, 1), tuple(text.splitlines())))
    if found is not None:
        ours(lambda: check_program(found, chain(2)))


def csv(text: str) -> None:
    found = ours(lambda: parse_schedule(text))
    if found is not None and found.stages < 100:
        ours(lambda: check(found, chain(found.stages)))


def cluster(text: str) -> None:
    ours(lambda: codec.from_json(text, Cluster, what="cluster.json"))


READERS = (actions, rows, program, csv, cluster)


@pytest.mark.parametrize("read", READERS)
@QUICK
@given(text=TEXTS)
def test_texts(read: Callable[[str], None], text: str) -> None:
    read(text)


@pytest.mark.slow
@pytest.mark.parametrize("read", READERS)
@LONG
@given(text=TEXTS)
def test_many_texts(read: Callable[[str], None], text: str) -> None:
    read(text)


@QUICK
@given(content=st.binary(max_size=40) | TEXTS.map(lambda text: text.encode(errors="surrogatepass")))
def test_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    ours(lambda: read_schedule(file))
    ours(lambda: load_plan(file))
    ours(lambda: codec.load(file, Cluster))


VALUES = tuple(Value(name=f"v{i}", shape=(2,), dtype="float32", needs_grad=True) for i in range(3))
GRAPH = OpGraph(
    name="model",
    inputs=(Value(name="x", shape=(2,), dtype="float32"),),
    parameters=(),
    buffers=(),
    loss="v2",
    ops=tuple(
        Op(name=f"op{i}", target="aten", inputs=("x",) if i == 0 else (f"v{i - 1}",), outputs=(VALUES[i],))
        for i in range(3)
    ),
)
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
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([10**9, 2**64, 1.5]) | LINES | GOOD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def changed(draw: st.DrawFn, at: Any) -> Any:
    """One thing somewhere in a JSON value becomes something else, goes, or comes twice."""
    if isinstance(at, dict) and at and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(at)))
        if draw(st.integers(0, 7)) == 0:
            return {k: v for k, v in at.items() if k != key}
        return {**at, key: changed(draw, at[key])}
    if isinstance(at, list) and at and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(at) - 1))
        what = draw(st.sampled_from(["change", "change", "drop", "twice"]))
        middle = {"change": [changed(draw, at[index])], "drop": [], "twice": [at[index]] * 2}
        return at[:index] + middle[what] + at[index + 1 :]
    return draw(JSON)


@st.composite
def plans(draw: st.DrawFn) -> str:
    plain = json.loads(codec.to_json(PLAN))
    for _ in range(draw(st.integers(1, 3))):
        plain = changed(draw, plain)
    return json.dumps(plain)


def plan_is_read_or_refused(file: Path, text: str) -> None:
    file.write_text(text)
    plan = ours(lambda: load_plan(file))
    if plan is None:
        return
    schedule = ours(lambda: plan.as_schedule)
    cut = ours(lambda: plan.replicated(plan.stage_graph(GRAPH)))
    if schedule is not None and cut is not None:
        ours(lambda: check(schedule, cut))


@QUICK
@given(text=plans())
def test_changed_plans(tmp_path: Path, text: str) -> None:
    plan_is_read_or_refused(tmp_path / "plan.json", text)


@pytest.mark.slow
@LONG
@given(text=plans())
def test_many_changed_plans(tmp_path: Path, text: str) -> None:
    plan_is_read_or_refused(tmp_path / "plan.json", text)


def test_the_plan_as_it_is() -> None:
    check(PLAN.as_schedule, PLAN.stage_graph(GRAPH))

"""Random text into everything that reads text: a noun comes back, or one of our errors with a hint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from damage import PLAN, changed, ours, read_plan
from hypothesis import HealthCheck, given, strategies as st
from trials import examples

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import parse_action, parse_actions
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.plan import load_plan
from pipeloom.ir.schedule import Schedule, parse_pairs, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.text import from_json, load_noun, to_json
from pipeloom.schedules.formats import parse_schedule, read_schedule

CALM = [HealthCheck.function_scoped_fixture]


SOME = examples(60, 1_500, suppress_health_check=CALM)

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


TEXTS = st.one_of(
    st.text(max_size=60),
    WORDS,
    st.lists(LINES, max_size=4).map("\n".join),
    st.lists(st.lists(st.one_of(GOOD, GOOD, WORDS), max_size=6).map(",".join), max_size=4).map("\n".join),
    st.lists(SCRAPS | GOOD, max_size=12).map("".join),
)


def actions(text: str) -> None:
    for read in (parse_action, partial(parse_action, in_program=True)):
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
    ours(lambda: from_json(text, Cluster, what="cluster.json"))


@SOME
@given(content=st.binary(max_size=40) | TEXTS.map(lambda text: text.encode(errors="surrogatepass")))
def test_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    ours(lambda: read_schedule(file))
    ours(lambda: load_plan(file))
    ours(lambda: load_noun(file, Cluster))


SCALARS = LINES | GOOD


@st.composite
def plans(draw: st.DrawFn) -> str:
    plain = json.loads(to_json(PLAN))
    for _ in range(draw(st.integers(1, 3))):
        plain = changed(draw, plain, SCALARS)
    return json.dumps(plain)


def plan(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(text)
        read_plan(Path(folder))


READERS = [*((read, TEXTS) for read in (actions, rows, program, csv, cluster)), (plan, plans())]


@pytest.mark.parametrize(("read", "texts"), READERS)
@SOME
@given(data=st.data())
def test_texts(read: Callable[[str], None], texts: st.SearchStrategy[str], data: st.DataObject) -> None:
    read(data.draw(texts))

"""Random text into everything that reads text: a noun comes back, or one of our errors with a hint."""

from collections.abc import Callable
from functools import partial

import pytest
from damage import GOOD, LINES, SCRAPS, WORDS, ours
from hypothesis import given, strategies as st
from trials import examples

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import parse_action, parse_actions
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.schedule import Schedule, parse_pairs, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.text import from_json
from pipeloom.schedules.formats import parse_schedule

SOME = examples(60, 1_500)

TEXTS = st.one_of(
    st.text(max_size=60),
    WORDS,
    st.lists(LINES, max_size=4).map("\n".join),
    st.lists(st.lists(st.one_of(GOOD, GOOD, WORDS), max_size=6).map(",".join), max_size=4).map("\n".join),
    st.lists(SCRAPS | GOOD, max_size=12).map("".join),
)


def actions(text: str) -> None:
    for read in (parse_action, partial(parse_action, in_program=True)):
        found = ours(lambda read=read: read(text))
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


@pytest.mark.parametrize("read", [actions, rows, program, csv, cluster])
@SOME
@given(text=TEXTS)
def test_texts(read: Callable[[str], None], text: str) -> None:
    read(text)

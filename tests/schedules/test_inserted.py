"""Operations that a user declares: placed, checked, simulated, drawn and read like built-in ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from refusals import refused
from small import built, by_hand, simulated
from trials import examples

from pipeloom.checks.schedules import check
from pipeloom.ir.action import KINDS, Action, ActionKind, B, F, Kind, W, register_kind
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ConfigError, DeadlockError, ScheduleError
from pipeloom.ir.operation import OPERATIONS, Operation, declare
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.schedules import registry
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose import make, order
from pipeloom.schedules.registry import shape_of
from pipeloom.schedules.scenario import Scenario, causes_of, simulate_rows
from pipeloom.viewer.labels import label

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_schedule.py"


def op(letters: str = "OP", **fields: object) -> Operation:
    fields = {"after": B} | fields if "before" not in fields else fields
    return declare(Operation(letters=letters, meaning="an operation", **fields))  # type: ignore[arg-type]


def one_f_one_b(s: Shape, *insert: Operation) -> Recipe:
    return Recipe(
        priority=lambda a: (a.kind == F, a.microbatch), in_flight=lambda r: s.ranks - r, insert=insert
    )


def zb_h1(s: Shape, *insert: Operation) -> Recipe:
    rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
    return Recipe(kinds="FIW", rows=rows, memory=s.ranks, insert=insert)


def schedule_of(s: Shape, recipe: Recipe) -> Schedule:
    outcome = make(s, recipe)
    rows, pairs = outcome.rows, outcome.pairs
    made = Schedule(name="", microbatches=s.microbatches, placement=s.placement, rows=rows, pairs=pairs)
    check(made, s.stages)
    return made


def timed(made: Schedule, s: Shape) -> Timeline:
    return simulated(made, s.costs, s.stages)


def test_an_operation_goes_right_after_its_anchor() -> None:
    s = shape_of(2, microbatches=2)
    made = str(schedule_of(s, one_f_one_b(s, op(seconds=0.5))))
    assert made == "0F0 0F1 0B0 0OP0 0B1 0OP1\n1F0 1B0 1OP0 1F1 1B1 1OP1"
    rows = parse_rows(("0F0 0F1 0B0 0B1 0OP0 0OP1",))  # or where the rows have it
    assert make(shape_of(1, microbatches=2), Recipe(rows=rows, insert=(op(seconds=0.5),))).rows == rows


@pytest.mark.parametrize("anchor", [F, B, W])
@pytest.mark.parametrize("split", [True, False])
def test_the_list_scheduler_knows_its_time(anchor: Kind, split: bool) -> None:
    s, added = shape_of(3, microbatches=5), op(after=anchor, share=0.5)
    recipe = zb_h1(s, added) if split else one_f_one_b(s, added)
    step_s = timed(schedule_of(s, recipe), s).step_s
    assert step_s == make(s, recipe).step_s
    assert step_s > timed(schedule_of(s, replace(recipe, insert=())), s).step_s


def test_before_every_kth_and_on_some_ranks() -> None:
    s = shape_of(2, microbatches=4)
    added = op(before=F, every=2, ranks=lambda rank: rank == 1, seconds=1)
    first, second = str(schedule_of(s, one_f_one_b(s, added))).splitlines()
    assert "OP" not in first
    assert second == "1OP0 1F0 1B0 1F1 1B1 1OP2 1F2 1B2 1F3 1B3"


def test_what_runs_beside_computing_takes_no_time_of_the_rank() -> None:
    """A prefetch one forward ahead on the host stream: only the first forward has to wait."""
    s = shape_of(1, microbatches=3)
    added = op("FETCHED", before=F, ahead=1, stream="host", seconds=1)
    made = schedule_of(s, one_f_one_b(s, added))
    assert str(made) == "0FETCHED0 0FETCHED1 0F0 0B0 0FETCHED2 0F1 0B1 0F2 0B2"
    timeline = timed(made, s)
    host = [(e.action, e.start_s) for e in timeline.events if e.stream == "host"]
    assert host == [("0FETCHED0", 0), ("0FETCHED1", 1), ("0FETCHED2", 4)]
    assert timeline.step_s == 1 + 3 * 3


def test_the_end_of_a_step_waits_for_what_still_runs() -> None:
    s = shape_of(1, microbatches=2)
    made = schedule_of(s, one_f_one_b(s, op(stream="send", seconds=4)))
    timeline = timed(made, s)
    assert [(e.start_s, e.end_s) for e in timeline.events if e.stream == "send"] == [(3, 7), (7, 11)]
    step = next(e for e in timeline.events if e.action == "0STEP")
    assert step.start_s == 11


def test_bytes_are_simulated_and_limited() -> None:
    """A buffer of 300 beside residuals of 1000: 3500 bytes leave room for three micro-batches."""
    added = op(after=F, acquires_bytes=300, releases_bytes=300, seconds=1)
    s = replace(shape_of(4, microbatches=8), costs=equal_costs(4, residual_bytes=1000))
    made = schedule_of(s, replace(one_f_one_b(s, added), in_flight=None, memory_bytes=lambda rank: 3500))
    assert max(p["residuals"] for p in timed(made, s).peaks) == 3300
    away = op("AWAY", after=F, releases_bytes=1000)
    back = op("BACK", before=B, acquires_bytes=1000)
    moved = schedule_of(s, one_f_one_b(s, away, back))
    assert max(p["residuals"] for p in timed(moved, s).peaks) == 1000


@pytest.mark.parametrize("field", ["seconds", "acquires_bytes", "releases_bytes"])
def test_amounts_by_stage_that_cannot_be_are_refused(field: str) -> None:
    op("BELOW", **{field: lambda stage: -stage})
    with pytest.raises(ScheduleError, match=f"{field} of stage 1 = -1"):
        simulated(by_hand("0F0 0B0 0BELOW0", "1F0 1B0 1BELOW0"))


def test_it_may_fill_gaps_like_w() -> None:
    s = shape_of(4, microbatches=8)
    recipe = one_f_one_b(s, op(after=F, seconds=1))
    filled, beside = (timed(schedule_of(s, replace(recipe, fill=f)), s).step_s for f in (("OP",), ()))
    assert filled < beside
    with pytest.raises(ScheduleError, match="cannot fill gaps"):
        make(s, replace(recipe, insert=(op("OPB", before=F),), fill=("W", "OPB")))


@pytest.mark.parametrize(
    ("line", "hint"),
    [("0F0 0OP0 0B0", "move 0B0 in front of 0OP0"), ("0F0 0B0 0OP0 0F1 0B1", "add it after 0B1")],
)
def test_wrong_rows_are_refused(line: str, hint: str) -> None:
    op()
    assert hint in refused(ScheduleError, check, by_hand(line), chain(1))


def both(stage: int) -> tuple[int, ...]:
    return (1 - stage,)


def test_what_meets_starts_together_once_the_streams_of_all_are_free() -> None:
    s = shape_of(2, microbatches=1)
    made = schedule_of(s, one_f_one_b(s, op(seconds=1, meets=both)))
    starts = {e.action: e.start_s for e in timed(made, s).events}
    assert starts["0OP0"] == starts["1OP0"] == 6  # rank 1 is done with B at 4, rank 0 at 6
    op("LONG", after=F, stages=lambda stage: stage == 0, stream="send", seconds=10)
    op("MET", after=F, stream="send", seconds=1, meets=both)
    made = by_hand("0F0 0LONG0 0MET0 0B0", "1F0 1MET0 1B0")
    starts = {e.action: e.start_s for e in simulated(made).events}
    assert starts["0MET0"] == starts["1MET0"] == 11  # rank 0 sends something else from 1 to 11


def test_a_meeting_that_blocks_is_named() -> None:
    op(after=F, meets=both)
    stuck = by_hand("0F0 0OP0 0F1 0OP1 0B0 0B1", "1F0 1F1 1OP1 1OP0 1B0 1B1")
    with pytest.raises(DeadlockError, match="rank 0 at 0OP0 needs 1OP0; rank 1 at 1F1 needs 0F1"):
        check(stuck, chain(2))
    op("LONE", after=F, meets=lambda stage: (5,))
    with pytest.raises(ScheduleError, match="5LONE0, which no rank runs"):
        check(by_hand("0F0 0LONE0 0B0"), chain(1))


def test_text_drawing_and_a_second_declaration() -> None:
    added = op("COMPRESS", after=W)
    assert KINDS[added.kind].after == "I"
    assert parse_rows(("2COMPRESS5",)) == ((Action(2, added.kind, 5),),)
    assert label("2COMPRESS5").meaning == "stage 2: an operation of micro-batch 5"
    assert declare(replace(added, seconds=2)).seconds == 2
    bare = register_kind("BARE", ActionKind(label="only letters", after=F))  # `declare` builds on it
    assert bare == "BARE"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"after": None}, "nowhere"),
        ({"after": B, "before": F}, "after B and before F"),
        ({"after": "REDUCE"}, "after REDUCE"),
        ({"stream": "disk"}, "'disk'"),
        ({"every": 0}, "every 0"),
        ({"ahead": 1}, "1 ahead"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        ({"acquires_bytes": float("inf")}, "acquires_bytes = inf"),
        ({"letters": "op1"}, "capitals"),
        ({"letters": "SEND_F"}, "already taken"),
        ({"letters": "TAKEN", "meaning": "something else"}, "already taken"),
    ],
)
def test_wrong_declarations(fields: dict[str, object], problem: str) -> None:
    op("TAKEN")
    with pytest.raises(ScheduleError, match=problem):
        declare(Operation(**({"letters": "OP", "meaning": "", "after": B} | fields)))  # type: ignore[arg-type]


OWN = """
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.registry import Entry

def order(s):
    return Recipe(priority=lambda a: (a.kind == 'F', a.microbatch % s.option('k', 1)))

def wrong(s):
    return 3

two = Entry(recipe=order, place='loop')
class NoFunction: pass
def none(): pass
"""


def test_a_file_of_ones_own_is_a_schedule_like_any_other(tmp_path: Path) -> None:
    name = f"{EXAMPLE}:compressed"
    made = built(name, 3, 4)
    assert made.name == name and sum(a.kind == "COMPRESS" for row in made.rows for a in row) == 12
    file = tmp_path / "mine_in_test.py"
    file.write_text(OWN)
    assert registry.default_placement(f"{file}:two", 2)[1] == (0, 1, 0, 1)
    built(f"{file}:order:k=2", 2, 2)
    for function, problem in {
        f"{file}:ordre": "has no ordre",
        f"{file}:wrong": "an int",
        f"{file}:NoFunction": "not a function of one Shape",
        f"{file}:none": "not a function of one Shape",
        f"{file}:": "not a schedule",
    }.items():
        with pytest.raises(ScheduleError, match=problem):
            built(function, 2, 2)
    with pytest.raises(ConfigError, match="no file nowhere"):
        built("nowhere.py:order", 2, 2)


@examples(20, 60)
@given(data=st.data())
def test_any_declaration_gives_a_schedule_that_runs(data: st.DataObject) -> None:
    """Any anchor, stream and rhythm."""
    before = data.draw(st.booleans())
    anchor = data.draw(st.sampled_from([F, B, W]))
    added = op(
        **{"before" if before else "after": anchor},
        ahead=data.draw(st.integers(0, 2)) if before else 0,
        every=data.draw(st.integers(1, 3)),
        stream=data.draw(st.sampled_from(["compute", "send", "host"])),
        seconds=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
    )
    try:
        s = shape_of(data.draw(st.integers(1, 3)), microbatches=data.draw(st.integers(1, 5)))
        make_it = zb_h1 if data.draw(st.booleans()) else one_f_one_b
        assert timed(schedule_of(s, make_it(s, added)), s).step_s > 0
    finally:
        KINDS.pop(added.kind, None)
        OPERATIONS.pop(added.kind, None)


def test_an_action_is_caused_by_the_operation_beside_computing_that_it_waits_for() -> None:
    fetch = op("FETCH", before=B, seconds=1.5, stream="host")
    made = order(shape_of(1, microbatches=1), one_f_one_b(shape_of(1, microbatches=1), fetch))
    causes = causes_of(simulate_rows(made, Scenario(ranks=1)))
    path = [causes.path(item, item.end_s) for item in map(causes.find, ("0B0", "0FETCH0"))]
    assert [[piece.action for piece in pieces] for pieces in path] == [
        ["0B0", "0FETCH0", "0F0"],
        ["0FETCH0", "0F0"],
    ]

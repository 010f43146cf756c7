"""`pipeloom schedule search` and what it writes: schedules in the language, rows, figures."""

import random
from pathlib import Path

import pytest
from commands import bad, figures, good

from pipeloom import search_schedule
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.schedules.language.patterns import repeating
from pipeloom.schedules.search.moments import written
from pipeloom.schedules.search.orders import Repeating
from pipeloom.schedules.search.problem import SearchProblem, SearchStage
from pipeloom.schedules.search.search_schedule import turn_of

STAGE = "[[stage]]\nF = 1\nB = 3\nbytes = 1\n"

SPLIT = "[[stage]]\nF = 1\nI = 1.5\nW = 1.5\nbytes = 1\n"

STAGES = [STAGE, pytest.param(SPLIT, marks=pytest.mark.slow)]
TIMES = ("-p", 3, "-F", 1, "-I", 1.5, "-W", 1.5)


def chain(folder: Path, stage: str, ranks: int) -> Path:
    file = folder / "stages.toml"
    file.write_text("".join(f"{stage}ranks = {rank}\n" for rank in range(ranks)))
    return file


def trains_as_one_process(schedule: str) -> None:
    words = ("--ranks", 3, "--microbatches", 4, "-s", schedule)
    assert "equal within" in good("verify", "mine.py:job", *words)


def test_check_takes_what_a_search_wrote(folder: Path) -> None:
    file = chain(folder, SPLIT, 2)
    good("schedule", "search", file, "-m", "4", "--memory", "2", "--time-limit", "0", "-o", "checked.py")
    check = ("schedule", "check", "checked.py:found", "-p", "2")
    assert "42 actions on 2 ranks are complete" in good(*check, "-m", "7")
    assert figures(*check, "-m", "7")["microbatches"] == 7
    assert "2 ranks, not 4" in bad(1, *check[:3])
    assert "not a schedule" in bad(1, "schedule", "check", "checked.py")
    assert "--replicas and --operations" in bad(2, *check, "--replicas", "2")
    Path("edited.py").write_text(Path("checked.py").read_text().replace("1F 1I", "1I 1F"))
    assert "no rank can move" in bad(1, "schedule", "check", "edited.py:found", "-p", "2")
    Path("rows.txt").write_text("0F0 0B0\n")
    assert "-p and -m" in bad(2, "schedule", "check", "rows.txt", "-p", "2", "-m", "4")
    file.write_text(file.read_text().replace("bytes =", "# bytes ="))
    assert "no stage has any" in bad(2, "schedule", "search", file, "-m", "4", "--memory", "2")


@pytest.mark.parametrize("stage", STAGES, ids=["whole", "split"])
def test_a_found_schedule_is_one_of_your_own(folder: Path, stage: str) -> None:
    """It is shown for other micro-batches, its rows pass `check`, and trains as one process does."""
    found = folder / f"found_{len(stage)}.py"
    command = ("schedule", "search", chain(folder, stage, 3), "-m", 8, "--memory", 3, "-o", found)
    result, name = figures(*command), f"{found}:found"
    shown = figures("schedule", "show", name, "-m", 8, *TIMES)
    assert shown["step_s"] == pytest.approx(result["repeating_step_s"]) and shown["peak"] <= 3
    good("schedule", "export", name, "-m", 5, "-o", "rows.txt", *TIMES)
    assert "cannot block" in good("schedule", "check", "rows.txt")
    trains_as_one_process(name)


def test_rows_of_a_graph_with_a_stage_on_all_ranks(tmp_path: Path) -> None:
    towers = "".join(
        f'{STAGE}name = "{n}"\nafter = []\nranks = {r}\n' for r, n in enumerate(("image", "text"))
    )
    joint = '[[stage]]\nname = "loss"\nF = 1\nB = 1\nafter = ["image", "text"]\nranks = [0, 1]\n'
    (tmp_path / "towers.toml").write_text(f"transfer = 0.5\n{towers}{joint}")
    rows, code = tmp_path / "found.txt", tmp_path / "found_towers.py"
    command = ("schedule", "search", tmp_path / "towers.toml", "-m", 6, "--memory", "2,3", "--effort", 0.2)
    output = good(*command, "-o", rows)
    assert "gap" in output and len(rows.read_text().splitlines()) == 2
    good(*command, "-o", code)
    shown = figures("schedule", "show", f"{code}:found", "-p", 2, "-m", 4)
    assert shown["stages"] == 4  # the loss has a shard on each rank
    assert "is for 2 ranks, not 3" in bad(1, "schedule", "show", f"{code}:found", "-p", 3, "-m", 4)


OPERATIONS = """
from pipeloom.ir.action import W
from pipeloom.ir.operation import Operation, declare

PRESS = declare(
    Operation(letters="PRESS", meaning="compression", after=W, seconds=0.25, stages=lambda s: s < 2)
)
"""


@pytest.mark.parametrize("stage", STAGES, ids=["whole", "split"])
def test_an_operation_of_your_own_is_placed(folder: Path, stage: str) -> None:
    mine, found = folder / f"press_{len(stage)}.py", folder / f"found_press_{len(stage)}.py"
    mine.write_text(OPERATIONS)
    command = ["schedule", "search", chain(folder, stage, 3), "-m", 6, "--operations", mine]
    result = figures(*command, "-o", found, "--effort", 0.3)
    assert result["step_s"] >= result["bound_s"] - 1e-9
    assert [row.count("PRESS") for row in result["rows"]] == [6, 6, 0]
    shown = figures("schedule", "show", f"{found}:found", "-m", 6, *TIMES)
    assert shown["step_s"] == pytest.approx(result["repeating_step_s"])
    trains_as_one_process(f"{found}:found")


def test_stages_without_ranks_get_some() -> None:
    stages = [{"F": t, "B": 2 * t, "bytes": 1} for t in (1, 1, 2, 4)]
    found = search_schedule({"stage": stages, "ranks": 3}, 6)
    assert found.schedule.placement == (0, 0, 1, 2)


@pytest.mark.parametrize(
    ("named", "placement"), [((0, None), (0, 1)), ((0, None, 2), (0, 1, 2)), ((2, None, None), (2, 0, 1))]
)
def test_no_rank_stays_empty_beside_stages_that_name_theirs(named, placement) -> None:
    stages = [{"F": 1, "B": 2} | ({} if rank is None else {"ranks": rank}) for rank in named]
    assert search_schedule({"stage": stages}, 3, ranks=len(named)).schedule.placement == placement


def test_a_plan_says_what_its_stages_take(folder: Path) -> None:
    good("plan", "mine.py:job", "--ranks", 2, "-m", 4, "-o", "plan.json", "--no-rehearse")
    result = figures("schedule", "search", "--times", "plan.json", "-m", 4)
    assert result["ranks"] == 2 and result["gap"] >= 0 and result["bound"]


def test_the_shortest_span_of_a_rank_instead_of_the_shortest_step(tmp_path: Path) -> None:
    """A rank that begins later may be done sooner after that, though the step takes longer."""
    stages = chain(tmp_path, SPLIT, 3)
    stages.write_text(f"transfer = 0.5\n{stages.read_text()}")
    by_step, by_span = (
        figures("schedule", "search", stages, "-m", 6, "--memory", 6, "--shortest", what)
        for what in ("step", "span")
    )
    assert by_step["step_s"] == 27.0 < by_span["step_s"]
    assert by_span["span_s"] == 26.0 < by_step["span_s"] and by_span["gap"] == 0.0
    told = good("schedule", "search", stages, "-m", 2, "--shortest", "span", "--time-limit", "0")
    assert "longest span" in told and "no span is shorter than" in told


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "no stages"),
        ({"stage": [{"F": 1}]}, "the times F"),
        ({"stage": [{"F": 1, "B": 2, "I": 1, "W": 1}]}, "the times F, B, I, W"),
        ({"stage": [{"F": -1, "B": 2, "ranks": 0}]}, "F is -1"),
        ({"stage": [{"F": 1, "B": 2, "rank": 0}]}, "'rank'"),
        ({"stage": [{"F": 1, "B": 2, "after": "x"}]}, "'x', which is no stage"),
        ({"stage": [{"F": 1, "B": 2}]}, "how many ranks"),
        ({"stage": [{"F": 1, "B": 2}], "ranks": "four"}, "ranks is 'four'"),
        ({"stage": [{"F": 1, "B": 2}], "ranks": 2.5}, "ranks is 2.5"),
        ({"stage": [{"F": 1, "B": 2, "ranks": 3}], "ranks": 2}, "rank 3 of 2 ranks"),
        ({"stage": [{"F": 1, "B": 2, "bytes": "2 pages"}]}, "stage 0: bytes: '2 pages'"),
    ],
)
def test_wrong_stages_are_named(document: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        search_schedule(document, 2)


def test_too_little_memory_names_the_rank() -> None:
    with pytest.raises(PlanError, match="rank 0 holds"):
        search_schedule({"stage": [{"F": 1, "B": 2, "bytes": 2, "ranks": 0}]}, 2, memory="1")


def test_a_file_has_to_end_in_what_can_be_written(tmp_path: Path) -> None:
    wrong = bad(2, "schedule", "search", chain(tmp_path, STAGE, 2), "-o", tmp_path / "found.json")
    assert "end the name in .py or .txt" in wrong


def test_a_written_turn_has_the_rows_that_were_measured() -> None:
    """Moments at whole tenths of a period, where `//` and a division differ."""
    seconds = {"forward_s": 0.1, "input_grad_s": 0.1, "weight_grad_s": 0.1}
    stages = tuple(
        SearchStage(name=str(s), **seconds, split=True, after=(s - 1,) if s else (), ranks=(s % 2,))
        for s in range(4)
    )
    problem = SearchProblem(stages=stages, microbatches=8)
    dice = random.Random(3)
    for _ in range(60):
        moments = tuple(dice.randint(0, 40) / 10 for _ in problem.units)
        found = written(problem, Repeating(moments=moments, period=dice.randint(3, 9) / 10), "x")
        rows = repeating(problem.shape, turn_of(problem, found))
        assert rows == problem.rows([int(entry) for entry in found.order])

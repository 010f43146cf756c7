"""pipeloom schedule: what its figures say, and one sentence for each mistake. Screens: test_screens.py."""

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from click.testing import Result

from pipeloom.ir.plan import Plan, StageMemory, StagePlan
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.ir.text import save_noun
from pipeloom.schedules import registry
from pipeloom.schedules.scenario import Scenario, causes_of, simulate_schedule


def call(*words: object) -> Result:
    return commands.run("schedule", *words)


def good(*words: object) -> str:
    return commands.good("schedule", *words)


def read(*words: object) -> Any:
    return commands.figures("schedule", *words)


FILES = {
    "order.csv": "0F0,0B0\n1B0,1F0\n",
    "cell.csv": "0F0,0B0\n1F0,1B0,1F1junk\n",
    "hole.csv": "0F0,0B0\n2F0,2B0\n",
    "twice.csv": "0F0,0B0\n1F0,1B0,0F0\n",
    "stuck.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "own.py": """
from pipeloom.schedule_language import Entry, F, Recipe, repeating

def deep(s, group=1):
    return Recipe(
        priority=lambda a: (a.kind == F, a.microbatch),
        in_flight=lambda rank: len(range(group)) * (s.ranks - rank),
    )

def placed(table, recipe=deep):
    return Entry(recipe=recipe, place='table', table=lambda ranks: table)

table, lists, nowhere = placed((0, 1, 0)), placed([0, [1, 2]]), placed((0, ()))
failing = Entry(recipe=deep, place='table', table=lambda ranks: 1 / 0)
offloads = Entry(recipe=deep, offload=lambda s: 1 / 0)
wide = placed((0, (0, 1)), lambda s: Recipe(rows=repeating(s, ['0F 1F 1B 0B', '2F 2B'])))
""",
}


@pytest.fixture
def folder(folder: Path) -> Path:
    """With 1F1B on two stages, the second twice as slow, two micro-batches in flight on the first; a profile;
    and rows that are wrong."""
    stages = []
    for s in range(2):
        memory = StageMemory(residuals=(2 - s) * 1024**2)
        times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 1.0 + s)
        stages.append(StagePlan(ops=(f"op{s}",), memory=memory, **times))
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    how = {"placement": (0, 1), "schedule": "1f1b", "schedule_rows": rows, "microbatches": 2}
    Plan(graph="g", planner="exact", stages=tuple(stages), **how).save(folder / "plan.json")  # type: ignore[arg-type]
    cost = OpCost(forward_s=2.0, input_grad_s=1.0, weight_grad_s=0.5)
    profile = Profile(device="d", source="measured", graph="g", batch=(), costs={"a": cost, "b": cost})
    save_noun(profile, folder / "profile.json")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "binary.csv").write_bytes(b"\xff\xfe\x00")
    return folder


def test_list_names_everything_and_what_cannot_run_yet() -> None:
    found = read("list")
    assert tuple(found) == registry.names()
    assert found["seq1f1b"]["lacks"] == "sequence slices"
    assert "interleaved" in found["interleaved_1f1b"]["aliases"]
    assert "zb_v" in good("list") and "also: ScheduleInterleaved1F1B, interleaved" in good("list")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", registry.names())
def test_every_schedule_is_drawn_and_explained(name: str) -> None:
    shown = good("show", name, "-p", "2", "-m", "4")
    assert "rank 1 " in shown and "peak" in shown
    assert max(map(len, shown.splitlines())) <= 120
    found = read("explain", name, "-p", "2", "-m", "4", "-T", "0.25")
    assert sum(found["reasons"].values()) == pytest.approx(found["idle_s"])
    assert found["idle_s"] == pytest.approx(2 * found["step_s"] * found["bubble"])


def test_show_writes_a_page_and_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    found = read("show", "zb_h1", "--html", str(page), "--trace", str(trace))
    assert (found["ranks"], found["stages"], found["microbatches"]) == (4, 4, 8)
    assert found["rows"][3].startswith("3F0 3I0 3F1")
    assert sum(r["bubble"] for r in found["by_rank"]) / 4 == pytest.approx(found["bubble"])
    assert "show the critical path" in page.read_text()
    assert f"<span>{found['step_s']:g}</span>" in page.read_text()  # in no unit: times are the user's
    assert json.loads(trace.read_text())["traceEvents"]


def test_micro_batches_are_whole_ones_in_both_directions_and_in_slices() -> None:
    for name in ("1f1b", "chimera", "seq1f1b", "seq1f1b:slices =4"):
        found = read("show", name, "-m", "6")
        assert found["microbatches"] == 6
        assert all(rank["busy_s"] == pytest.approx(18.0) for rank in found["by_rank"])
    assert read("show", "seq1f1b:slices=4")["peak"] == 1.75


def test_times_of_stages_and_of_boundaries() -> None:
    even = read("show", "zb_v", "-F", "1")
    assert read("show", "zb_v", "-F", "1,1,1,1") == read("show", "zb_v", "-F", ",".join(["0.5"] * 8)) == even
    one, each = (read("show", "1f1b", "-T", times) for times in ("0.5", "0.5,0.5,0.5"))
    assert one["step_s"] == pytest.approx(each["step_s"], rel=1e-6)


def test_times_of_a_plan_and_of_a_profile(folder: Path) -> None:
    found = read("show", "1f1b", "-p", "2", "--times", "plan.json")
    assert [rank["busy_s"] for rank in found["by_rank"]] == [24.0, 48.0]
    assert (found["peak"], found["peak_bytes"]) == (2.0, 2 * 1024**2)
    assert read("show", "1f1b", "--times", "plan.json") == found
    assert "2.0 MiB" in good("show", "1f1b", "--times", "plan.json", "--memory", "2MiB")
    found = read("show", "zb_v", "-p", "2", "--times", "profile.json")
    assert [rank["busy_s"] for rank in found["by_rank"]] == [28.0, 28.0]
    assert found["peak_bytes"] is None


def test_a_memory_limit_is_kept_or_refused() -> None:
    assert read("show", "zb_1p", "--memory", "8")["step_s"] == read("show", "zb_2p")["step_s"]
    assert read("show", "v_min", "--memory", "2")["peak"] == 2.0
    assert read("show", "1f1b", "--memory", "4")["peak"] == 4.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in registry.names() if n != "seq1f1b"])
def test_what_export_writes_check_accepts(name: str, folder: Path) -> None:
    good("export", name, "-p", "2", "-m", "4", "-o", "mine.csv")
    both = ["--replicas", "2"] if registry.entry(name).place == "both ways" else []
    assert "are complete and cannot block" in good("check", "mine.csv", *both)
    assert read("check", "mine.csv", *both)["microbatches"] == 4
    assert good("export", name, "-p", "2", "-m", "4", "--transfers").count("\n") == 2


def test_a_file_says_how_many_ranks_and_microbatches_there_are_and_what_replicas_hold(folder: Path) -> None:
    good("export", "1f1b", "-p", "3", "-m", "6", "-o", "mine.csv")
    shown = read("show", "mine.csv")
    assert (shown["ranks"], shown["microbatches"]) == (3, 6)
    good("export", "dualpipe", "-p", "2", "-m", "4", "-o", "both.csv")
    assert "or add --replicas 2" in commands.bad(1, "schedule", "check", "both.csv")


MISTAKES = [
    ("show 1f1b -p 0", 2, "range"),
    ("show zb_1p:memory=nan", 1, "'memory=nan'"),
    ("show interleaved:group=0", 1, "group 0"),
    ("show gis_g:size=3", 1, "its options: group"),
    ("show seq1f1b:slices=0", 1, "0 slices"),
    ("show seq1f1b:slices=0x2", 1, "cannot read option"),
    ("show zb_1p:memory=3 --memory 8", 2, "and so does --memory 8"),
    ("search --times plan.json -p 8", 2, "on 2 ranks, -p asks for 8"),
    ("show dualpipe -m 7", 1, "7 is odd"),
    ("show 1f1b -m 1000000000", 2, "too many"),
    ("show interleaved:v=1e9", 1, "1000000000 stages"),
    ("show chimera -v 3", 1, "one stage per rank"),
    ("show 1f1b -F a", 2, "'a'"),
    ("show 1f1b -I nan", 2, "nan"),
    ("show 1f1b --pair-factor nan", 2, "nan"),
    ("show po_f --per-node 2 --per-uplink 4", 2, "--per-uplink"),
    ("show 1f1b -F 1,2,3", 2, "3 times for 4 stages"),
    ("show 1f1b -T 1,2", 2, "2 times for the 3 boundaries"),
    ("show 1f1b --memory 2", 1, "holds up to 4 micro-batches"),
    ("show zb_1p --memory 0.5", 1, "--memory 0.5"),
    ("show 1f1b --memory 3GiB", 2, "not known"),
    ("show 1f1b --times cell.csv", 2, "neither a plan nor a profile"),
    ("show 1f1b --times plan.json -F 2", 2, "--forward-s and --times"),
    ("show 1f1b -p 3 --times plan.json", 2, "2 times for 3 stages"),
    ("show 1f1b --html no/x.html", 2, "no folder no"),
    ("export 1f1b --transfers -o rows.txt", 2, "--transfers"),
    ("why 1f1b 0I0", 1, "no rank runs 0I0"),
    ("check none.csv", 1, "none.csv"),
    ("check binary.csv", 1, "no text"),
    ("check cell.csv", 1, "cell.csv: row 2, cell 3"),
    ("check hole.csv", 1, "stage 1"),
    ("check order.csv", 1, "1B0 before 1F0"),
    ("check twice.csv", 1, "ranks 0 and 1"),
    ("check stuck.csv", 1, "rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1"),
    ("show gis --edges 0-1", 1, "several stages on each rank"),
    ("show 1f1b --edges 0-1,1-3", 1, "no edge names stage 2"),
    ("show 1f1b --edges 0-1,1-0", 1, "0 -> 1 -> 0"),
    ("show 1f1b --edges 0-1 -p 2", 2, "--ranks and --edges"),
    ("show 1f1b --edges 0>1", 2, "'0>1'"),
    ("show 1f1b --edges 0-1,1-2 -T 1,1,1", 2, "3 times for the 2 boundaries"),
    ("show order.csv -p 3", 1, "for 2 ranks, not 3"),
    ("show order.csv -p 2 -v 2", 1, "leave -v out"),
    ("show own.py:table", 1, "for 2 ranks, not 4"),
    ("show own.py:lists", 1, "places stage 1 on [1, 2]"),
    ("show own.py:nowhere", 1, "places stage 1 on ()"),
    ("show own.py:failing", 2, "the table of own.py:failing fails: ZeroDivisionError"),
    ("show own.py:offloads", 2, "own.py:offloads fails: ZeroDivisionError"),
    ("show 1f1b --update-every 2", 2, "add --weights stash or --weights 2bw"),
    ("show 1f1b --weights 2bw --update-every 2", 1, "runs 0F4 with weight version 1"),
    ("show gpipe --weights 2bw --update-every 4", 1, "12 micro-batches or more"),
    ("show forward_only --weights 2bw", 1, "no backwards"),
    ("show interleaved:v=4 -v 2", 1, "leave one"),
]


@pytest.mark.parametrize(("command", "status", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(folder: Path, command: str, status: int, message: str) -> None:
    assert message in commands.bad(status, "schedule", *command.split())


def test_one_schedule_that_cannot_be_does_not_end_a_comparison() -> None:
    words = ("compare", "1f1b", "nonsense", "dualpipe", "interleaved:v=2", "interleaved:v=4", "-m", "7")
    result = call(*words)
    assert result.exit_code == 1
    assert "no schedule is named 'nonsense'" in result.stderr and "and 7 is odd" in result.stderr
    shown = result.stdout
    assert all(name in shown for name in ("1f1b", "interleaved:v=2", "interleaved:v=4"))
    figures = json.loads(call(*words, "--json").stdout)
    assert "nonsense" in figures["nonsense"]["error"]
    assert figures["interleaved:v=4"]["bubble"] < figures["interleaved:v=2"]["bubble"]


@pytest.mark.parametrize("words", ["-F 0 -I 0 -W 0", "-p 1", "-m 1"])
def test_degenerate_steps_are_drawn_and_explained(words: str) -> None:
    for command in ("show 1f1b", "explain 1f1b", "compare 1f1b zb_v gpipe"):
        good(*command.split(), *words.split())


def test_weight_versions_of_schedules_without_a_flush(folder: Path) -> None:
    shown = good("show", "async_1f1b")
    assert "versions kept 4 3 2 1, gradients late by up to 3 2 1 0 updates" in shown
    words = ("show", "async_1f1b", "--update-every", "2")  # which is meant for stash
    assert read(*words) == read(*words, "--weights", "stash")
    good("export", "1f1b", "-o", "mine.csv")
    good("check", "mine.csv", "--weights", "stash")


TOWERS = "0-1 1-8 2-3 3-8 4-5 5-8 6-7 7-8"


def test_a_graph_of_stages_holds_as_many_as_its_longest_path_has_ranks() -> None:
    shown = read("show", "zb_h1", "-m", "16", "--edges", TOWERS)
    assert (shown["ranks"], shown["stages"], shown["peak"], shown["step_s"]) == (9, 9, 3.0, 50.0)
    assert [rank["peak"] for rank in shown["by_rank"]] == [3.0] * 9
    assert "0B7" in good("explain", "1f1b", "--edges", TOWERS).split()
    line = ("--edges", "0-1 1-2 2-3 3-4 4-5")  # more ranks than -p has unless it is given
    assert read("show", "1f1b:offload=1", *line) == read("show", "1f1b:offload=1", "-p", "6")
    # The slow edge makes the step longer; the same time on every edge is that of one number.
    edges = ("--edges", "0-2 1-2", "-m", "1")
    assert read("show", "1f1b", *edges, "-T", "5,0")["step_s"] == 6 + 10
    assert read("show", "1f1b", *edges, "-T", "1,1") == read("show", "1f1b", *edges, "-T", "1")


def test_check_holds_a_file_against_a_graph_of_stages(folder: Path) -> None:
    edges = ("--edges", "0-1 1-4 2-3 3-4")
    good("export", "1f1b", "-m", "4", *edges, "-o", "towers.csv")
    assert "are complete and cannot block" in good("check", "towers.csv", *edges)
    assert "they wait in a circle" in call("check", "towers.csv").stderr


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "1f1b:offload=1", "po_h"])
def test_every_action_begins_when_the_last_that_it_waits_for_is_there(name: str) -> None:
    """Messages that wait for each other on a link, and copies: an AWAIT ends then, as it is a wait itself."""
    simulated = simulate_schedule(name, Scenario(ranks=3, microbatches=5, transfer_s=1.7))
    causes = causes_of(simulated)
    actions = {str(action) for row in simulated.schedule.rows for action in row}
    for event in (event for event in simulated.timeline.events if event.action in actions):
        latest = max((wait.end_s for wait in causes.waits(causes.find(event.action))), default=0.0)
        assert latest == pytest.approx(event.end_s if "AWAIT" in event.action else event.start_s)


def test_options_of_a_schedule_of_ones_own_are_keywords_of_its_function(folder: Path) -> None:
    shape = ("-p", 2, "-m", 8)
    assert [read("show", f"own.py:deep{of}", *shape)["peak"] for of in ("", ":group=2")] == [2.0, 4.0]
    assert "no option 'grup'" in commands.bad(1, "schedule", "show", "own.py:deep:grup=2", *shape)


def test_why_of_a_stage_on_several_ranks(folder: Path) -> None:
    """Rank 1 is free, but its part of the last stage begins when that of rank 0 can."""
    chain = read("why", "own.py:wide", "2F1", "-p", 2, "-m", 2)
    assert [piece["action"] for piece in chain[:2]] == ["2F1", "0F1"] and chain[-1]["action"] == "0F0"

"""What the studio answers, asked without a page: of plans, of schedules, and of a run's directory."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import large_head
import msgspec
import pytest
import torch
import towers
from drawings import computing
from filelock import FileLock
from torch import nn

from pipeloom import Job, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.commands.studio import read_words
from pipeloom.ir.errors import ConfigError, PlanError, ScheduleError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.ir.text import save_noun
from pipeloom.plan_request import settings_of
from pipeloom.schedules.registry import names
from pipeloom.schedules.scenario import Scenario, load_work, simulate_rows
from pipeloom.studio.opened import opened
from pipeloom.studio.plans import PlanDesk, PlanModel
from pipeloom.studio.runs import run_shown
from pipeloom.studio.schedules import ScheduleDesk

CARDS = find_cluster("4 x a100-40")
JOB = Job(
    model=lambda: nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh()))),
    batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    loss=lambda output, batch: output.square().mean(),
    name="deep",
)


def planned(job: Job = JOB, **how: Any) -> Plan:
    how = {"ranks": 2, "schedule": "1f1b", "planner": "exact", "cluster": CARDS, "microbatches": 4} | how
    return planning.plan(job, **how)


def desk_of(plan: Plan, job: Job = JOB) -> PlanDesk:
    return PlanDesk(plan, PlanModel.load(job, plan, CARDS))


def saved(desk: PlanDesk, folder: Path, cuts: list[int] | None = None) -> Plan:
    file = folder / "saved.json"
    file.write_bytes(msgspec.json.encode(desk.save_plan({"cuts": cuts})["json"]))
    return load_plan(file)


def plan_again(desk: PlanDesk) -> Mapping[str, Any]:
    before = set(threading.enumerate())
    desk.cap({"memory": "8GiB", "treatments": "none"})
    for thread in set(threading.enumerate()) - before:
        thread.join()
    progress = desk.progress({})
    assert not progress["running"]
    return progress


# --- plans ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ({}, {"planner": "by hand"}),
        ({"planner": "balanced"}, {}),
        ({}, {"schedule": "searched"}),
        ({}, {"schedule": "evil.py:f"}),
        ({"replicas": 2, "shard_optimizer": True}, {}),
        ({"weights": "2bw", "delay_correction": 0.5, "warm_up_with_flush": 3, "clips": True}, {}),
        ({"schedule": "interleaved_1f1b:v=2", "planner": "balanced"}, {}),
        ({"schedule": "chimera"}, {}),
    ],
    ids=str,
)
def test_planning_again_is_for_what_the_plan_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], changes: dict[str, str]
) -> None:
    """But no file is imported because a plan names it."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    plan = replace(planned(**how), **changes)
    desk = desk_of(plan)
    assert "planned for 8GiB" in plan_again(desk)["said"]
    again = saved(desk, tmp_path)
    assert settings_of(again) == settings_of(plan)
    assert set(again.caps) == {8 << 30}
    if not changes:
        assert (again.planner, again.schedule) == (plan.planner, plan.schedule)
    assert not Path("imported").exists()


def test_all_figures_of_a_plan_are_of_the_devices_that_it_is_simulated_on() -> None:
    """And not some those of its file, which may be a cluster's."""
    plan = planned()
    elsewhere = PlanDesk(plan, PlanModel.load(JOB, plan, find_cluster("4 x v100-32"))).plan({})
    here = desk_of(plan).plan({})
    assert elsewhere["step"] != here["step"]
    assert [one["times"] for one in elsewhere["stages"]] != [one["times"] for one in here["stages"]]
    assert "roofline" in here["said"] and "file" in PlanDesk(plan, None).plan({})["said"]


def test_a_plan_of_other_shapes_is_refused_and_treatments_may_end_before_the_last_stage() -> None:
    plan = planned()
    short = desk_of(replace(plan, memory=MemoryPolicy(stages=({},))))
    assert short.plan({})["stages"] == desk_of(plan).plan({})["stages"]
    with pytest.raises(PlanError, match=r"are input\[4,8\]float32, the plan is for input\[4,16\]float32"):
        desk_of(replace(plan, batch=("input[4,16]float32",)))


@pytest.mark.parametrize("split", ["off", 2])
def test_a_large_head_may_be_split_before_or_by_planning_again(tmp_path: Path, split: str | int) -> None:
    job = large_head.job()
    desk = desk_of(planned(job, split_words=split), job)
    before = desk.plan({})
    assert sum(ops for _, ops, _ in before["pieces"]) == sum(stage["ops"] for stage in before["stages"])
    assert "planned for" in plan_again(desk)["said"]
    assert saved(desk, tmp_path).split_words
    after = desk.plan({})
    moved = desk.plan({"cuts": [after["cuts"][0] - 1]})
    assert after["step"] == pytest.approx(saved(desk, tmp_path).predicted_step_s) != moved["step"]


def test_a_plan_that_was_cut_by_hand_says_what_its_stages_take(tmp_path: Path) -> None:
    plan = planned()
    desk = desk_of(plan)
    (cut,) = desk.plan({})["cuts"]
    moved = saved(desk, tmp_path, [cut - 1])
    assert moved.planner == "by hand"
    for figure in ("forward_s", "input_grad_s", "weight_grad_s"):
        before, after = (sum(getattr(s, figure) for s in one.stages) for one in (plan, moved))
        assert after == pytest.approx(before) and after > 0
    assert moved.stages[0].memory.parameters < plan.stages[0].memory.parameters
    scenario = Scenario(ranks=2, microbatches=4, times=load_work(tmp_path / "saved.json"))
    assert simulate_rows(moved.as_schedule, scenario).summary.step_s > 0
    assert moved.stages != plan.stages and saved(desk, tmp_path, [cut]).stages == plan.stages


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_planner_that_fails_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    desk = desk_of(planned())
    monkeypatch.setattr(planning, "plan_size", fails)
    assert "no fault of yours" in plan_again(desk)["said"]
    monkeypatch.undo()
    assert "planned for" in plan_again(desk)["said"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "drawn"),
    [
        ({}, "plan"),
        ({"schedule": "interleaved_1f1b:v=2"}, "plan"),
        ({"replicas": 2}, "1f1b"),
        ({"schedule": "chimera"}, "chimera"),
        ({"weights": "2bw"}, "1f1b"),
        (None, "1f1b"),
    ],
    ids=str,
)
def test_every_plan_opens_with_a_drawing(tmp_path: Path, how: dict[str, Any] | None, drawn: str) -> None:
    """By its rows where these say all; of replicas one pipeline.  how: None for stages that form branches."""
    file = tmp_path / "plan.json"
    if how is None:  # no planner left a note on them
        plan = replace(towers.plan_of(towers.JOBS[False], ()), schedule="mine")
    else:
        plan = planned(**how)
    plan.save(file)
    start, answers = opened(str(file), read_words)
    words = [*chain.from_iterable(start["words"].items())]
    (one,) = answers["draw"]({"words": words, "entries": start["entries"]})["drawn"]
    assert one["name"] == drawn and "error" not in one
    assert how is None or one["figures"]["step_s"] > 0
    assert one["ranks"] == len(plan.schedule_rows) // plan.width


# --- schedules ---

DESK = ScheduleDesk(read_words)


@pytest.mark.parametrize(
    "words",
    [
        ["--times", "{other}"],
        ["--times={other}"],
        ["--times", "{own}", "--times", "{other}"],
        ["--times", "{own}", "--times={other}"],
        ["--times={other}", "--times", "{own}"],
        ["--memory", "--times", "{own}", "--times", "{other}"],
        ["--times"],
    ],
    ids=" ".join,
)
def test_no_other_file_is_read_for_times(tmp_path: Path, words: list[str]) -> None:
    files = {"own": str(tmp_path / "own.json"), "other": str(tmp_path / "other.json")}
    for file in files.values():
        planned().save(file)
    draw = ScheduleDesk(read_words, times=Path(files["own"])).draw
    question = {"entries": [{"name": "1f1b"}]}
    with pytest.raises(ConfigError, match="may not name files"):
        draw(question | {"words": [word.format(**files) for word in words]})
    assert draw(question | {"words": ["--times", files["own"], "-p", "2"]})["drawn"][0]["figures"]
    with pytest.raises(ConfigError, match="may not name files"):
        DESK.draw(question | {"words": ["--times", "None"]})


@pytest.mark.parametrize("word", ["--help", "--nonsense", "--version"])
def test_words_are_those_of_a_setting(word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_words([word])


COPIES = {"rows": " ".join(f"0F{b} 0OFFLOAD{b} 0RELOAD{b} 0B{b}" for b in range(5)), "form": "recipe"}


@pytest.mark.parametrize(
    ("answer", "asked", "word"),
    [
        *((DESK.ask, {"name": "1f1b", "action": action}, action) for action in ("0F99", "9B0", "nonsense")),
        (DESK.save, {"name": "mine"} | COPIES, "copies"),
    ],
)
def test_what_cannot_be_answered_is_refused(answer: Any, asked: dict[str, str], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        answer({"words": []} | asked)


def test_a_copy_is_asked_as_any_action_is() -> None:
    asked = {"words": ["-p", "2", "-m", "3"], "name": "1f1b:offload=1", "action": "0OFFLOAD1"}
    assert DESK.ask(asked)["chain"][0].action == "0OFFLOAD1"


@pytest.mark.parametrize(
    ("name", "share"), [("1f1b", 1.0), ("zb_v", 0.5), ("dualpipe", 1.0), ("seq1f1b", 0.5)]
)
def test_what_a_forward_holds_is_counted_as_the_peak_is(name: str, share: float) -> None:
    held = DESK.ask({"words": ["-p", "2", "-m", "2"], "name": name, "action": "0F0"})["holds"]
    assert held["share"] == share


@pytest.mark.parametrize("name", ["chimera", "seq1f1b"])
def test_rows_that_alone_would_be_read_otherwise_are_not_edited(name: str) -> None:
    assert DESK.draw({"words": [], "entries": [{"name": name}]})["drawn"][0]["rows"] is None


def test_a_setting_that_suits_some_schedules_is_drawn_for_these() -> None:
    words, both = ["-T", "0.1,0.1,0.1"], [{"name": "1f1b"}, {"name": "interleaved_1f1b"}]
    one, other = DESK.draw({"words": words, "entries": both})["drawn"]
    assert one["figures"]["step_s"] > 33 and "boundaries" in other["error"]["message"]
    answers = {name: DESK.figures({"words": words, "name": name}) for name in names()}
    assert {"error" in answer for answer in answers.values()} == {True, False}


# --- runs ---


def test_a_lock_that_was_left_behind_is_none(tmp_path: Path) -> None:
    assert not run_shown(tmp_path, {})["going"]
    with FileLock(tmp_path / "lock"):
        assert run_shown(tmp_path, {})["going"]
    (tmp_path / "lock").touch()
    assert not run_shown(tmp_path, {})["going"]


def test_a_run_without_a_flush_takes_the_time_of_one_step(tmp_path: Path) -> None:
    three = replace(computing((0, "0F0", 0, 3), source="measured"), steps=3, steady_s=1.0)
    save_noun([three], tmp_path / "timelines.json")
    with FileLock(tmp_path / "lock"):  # the page draws the step once, when the run has ended
        assert not run_shown(tmp_path, {})["pictures"]
    assert "measured 1.00 s, bubble 0.0 %" in run_shown(tmp_path, {})["said"]
    (tmp_path / "timelines.json").write_text("[")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    damaged = run_shown(tmp_path, {})
    assert "timelines.json" in damaged["said"] and "\n" not in damaged["said"]
    assert damaged["losses"] and not damaged["pictures"]

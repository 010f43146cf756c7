"""A plan names a schedule. No file is imported, or opened, because a plan names it."""

import os
from dataclasses import replace
from pathlib import Path

import nets
import pytest
from commands import good
from runs import even_plan

from pipeloom import Pipeline
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.ir.text import write_whole
from pipeloom.runnable import require_runnable_plan
from pipeloom.train.config import read_config, write_config
from pipeloom.train.run import TrainRequest, decide
from pipeloom.train.workload import gpt_workload
from pipeloom.verification import verify

EVIL = "from pathlib import Path\nPath('ran').touch()\nz = lambda shape: None\n"
JOB = nets.job("skips")


@pytest.fixture
def place(folder: Path) -> Path:
    (folder / "evil.py").write_text(EVIL)
    return folder


def evil_plan(ranks: int = 2) -> Plan:
    return replace(even_plan(JOB, ranks, microbatches=2), schedule="evil.py:z")


def test_a_plan_that_names_a_file_runs_its_rows_and_not_the_file(place: Path) -> None:
    assert verify(JOB, evil_plan()).passed
    with Pipeline(JOB, evil_plan(1)) as pipeline:
        assert pipeline.step(JOB.batch(0, 4)) > 0
    assert not (place / "ran").exists()


def test_lists_of_actions_that_a_plan_names_may_be_gone(place: Path) -> None:
    for name in ("gone.csv", "gone.txt"):
        require_runnable_plan(replace(evil_plan(), schedule=name))


def test_operations_that_nobody_declared_are_named_with_the_remedy() -> None:
    plan = evil_plan()
    rows = (plan.schedule_rows[0] + " 0ZAP0", *plan.schedule_rows[1:])
    with pytest.raises(ScheduleError, match="schedule 'evil.py:z': cannot read action '0ZAP0'") as caught:
        require_runnable_plan(replace(plan, schedule_rows=rows))
    assert "no file is imported because a plan names it" in str(caught.value.hint)


def test_train_follows_a_plan_and_imports_nothing(place: Path) -> None:
    settings = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "steps=1"]
    made = even_plan(gpt_workload(read_config(None, settings)).job, 2, microbatches=2)
    replace(made, schedule="evil.py:z").save(place / "plan.json")
    request = TrainRequest(overrides=(*settings, "pipeline.plan=plan.json"))
    config, _ = decide(request, place / "run")
    assert config.pipeline.schedule is None and not (place / "ran").exists()
    assert "evil.py" not in write_config(config), "what goes on with the run reads it"
    # Whoever names the file himself means it.
    own = replace(request, overrides=(*request.overrides, "pipeline.schedule=evil.py:z"))
    assert decide(own, place / "own")[0].pipeline.schedule == "evil.py:z"
    assert (place / "ran").exists()


def test_verify_reads_a_plan_and_imports_nothing(place: Path) -> None:
    good("plan", "mine.py:job", "-p", "1", "-m", "2", "--cluster", "1 x cpu", "-o", "plan.json")
    text = (place / "plan.json").read_text()
    assert '"1f1b"' in text
    (place / "plan.json").write_text(text.replace('"1f1b"', '"evil.py:z"'))
    good("verify", "mine.py:job", "--plan", "plan.json")
    assert not (place / "ran").exists()


def test_a_name_that_can_be_foreseen_leads_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "plan.json"
    (tmp_path / f"plan.json.{os.getpid()}.partial").symlink_to(victim)
    write_whole(target, "theirs")
    assert victim.read_text() == "mine"
    assert target.read_text() == "theirs" and not target.is_symlink()


def test_files_get_the_rights_that_the_user_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640

"""Plans and runs on the page: cuts that are moved, caps that are planned for, a run that is still going."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import needs_chromium
from commands import figures
from drawings import simulated_step
from filelock import FileLock
from studio_page import running
from tiny_run import prepare

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.plan import load_plan
from pipeloom.ir.text import save_noun
from pipeloom.studio.plans import cuts_of, pieces, with_cuts
from pipeloom.studio.server import StudioServer
from pipeloom.train.config import read_config
from pipeloom.train.workload import job_of

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("plan"), {}, memory="3MiB", treatments="recompute") / "plan.json"


@pytest.fixture(scope="module")
def plan_server(plan_file: Path) -> Iterator[StudioServer]:
    job = job_of(read_config(plan_file.parent / "config.toml", []))
    with running(str(plan_file), job=job, cluster=cpu_cluster(2)) as server:
        yield server


def planned(page: Any, times: int) -> dict[str, Any]:
    page.wait_until(f"+document.body.dataset.planned >= {times}")
    answer: dict[str, Any] = page.page.evaluate("plan.answer")
    return answer


@pytest.mark.slow
def test_cuts_are_moved_by_keys_and_undone(
    studio: Any, plan_server: StudioServer, plan_file: Path, tmp_path: Path
) -> None:
    page = studio(plan_server)
    first = planned(page, 1)
    assert first["step"] == pytest.approx(load_plan(plan_file).predicted_step_s, rel=0.02)
    assert page.page.locator("svg.stages .stage").count() == 2
    page.page.locator(".handle").focus()
    page.page.keyboard.press("ArrowLeft")
    moved = planned(page, 2)
    assert moved["cuts"] == [first["cuts"][0] - 1] and moved["step"] != first["step"]
    assert "by hand" in page.page.inner_text("#plan-said")
    saved = page.saved("Save plan", tmp_path)
    assert load_plan(saved).predicted_step_s == pytest.approx(moved["step"])
    page.page.get_by_role("button", name="Undo the cut").click()
    assert planned(page, 3)["cuts"] == first["cuts"]
    assert load_plan(saved).stages != load_plan(plan_file).stages
    page.page.evaluate("moveCut(0, 0)")
    assert planned(page, 5)["cuts"] == first["cuts"]
    assert "stage empty" in page.page.inner_text("#problem")
    assert "422" in page.complaints.pop()
    page.page.add_style_tag(content=".layer { flex: none !important; width: 2px; }")
    before = page.page.evaluate("plan.past.length")
    page.page.locator(".handle").click(position={"x": 1, "y": 5})
    page.page.locator(".handle").hover()
    page.page.mouse.down()
    page.page.evaluate("dispatchEvent(new PointerEvent('pointercancel'))")
    page.page.mouse.move(0, 0)
    page.page.mouse.up()
    assert page.page.evaluate("plan.past.length") == before
    page.page.evaluate("moveCut(0, 1), moveCut(0, 2)")
    assert planned(page, 6)["cuts"] == [2]


@pytest.mark.slow
def test_another_cap_is_planned_for_in_the_background(studio: Any, plan_server: StudioServer) -> None:
    page = studio(plan_server)
    planned(page, 1)
    page.page.locator("#cap").fill("1")
    assert page.page.inner_text("#cap-text").endswith("KiB")
    page.page.get_by_role("button", name="Plan again").click()
    page.wait_until("$('search').textContent !== '' && !$('plan-again').disabled")
    assert "give each device at least" in page.page.inner_text("#search")
    page.page.locator("#cap").fill("200")
    page.page.get_by_role("button", name="Plan again").click()
    answer = planned(page, 2)
    assert answer["cap"] == page.page.evaluate("capBytes()")
    assert "planned for" in page.page.inner_text("#search")


@pytest.mark.slow
def test_a_plan_alone_is_drawn_by_its_own_times(studio: Any, plan_file: Path) -> None:
    with running(str(plan_file)) as server:
        page = studio(server)
        planned(page, 1)
        assert "Name the plan's model" in page.page.inner_text("#cuts")
        rows = plan_file.with_name("plan.txt")
        rows.write_text(page.page.evaluate("state.entries[0].rows"))
        result = figures("schedule", "check", rows, "--times", plan_file)
        assert page.figures()["step_s"] == pytest.approx(result["step_s"])
        page.page.uncheck("#times")
        page.drawn()
        assert page.figures()["step_s"] > 1


@pytest.mark.slow
def test_every_cut_between_pieces_is_a_plan_with_the_same_ops(plan_file: Path) -> None:
    from pipeloom.planning import capture

    plan = load_plan(plan_file)
    graph = capture(job_of(read_config(plan_file.parent / "config.toml", [])), plan.microbatch_size).graph
    parts = pieces(plan, graph)
    assert with_cuts(plan, parts, cuts_of(parts)).stages[0].ops == plan.stages[0].ops
    for at in range(1, len(parts)):
        moved = with_cuts(plan, parts, [at])
        assert [op for s in moved.stages for op in s.ops] == [op for part in parts for op in part.ops]
        assert sum(map(len, moved.memory.stages)) == sum(map(len, plan.memory.stages))
        assert len(moved.stages[0].ops) == sum(len(part.ops) for part in parts[:at])


def test_a_run_is_followed_until_it_ends(studio: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lock = FileLock(run / "lock")
    lock.acquire()
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.5, "step_s": 0.5}\n')
    with running(str(run)) as server:
        page = studio(server)
        page.wait_until("$('run-said').textContent.startsWith('training, step 1;')")
        with metrics.open("a") as file:
            file.write('{"step": 2, "loss": 2.25, "step_s": 0.25, "validation_loss": 2.0}\n')
        page.wait_until("$('run-said').textContent.startsWith('training, step 2; the last step took 250')")
        moved = metrics.rename(run / "elsewhere")
        metrics.mkdir()
        page.wait_until("$('problem').textContent.includes('cannot read')")
        metrics.rmdir()
        moved.rename(metrics)
        page.wait_until("$('problem').hidden")
        page.complaints.clear()  # the browser notes the refusal, which is the answer
        own = simulated_step(ranks=2, mbs=3)
        step = replace(own, events=tuple(own.events), memory=tuple(own.memory))
        save_noun([step, replace(step, source="measured")], run / "timelines.json")
        lock.release()
        page.wait_until("$('run-said').textContent.startsWith('ended at step 2;')")
        shown = page.page.inner_text("#run-step")
        assert "predicted" in shown and "measured" in shown
        assert "validation" in page.page.inner_text("#loss")

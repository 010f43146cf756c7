"""`pipeloom train` as a user runs it: processes, files, resuming after a kill, torchrun."""

import json
import os
import re
import signal
import time
import tomllib
from pathlib import Path

import commands
import pytest
from processes import output, run, start
from tiny_run import TRAIN, losses, prepare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"steps": 6, "validate_every": 3, "model.width": 32, "model.context": 32}
    return prepare(tmp_path, sizes, microbatch_size=2)


WORDS = TRAIN[1:]


def test_a_run_leaves_everything_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are processes; the command itself runs here, where torch is loaded already."""
    monkeypatch.chdir(folder)
    done = commands.run("train", "config.toml", "--json")
    assert done.exit_code == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["run"], figures["steps"], figures["stages"]) == ("runs/tiny-1", 6, 2)
    assert figures["validation_loss"][1] < figures["validation_loss"][0]
    assert len(figures["forecast"]["peak_bytes"]) == len(figures["measured"]["peak_bytes"]) == 2
    out = folder / "runs" / "tiny-1"
    assert json.loads((out / "summary.json").read_text()) == figures
    files = "config.toml plan.json metrics.jsonl checkpoint trace.json report.html summary.json"
    assert {p.name for p in out.iterdir()} == {*files.split(), "timelines.json"}
    assert tomllib.loads((out / "config.toml").read_text())["data"]["validation_share"] == 0.05
    assert list(losses(out)) == [1, 2, 3, 4, 5, 6]
    assert '"PP:1B1"' in (out / "trace.json").read_text()
    # Progress goes to standard error here, in plain lines.
    assert "step 6/6  loss" in done.stderr and "\x1b" not in done.stderr and "\r" not in done.stderr
    assert "predicted:" in done.stderr and "report: runs/tiny-1/report.html" in done.stderr
    off = figures["forecast"]["step_s"] / figures["middle_step_s"] - 1
    assert figures["forecast_error"] == pytest.approx(off)
    told = f"off by {100 * off:+.1f} % from the middle step of {figures['middle_step_s'] * 1e3:.0f} ms"
    assert told in done.stderr and told in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times", "status"), [(signal.SIGTERM, 1, 143), (signal.SIGINT, 3, 130)])
def test_a_run_that_is_ended_says_how_far_it_is_kept(folder, number, times, status):
    words = (*WORDS, "config.toml", "--steps", "100000", "--out", "a")
    process = start(*words, cwd=folder, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 10/"):
            break
    second, _, said = run(*WORDS, "--resume", "--out", "a", cwd=folder)
    assert second == 2 and "a is in use" in said
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    _, told = process.communicate(timeout=120)
    assert process.returncode == status and "Traceback" not in told, told
    assert re.search(r"^a is kept up to step \d+: go on with --resume --out a$", told, re.MULTILINE), told
    assert not (folder / "a" / "lock").exists()


@pytest.mark.slow
def test_a_finished_run_goes_on_if_asked_unless_its_checkpoint_is_corrupt(folder: Path) -> None:
    output(*WORDS, "config.toml", cwd=folder)
    out = folder / "runs" / "tiny-1"
    again = output(*WORDS, "--set", "name=tiny", "--resume", cwd=folder)
    assert "runs/tiny-1 is finished: 6 steps" in again
    output(*WORDS, "--set", "name=tiny", "--resume", "--steps", "8", cwd=folder)
    assert list(losses(out)) == list(range(1, 9))
    os.truncate(out / "checkpoint" / "step-00000008" / "rank-0.safetensors", 100)
    status, told, errors = run(*WORDS, "--resume", "--out", "runs/tiny-1", "--steps", "9", cwd=folder)
    assert status == 1 and told == ""
    assert "step-00000008 is corrupt" in errors and len(errors.splitlines()) == 2


@pytest.mark.slow
def test_other_stages_go_on_from_the_same_checkpoint(folder: Path) -> None:
    output(*WORDS, "config.toml", "--out", "a", cwd=folder)
    more = ["--resume", "--out", "a", "--steps", "8", "--ranks", "3", "--schedule", "gpipe"]
    output(*WORDS, *more, "--set", "pipeline.plan=", cwd=folder)
    assert list(losses(folder / "a")) == list(range(1, 9))
    assert json.loads((folder / "a" / "plan.json").read_text())["schedule"] == "gpipe"


@pytest.mark.slow
def test_under_torchrun_each_process_is_a_rank(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    words = (*torchrun, *WORDS, "config.toml", "--out", "a")
    output(*words, cwd=folder)
    assert list(losses(folder / "a")) == list(range(1, 7))
    status, _, errors = run(*words, cwd=folder)
    assert status != 0 and "error: a holds a run already" in errors


@pytest.mark.slow
def test_bench(folder: Path) -> None:
    words = "-m pipeloom bench --steps 2 --warmup 1 --json --microbatches 2 --microbatch-size 1"
    figures = json.loads(output(*words.split(), cwd=folder))
    assert figures["tokens_per_s"] == pytest.approx(2 * 128 / figures["step_s"])

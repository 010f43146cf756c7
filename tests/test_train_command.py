"""`pipeloom train` as a user runs it: processes, files, resuming after a kill, torchrun."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import commands
import pytest
from tiny_run import TRAIN, losses, prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"steps": 6, "validate_every": 3, "model.width": 32, "model.context": 32}
    return prepare(tmp_path_factory.mktemp("prepared"), sizes, microbatch_size=2)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    for name in ("config.toml", "plan.json"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    return tmp_path


def run(folder: Path, *words: str, command: list[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )


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
def test_a_run_that_is_ended_says_how_far_it_is_kept(
    folder: Path, number: signal.Signals, times: int, status: int
) -> None:
    process = subprocess.Popen(
        [*TRAIN, "config.toml", "--steps", "100000", "--out", "a"],
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 10/"):
            break
    second = run(folder, "--resume", "--out", "a")
    assert second.returncode == 2 and "a is in use" in second.stderr
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    _, told = process.communicate(timeout=120)
    assert process.returncode == status and "Traceback" not in told, told
    assert re.search(r"^a is kept up to step \d+: go on with --resume --out a$", told, re.MULTILINE), told
    assert not (folder / "a" / "lock").exists()


@pytest.mark.slow
def test_a_finished_run_goes_on_if_asked_unless_its_checkpoint_is_corrupt(folder: Path) -> None:
    done = run(folder, "config.toml")
    assert done.returncode == 0, done.stderr
    out = folder / "runs" / "tiny-1"
    again = run(folder, "--set", "name=tiny", "--resume")
    assert again.returncode == 0, again.stderr
    assert "runs/tiny-1 is finished: 6 of 6 steps are done" in again.stdout
    longer = run(folder, "--set", "name=tiny", "--resume", "--steps", "8")
    assert longer.returncode == 0 and list(losses(out)) == list(range(1, 9)), longer.stderr
    os.truncate(out / "checkpoint" / "step-00000008" / "rank-0.safetensors", 100)
    broken = run(folder, "--resume", "--out", "runs/tiny-1", "--steps", "9")
    assert broken.returncode == 1 and broken.stdout == ""
    assert "step-00000008 is corrupt" in broken.stderr
    assert len(broken.stderr.splitlines()) == 2


@pytest.mark.slow
def test_other_stages_go_on_from_the_same_checkpoint(folder: Path) -> None:
    assert run(folder, "config.toml", "--out", "a").returncode == 0
    more = ["--resume", "--out", "a", "--steps", "8", "--ranks", "3", "--schedule", "gpipe"]
    done = run(folder, *more, "--set", "pipeline.plan=")
    assert done.returncode == 0, done.stderr
    assert list(losses(folder / "a")) == list(range(1, 9))
    assert json.loads((folder / "a" / "plan.json").read_text())["schedule"] == "gpipe"


@pytest.mark.slow
def test_under_torchrun_each_process_is_a_rank(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pipeloom"]
    done = run(folder, "train", "config.toml", "--out", "a", command=torchrun)
    assert done.returncode == 0, done.stderr
    assert list(losses(folder / "a")) == list(range(1, 7))
    refused = run(folder, "train", "config.toml", "--out", "a", command=torchrun)
    assert refused.returncode != 0 and "error: a holds a run already" in refused.stderr


@pytest.mark.slow
def test_bench(folder: Path) -> None:
    command = [sys.executable, "-m", "pipeloom", "bench", "--steps", "2", "--warmup", "1", "--json"]
    done = run(folder, "--microbatches", "2", "--microbatch-size", "1", command=command)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_per_s"] == pytest.approx(2 * 128 / figures["step_s"])

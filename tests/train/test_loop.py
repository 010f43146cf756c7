"""The training loop: what it writes, shows and stops at; a resumed run equals an uninterrupted one."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import lines

from pipeloom.ir.errors import CheckpointError, PipeloomError
from pipeloom.ir.text import write_whole
from pipeloom.train.config import Config, write_config
from pipeloom.train.loop import TrainOutcome, resume_from, train


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)


@pytest.fixture
def run(plain: Callable, tmp_path: Path) -> Callable[..., TrainOutcome]:
    def run(config: Config, name: str, resume: bool = False, **others: object) -> TrainOutcome:
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        pipeline, workload = plain(config)
        if resume:
            resume_from(out, pipeline, config, workload)
        return train(pipeline, config, workload, out, **{"console": console(), **others})

    return run


def test_each_step_is_one_line(tiny: Config, run: Callable, tmp_path: Path) -> None:
    outcome = run(tiny, "a")
    untrained, *written = lines(tmp_path / "a")
    assert untrained == {"step": 0, "validation_loss": pytest.approx(5.55, abs=0.1)}
    assert [line["step"] for line in written] == list(range(1, 13))
    assert {"loss", "step_s", "rows_per_s", "bubble", "peak_bytes", "grad_norm"} <= written[0].keys()
    assert written[3]["tokens_per_s"] == 4 * 16 / 4.0
    assert [line["step"] for line in written if "validation_loss" in line] == [5, 10, 12]
    assert written[0]["learning_rate"] == pytest.approx(1e-2 / 3)
    assert max(line["learning_rate"] for line in written) == 1e-2
    assert written[-1]["loss"] < written[0]["loss"]
    assert outcome.losses["train"] == [(line["step"], line["loss"]) for line in written]
    assert [step for step, _ in outcome.losses["validation"]] == [0, 5, 10, 12]
    # Step n took n seconds. The middle one of the last five is shown; the first three warm up.
    assert outcome.timeline is not None
    assert (outcome.timeline.step_s, outcome.middle_step_s) == (10.0, 8.0)
    assert (tmp_path / "a" / "checkpoint" / "latest").read_text() == "step-00000012\n"


def test_each_batch_is_made_once(tiny: Config, plain: Callable, tmp_path: Path) -> None:
    pipeline, workload = plain(tiny)
    made: list[int] = []
    counted = dataclasses.replace(workload, train=lambda index: made.append(index) or workload.train(index))
    train(pipeline, tiny, counted, tmp_path, console=console())
    assert made == list(range(12))


def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Config, run: Callable, tmp_path: Path) -> None:
    run(tiny, "whole")

    class Stop(Exception):
        pass

    class Stopping(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step 10/12"):
                raise Stop
            return super().write(text)

    with pytest.raises(Stop):
        run(tiny, "parts", console=Console(file=Stopping(), width=200))
    assert len(lines(tmp_path / "parts")) == 11
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # as a crash while writing leaves it
    outcome = run(tiny, "parts", resume=True)
    assert (outcome.first_step, outcome.steps) == (8, 12)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_resumed_run_trains_at_the_rate_of_its_config(
    tiny: Config, run: Callable, plain: Callable, tmp_path: Path
) -> None:
    run(tiny, "a")
    rates = {"learning_rate": 2e-2, "weight_decay": 0.5}
    changed = dataclasses.replace(tiny, steps=20, optimizer=dataclasses.replace(tiny.optimizer, **rates))
    pipeline, workload = plain(changed)
    taken: list[tuple[float, float]] = []
    step = pipeline.step

    def watched(batch: dict) -> float:
        (group,) = pipeline.optimizer.param_groups
        taken.append((group["lr"], group["weight_decay"]))
        return step(batch)

    pipeline.step = watched
    out = tmp_path / "a"
    resume_from(out, pipeline, changed, workload)
    train(pipeline, changed, workload, out, console=console())
    said = [line["learning_rate"] for line in lines(out) if line["step"] > 12]
    assert taken == [(rate, 0.5) for rate in said] and len(said) == 8


def test_a_run_of_another_job_is_named(tiny: Config, run: Callable, plain: Callable, tmp_path: Path) -> None:
    run(tiny, "a")
    write_whole(tmp_path / "a" / "config.toml", write_config(tiny))
    wider = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, width=2 * tiny.model.width))
    pipeline, workload = plain(wider)
    mine = dataclasses.replace(wider, job="mine.py:job")
    with pytest.raises(CheckpointError, match="of the GPT, not of mine.py:job"):
        resume_from(tmp_path / "a", pipeline, mine, workload)


def test_a_loss_that_is_no_number_stops(tiny: Config, plain: Callable, tmp_path: Path) -> None:
    pipeline, workload = plain(tiny)
    steps = pipeline.steps
    pipeline.steps = lambda batches: (dataclasses.replace(r, loss=float("nan")) for r in steps(batches))
    with pytest.raises(PipeloomError, match="the loss of step 1 is nan"):
        train(pipeline, tiny, workload, tmp_path, console=console())
    assert [line["step"] for line in lines(tmp_path)] == [0]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(
    tiny: Config, run: Callable, terminal: bool
) -> None:
    out = console(terminal)
    run(tiny, "a", console=out)
    printed = out.file.getvalue()
    assert "12/12" in printed and "bubble 25.0 %" in printed and "memory 1.0 MiB | 2.0 MiB" in printed
    if not terminal:
        first, tenth, last = printed.splitlines()
        assert first.startswith("step 1/12  loss 5.") and "64 tokens/s" in first
        assert tenth.startswith("step 10/12  loss ") and "validation" in tenth
        assert last.startswith("step 12/12")
        assert "\x1b" not in printed and "\r" not in printed


def test_only_rank_0_writes(tiny: Config, plain: Callable, tmp_path: Path) -> None:
    pipeline, workload = plain(tiny)
    pipeline.rank = 1
    out = console()
    outcome = train(pipeline, tiny, workload, tmp_path, console=out)
    assert outcome.losses == {} and out.file.getvalue() == ""
    assert not (tmp_path / "metrics.jsonl").exists()

"""Memory curves of a run: what a rank learns late has its own time."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from deep import ACTIVATION, DEPTH, ROWS, TANH
from torch import nn

import pipeloom
from pipeloom import Options, Pipeline
from pipeloom.runtime.recorder import DeviceClock, Recorder


class FarEvent:
    """Stands in for torch.Event: CUDA gives the time between two events in float32, as milliseconds."""

    now_s = 0.0

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None:
        self.at_s = FarEvent.now_s

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FarEvent) -> float:
        return float(np.float32((end.at_s - self.at_s) * 1000.0))


@pytest.mark.parametrize("days", [1, 100])
def test_times_on_a_device_stay_exact_in_a_long_run(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    monkeypatch.setattr(torch, "Event", FarEvent)
    monkeypatch.setattr(FarEvent, "now_s", 0.0)
    recorder = Recorder(0, DeviceClock())
    FarEvent.now_s = days * 86_400.0
    recorder.next_step()
    for step in range(4):  # the last ones of a pipeline that does not drain
        if step:
            recorder.next_step(keep=3)
        FarEvent.now_s += 0.002
        with recorder.record("compute", f"0F{step}"):
            FarEvent.now_s += 0.001
        recorder.level(10)
    events = recorder.events(late_s=0.5)
    assert [e.action for e in events] == ["0F1", "0F2", "0F3"]
    assert [e.duration_s for e in events] == pytest.approx([0.001] * 3, rel=0.01)
    assert [e.start_s - 0.5 for e in events] == pytest.approx([0.002, 0.005, 0.008], rel=0.01)
    assert recorder.step_starts_s == pytest.approx([0.0, 0.003, 0.006], rel=0.01)
    assert recorder.curves()[0].times_s == pytest.approx([0.003, 0.006, 0.009], rel=0.01)
    assert recorder.totals_s(recorder.last) == pytest.approx((0.003, 0.001, 0.0), rel=0.01)


def test_bytes_go_when_their_copy_ends() -> None:
    clock = SimpleNamespace(now=0.0, mark=lambda: clock.now, seconds=lambda start, end: end - start)
    recorder = Recorder(0, clock)
    recorder.level(100)
    clock.now = 2.0
    with recorder.record("compute", "0F1"):
        clock.now = 6.0
    recorder.burst(150)
    recorder.level(130)
    clock.now = 7.0
    recorder.freed(40, 4.0)  # in the middle of the action
    recorder.freed(20, 5.0)
    recorder.level(70)
    curve = recorder.curves()[0]
    assert curve.times_s == pytest.approx([0.0, 2.0, 4.0, 5.0, 6.0, 7.0], abs=0)
    assert list(curve.sizes) == [100, 150, 110, 90, 70, 70]


def test_the_curve_of_a_run_falls_where_its_copies_end(tmp_path: Path) -> None:
    plan = runs.even_plan(TANH, 1, microbatches=4, microbatch_size=ROWS, schedule="gpipe")
    plan, size = runs.treated_plan(TANH, plan, "offload"), DEPTH * ACTIVATION
    with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        pipeline.step(TANH.batch(0, 4 * ROWS))
        timeline = pipeline.measured()
    curve = next(c for c in timeline.memory if c.tier == "device")
    assert list(curve.times_s) == sorted(curve.times_s) and min(curve.sizes) > 0
    levels = list(zip(curve.times_s, curve.sizes, strict=True))
    for event in timeline.events:
        if event.stream == "d2h":
            place = curve.times_s.index(event.end_s)
            assert levels[place - 1][1] - levels[place][1] == size


PACKAGE = str(Path(pipeloom.__file__).parent)


def test_a_step_of_one_stage_takes_few_calls() -> None:
    """Of pipeloom's functions: on a GPU, time in which nothing new is launched."""
    job = pipeloom.Job(
        model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
        loss=lambda output, batch: output.square().mean(),
    )
    plan = pipeloom.plan(job, ranks=1, microbatches=2, microbatch_size=4, cluster="a100-40")
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_qualname}"] += 1

    with pipeloom.Pipeline(job, plan) as pipeline:
        batch = job.batch(1, 8)
        for _ in range(2):  # functions measure their first run, optimizers make their state
            pipeline.step(batch)
        sys.setprofile(count)
        try:
            pipeline.step(batch)
        finally:
            sys.setprofile(None)
    assert 0 < calls.total() <= 350, calls.most_common(30)


def test_a_profiler_sees_actions_by_name() -> None:
    plan = runs.even_plan(TANH, 1, microbatches=2, microbatch_size=ROWS)
    with Pipeline(TANH, plan) as pipeline, torch.profiler.profile() as profiler:
        pipeline.step(TANH.batch(0, 2 * ROWS))
    names = {event.name for event in profiler.events()}
    assert {"0F0", "0B1", "0STEP"} <= names

"""A rank waits for copies to end where its program says so, in a rehearsal as in a step.

Disks here are as slow as can be: a copy ends when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
from deep import ACTIVATION, ROWS, TANH
from ledgers import sends_are_through_at_once

from pipeloom import Options, Pipeline
from pipeloom.forecast import by_stage
from pipeloom.ir.cluster import Link
from pipeloom.ir.errors import MemoryCapError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import cut
from pipeloom.runtime.calibration.rehearsal import ActionTimes, Rehearsal
from pipeloom.runtime.offload.file_tier import FileTier
from pipeloom.runtime.offload.tier import AsyncCopy
from pipeloom.runtime.transports.local_channel import LocalChannel
from pipeloom.simulator.simulate import simulate
from pipeloom.tracer.stage.trace import stage_residuals

COUNT = 6


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    with runs.shared_captures():
        yield


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies follow each other: the end of one is the end of those before it."""
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)
    monkeypatch.setattr("pipeloom.runtime.calibration.link.ECHOES", 3)
    order: dict[int, list[AsyncCopy]] = {}
    ended: set[int] = set()
    start_offload, offload_done = FileTier.start_offload, FileTier.offload_done
    finish_leaving, wait_reload = FileTier.finish_leaving, FileTier.wait_reload

    def begin(self: FileTier, action: str, residuals: Any) -> Any:
        copy = start_offload(self, action, residuals)
        order.setdefault(id(self), []).append(copy)
        return copy

    def end(self: FileTier, copy: AsyncCopy) -> None:
        mine = order[id(self)]
        ended.update(id(each) for each in mine[: mine.index(copy) + 1])

    def wait(self: FileTier, copy: AsyncCopy, check: Callable[[], None]) -> None:
        end(self, copy)
        finish_leaving(self, copy, check)

    def come(self: FileTier, copy: AsyncCopy, check: Callable[[], None]) -> Any:
        end(self, copy)
        return wait_reload(self, copy, check)

    def done(self: FileTier, copy: AsyncCopy) -> bool:
        return id(copy) in ended and offload_done(self, copy)

    monkeypatch.setattr(FileTier, "start_offload", begin)
    monkeypatch.setattr(FileTier, "offload_done", done)
    monkeypatch.setattr(FileTier, "finish_leaving", wait)
    monkeypatch.setattr(FileTier, "wait_reload", come)


def offloading(stages: int) -> tuple[Plan, int]:
    """A plan that offloads everything, and the bytes of one micro-batch on the first stage."""
    captured = runs.capture_of(TANH, ROWS)
    plan = runs.even_plan(TANH, stages, microbatches=COUNT, microbatch_size=ROWS, schedule="gpipe")
    parts = cut(captured.graph, runs.even(captured.graph, stages))
    residuals = [stage_residuals(captured, parts, s) for s in range(stages)]
    policy = MemoryPolicy(stages=tuple(dict.fromkeys(found, "offload") for found in residuals))
    return replace(plan, memory=policy), sum(r.bytes for r in residuals[0].values())


def test_slow_copies_cost_time_but_no_room(tmp_path: Path) -> None:
    """However slow the disk is, a rank holds what the simulator says of a step in which copies never end."""
    plan, size = offloading(1)
    with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        forecast = pipeline.forecast()
        costs = tuple(replace(c, offload_s=1e6, reload_s=1e6) for c in by_stage(forecast.memory()))
        where = forecast.cluster(Link(bandwidth_bytes_per_s=1e15))
        predicted = simulate(forecast.program, forecast.variant.stages, costs, where)
        for step in range(2):  # the first one makes the optimizer's state
            pipeline.step(TANH.batch(step, ROWS * COUNT))
        slowest = pipeline.ledger.peak
        assert slowest <= predicted.peak_bytes(0) < slowest + size
        awaited = {str(a) for a in forecast.program.rows[0] if a.kind == "AWAIT"}
        assert awaited == {e.action for e in pipeline.measured().events if "AWAIT" in e.action}
    with Pipeline(TANH, replace(plan, caps=(slowest,)), options=Options(offload_dir=tmp_path)) as pipeline:
        for step in range(2):
            pipeline.step(TANH.batch(step, ROWS * COUNT))


@pytest.fixture
def even_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions and the link take what is said here: if the link stalls while it is measured, messages pile up
    in the prediction."""
    time_actions = Rehearsal.time_actions

    def evenly(self: Rehearsal, microbatches: int | None = None) -> ActionTimes:
        timed = time_actions(self, microbatches)
        return {action: 1e3 if action.kind == "OFFLOAD" else 1.0 for action in timed}

    monkeypatch.setattr(Rehearsal, "time_actions", evenly)
    link = Link(bandwidth_bytes_per_s=1e15)
    monkeypatch.setattr("pipeloom.forecast.measure_link", lambda *_: link)


@pytest.mark.usefixtures("even_pace")
def test_rehearsals_keep_the_cap(tmp_path: Path) -> None:
    plan, size = offloading(2)

    def expected(rank: int, channel: LocalChannel) -> list[int]:
        with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path), channel=channel) as pipeline:
            forecast, costs = pipeline.forecast(), {}
            for each in channel.all_gather_object(forecast.memory()):
                costs |= each
            slow = tuple(replace(cost, offload_s=1e6, reload_s=1e6) for cost in by_stage(costs))
            where = forecast.cluster(Link(bandwidth_bytes_per_s=1e15))
            predicted = simulate(forecast.program, forecast.variant.stages, slow, where)
            return [predicted.peak_bytes(r) for r in range(2)]

    def rank(index: int, channel: LocalChannel) -> tuple[int, int, int]:
        capped = replace(plan, caps=caps)
        with Pipeline(TANH, capped, options=Options(offload_dir=tmp_path), channel=channel) as pipeline:
            pipeline.step(TANH.batch(0, ROWS * COUNT))
            predicted = pipeline.rehearse()
            rehearsals = pipeline.rehearsals
            assert rehearsals is not None
            pipeline.step(TANH.batch(1, ROWS * COUNT))
            walked = rehearsals._rehearsal.ledger.peak
            return predicted.peak_bytes(index), walked, pipeline.ledger.peak

    assert size > 4 * ACTIVATION
    with sends_are_through_at_once():
        caps = tuple(peak + size // 8 for peak in runs.threads(2, expected)[0])
        for cap, peaks in zip(caps, runs.threads(2, rank), strict=True):
            assert max(peaks) <= cap, (peaks, cap)


def test_what_nothing_makes_room_for_is_refused_before_it_runs(tmp_path: Path) -> None:
    plan, _ = offloading(1)
    with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        pipeline.step(TANH.batch(0, ROWS * COUNT))
        cap = pipeline.ledger.cap_bytes = pipeline.ledger.total + 1000
        with pytest.raises(MemoryCapError) as caught:
            pipeline.step(TANH.batch(1, ROWS * COUNT))
        assert caught.value.message.startswith("rank 0 needs ") and " for 0F0 and holds " in str(caught.value)
        assert "no message under way would make room" in caught.value.message
        assert pipeline.ledger.total <= cap

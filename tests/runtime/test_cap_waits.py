"""Waiting for room under a cap: until copies end where the program says so, in a rehearsal as in a step, and
until sends do. Disks are as slow as can be here: a copy ends when somebody waits for it. As with NCCL, the
wait for a transfer ends before the transfer does."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import runs
from deep import ACTIVATION, ROWS, TANH
from ledgers import sends_are_through_at_once
from torch import Tensor

from pipeloom import Options, Pipeline
from pipeloom.ir.cluster import Link
from pipeloom.ir.errors import MemoryCapError
from pipeloom.ir.plan import Plan
from pipeloom.ir.timeline import Timeline
from pipeloom.runtime import channel, transport
from pipeloom.runtime.file_tier import FileCopy, FileTier
from pipeloom.runtime.rehearsal import ActionTimes, Rehearsal
from pipeloom.runtime.transport import GlooTransport, PendingTransfer
from pipeloom.simulator.simulate import simulate

COUNT = 6


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch, quick_rehearsals: None) -> None:
    """Copies follow each other: the end of one is the end of those before it."""
    order: dict[int, list[FileCopy]] = {}
    ended: set[int] = set()
    offload, gone, leave, take = FileTier.offload, FileCopy.gone, FileCopy.leave, FileCopy.take

    def begin(self: FileTier, action: str, residuals: Any) -> FileCopy:
        copy = offload(self, action, residuals)
        order.setdefault(id(self), []).append(copy)
        return copy

    def end(then: Callable[..., Any], copy: FileCopy, check: Callable[[], None]) -> Any:
        mine = order[id(copy.tier)]
        ended.update(id(each) for each in mine[: mine.index(copy) + 1])
        return then(copy, check)

    monkeypatch.setattr(FileTier, "offload", begin)
    monkeypatch.setattr(FileCopy, "gone", lambda copy: id(copy) in ended and gone(copy))
    monkeypatch.setattr(FileCopy, "leave", lambda *how: end(leave, *how))
    monkeypatch.setattr(FileCopy, "take", lambda *how: end(take, *how))


def offloading(stages: int) -> tuple[Plan, int]:
    """A plan that offloads everything, and the bytes of one micro-batch on the first stage."""
    plan = runs.even_plan(TANH, stages, microbatches=COUNT, microbatch_size=ROWS, schedule="gpipe")
    size = sum(residual.bytes for residual in runs.residuals_of(TANH, plan).values())
    return runs.treated_plan(TANH, plan, "offload"), size


def slowest(pipeline: Pipeline) -> Timeline:
    """As simulated where copies never end."""
    forecast, costs = pipeline.forecast(), {}
    for each in pipeline.channel.all_gather_object(forecast.memory()):
        costs |= each
    slow = tuple(replace(cost, offload_s=1e6, reload_s=1e6) for _, cost in sorted(costs.items()))
    where = forecast.cluster(Link(bandwidth_bytes_per_s=1e15))
    return simulate(forecast.program, forecast.variant.stages, slow, where)


def test_slow_copies_cost_time_but_no_room(tmp_path: Path, slow_disk: None) -> None:
    """However slow the disk is, a rank holds what the simulator says of a step in which copies never end."""
    plan, size = offloading(1)
    with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        predicted = slowest(pipeline).peak_bytes(0)
        for step in range(2):  # the first one makes the optimizer's state
            pipeline.step(TANH.batch(step, ROWS * COUNT))
        peak = pipeline.ledger.peak
        assert peak <= predicted < peak + size
        awaited = {str(a) for a in pipeline.forecast().program.rows[0] if a.kind == "AWAIT"}
        assert awaited == {e.action for e in pipeline.measured().events if "AWAIT" in e.action}
    with Pipeline(TANH, replace(plan, caps=(peak,)), options=Options(offload_dir=tmp_path)) as pipeline:
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
    monkeypatch.setattr("pipeloom.forecast.busy_link", lambda *_, **__: link)


@pytest.mark.usefixtures("slow_disk", "even_pace")
def test_rehearsals_keep_the_cap(tmp_path: Path) -> None:
    plan, size = offloading(2)

    def rank(pipeline: Pipeline) -> tuple[int, int, int]:
        pipeline.step(TANH.batch(0, ROWS * COUNT))
        predicted, rehearsal = pipeline.predict(), pipeline.forecast().rehearsal()
        rehearsal.time_actions()
        pipeline.step(TANH.batch(1, ROWS * COUNT))
        return predicted.peak_bytes(pipeline.rank), rehearsal.ledger.peak, pipeline.ledger.peak

    with sends_are_through_at_once():
        expected = runs.each_rank(TANH, plan, slowest, offload_dir=tmp_path)[0]
        caps = tuple(expected.peak_bytes(rank) + size // 8 for rank in range(2))
        capped = replace(plan, caps=caps)
        for cap, peaks in zip(caps, runs.each_rank(TANH, capped, rank, offload_dir=tmp_path), strict=True):
            assert max(peaks) <= cap, (peaks, cap)


def test_what_nothing_makes_room_for_is_refused_before_it_runs(tmp_path: Path, slow_disk: None) -> None:
    plan, _ = offloading(1)
    with Pipeline(TANH, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        pipeline.step(TANH.batch(0, ROWS * COUNT))
        cap = pipeline.ledger.cap_bytes = pipeline.ledger.total + 1000
        with pytest.raises(MemoryCapError, match="rank 0 needs .* for 0F0 "):
            pipeline.step(TANH.batch(1, ROWS * COUNT))
        assert pipeline.ledger.total <= cap


@dataclass
class OnStream:
    """A send that only a stream waits for. looked: set once somebody has looked often whether it ended."""

    transfer: PendingTransfer
    looked: threading.Event
    looks: int = 0

    def done(self) -> bool:
        self.looks += 1
        if self.looks == 1000:
            self.looked.set()
        return self.transfer.done()

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


def test_each_send_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver takes nothing before the sender has waited long."""
    looked = threading.Event()
    send, receive = GlooTransport.send, GlooTransport.receive
    plan = runs.even_plan(TANH, 2, microbatches=COUNT, microbatch_size=ROWS, schedule="gpipe")
    batches = [TANH.batch(step, ROWS * COUNT) for step in range(2)]

    def lowest(pipeline: Pipeline) -> int:
        for batch in batches:
            pipeline.step(batch)
        return pipeline.ledger.peak

    def late(self: GlooTransport, buffer: Tensor, source: int, index: int) -> PendingTransfer:
        assert self.rank == 0 or looked.wait(300)
        return receive(self, buffer, source, index)

    def tight(pipeline: Pipeline) -> int:
        pipeline.step(batches[0])
        if pipeline.rank == 0:
            pipeline.ledger.cap_bytes = cap
            monkeypatch.setattr(GlooTransport, "receive", late)
            monkeypatch.setattr(GlooTransport, "send", lambda *how: OnStream(send(*how), looked))
        pipeline.channel.all_gather_object(None)
        pipeline.step(batches[1])
        return [event.action for event in pipeline.recorder.events()].count("ROOM")

    for module in (channel, transport):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    with sends_are_through_at_once():
        cap = runs.each_rank(TANH, plan, lowest)[0] + ACTIVATION // 2
    waits = runs.each_rank(TANH, plan, tight)[0]
    assert looked.is_set() and 0 < waits <= COUNT, waits

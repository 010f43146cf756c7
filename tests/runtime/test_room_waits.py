"""Waiting for room under a cap where, as with NCCL, the wait for a transfer ends before the transfer does."""

from __future__ import annotations

import threading

import pytest
import runs
from deep import ACTIVATION, ROWS, TANH
from ledgers import sends_are_through_at_once
from torch import Tensor

from pipeloom import Pipeline
from pipeloom.runtime import posted_channel
from pipeloom.runtime.transports.local_channel import LocalChannel, LocalTransport
from pipeloom.runtime.transports.transport import PendingTransfer

COUNT = 6


class OnStream:
    """A send that only a stream waits for. looked: set once somebody has looked often whether it ended."""

    def __init__(self, transfer: PendingTransfer, looked: threading.Event) -> None:
        self._transfer = transfer
        self._looked = looked
        self._looks = 0

    def done(self) -> bool:
        self._looks += 1
        if self._looks == 1000:
            self._looked.set()
        return self._transfer.done()

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


def test_each_send_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver takes nothing before the sender has waited long."""
    looked = threading.Event()
    send, receive = LocalTransport.send, LocalTransport.receive
    plan = runs.even_plan(TANH, 2, microbatches=COUNT, microbatch_size=ROWS, schedule="gpipe")
    batches = [TANH.batch(step, ROWS * COUNT) for step in range(2)]

    def lowest(rank: int, channel: LocalChannel) -> int:
        with Pipeline(TANH, plan, channel=channel) as pipeline:
            for batch in batches:
                pipeline.step(batch)
            return pipeline.ledger.peak

    def late(self: LocalTransport, buffer: Tensor, source: int, index: int | None) -> PendingTransfer:
        assert self.rank == 0 or looked.wait(300)
        return receive(self, buffer, source, index)

    def on_stream(self: LocalTransport, buffer: Tensor, target: int, index: int | None) -> PendingTransfer:
        return OnStream(send(self, buffer, target, index), looked)

    def tight(rank: int, channel: LocalChannel) -> int:
        with Pipeline(TANH, plan, channel=channel) as pipeline:
            pipeline.step(batches[0])
            if rank == 0:
                pipeline.ledger.cap_bytes = cap
                monkeypatch.setattr(LocalTransport, "receive", late)
                monkeypatch.setattr(LocalTransport, "send", on_stream)
            channel.all_gather_object(None)
            pipeline.step(batches[1])
            return [action for _, action, *_ in pipeline.recorder.marks].count("ROOM")

    monkeypatch.setattr(posted_channel, "SMALL_BYTES", 0)
    with runs.shared_captures():
        with sends_are_through_at_once():
            cap = runs.threads(2, lowest)[0] + ACTIVATION // 2
        waits = runs.threads(2, tight)[0]
    assert looked.is_set() and 0 < waits <= COUNT, waits

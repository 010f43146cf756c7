"""Transfers that a device's stream waits for: no thread is blocked, so somebody must look at the time."""

import threading

import pytest

from pipeloom.runtime.failure.noticeboard import local_boards
from pipeloom.runtime.failure.watch import Watch
from pipeloom.runtime.transports.nccl import StreamWatchdog


class Transfer:
    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def is_completed(self) -> bool:
        return self._ends


def test_a_transfer_that_does_not_end_fails_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    board, other = local_boards(2)
    watch = Watch(board)
    known = threading.Event()
    watch.on_failure(known.set)
    watch.__enter__()
    lookout = StreamWatchdog(watch, timeout_s=0.1)
    lookout.add(Transfer(ends=True), "message 6 from rank 1")
    lookout.add(Transfer(ends=False), "message 7 from rank 1")
    assert known.wait(300)
    lookout._thread.join(300)  # it prints once the failure is known
    lookout.close()
    assert other.failure is not None and other.failure.rank == 0
    assert other.failure.summary.endswith("s for message 7 from rank 1")
    assert "rank  does  waits for" in capfd.readouterr().err


def test_a_transfer_that_ends_is_forgotten() -> None:
    board, _ = local_boards(2)
    lookout = StreamWatchdog(Watch(board), timeout_s=0.1)
    lookout.add(Transfer(ends=True), "message 6 from rank 1")
    assert board.wait_for_failure(0.6) is None
    lookout.close()

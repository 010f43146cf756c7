"""Memory of the device: out of the CPU's reach, poisoned when freed, freed in the order of its stream."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable

import pytest
import standin
import torch

DEVICE = "standin"


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def last_words(touch: Callable[[], object]) -> str:
    """What a copy of this process says that dies of touching memory."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 2)
        faulthandler.disable()  # pytest's stands before the stand-in's handler
        touch()
        os._exit(0)
    os.close(write)
    with open(read) as said:
        errors = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    return errors


def test_the_cpu_cannot_touch_it() -> None:
    x, pinned = torch.ones(4096, device=DEVICE), torch.zeros(4096, pin_memory=True)
    current().synchronize()
    assert "touched memory of the device" in last_words(lambda: ctypes.string_at(x.data_ptr(), 4))
    pinned.copy_(x, non_blocking=True)
    assert "touched pinned memory under a copy" in last_words(pinned.sum)


def test_an_early_free_is_reported_with_the_op_that_may_still_read() -> None:
    x, other = torch.ones(100, device=DEVICE), stream()
    other.wait_stream(current())
    with other:
        x * 2
    del x
    with pytest.raises(
        RuntimeError, match="early free: 512 bytes go back to stream 0 .* while mul on stream"
    ):
        torch.ones(1, device=DEVICE)
    standin.reports.clear()


def test_what_is_freed_is_poison_to_who_still_reads_it() -> None:
    x, other, gate = torch.ones(100, device=DEVICE), stream(), threading.Event()
    other.wait_stream(current())
    standin.launch(other, "gate", gate.wait)
    with standin.collecting() as found:
        with other:
            late = x * 2
        del x
        current().synchronize()  # the memory is poison now
        gate.set()
        other.synchronize()
        assert late.isnan().all().item()
    assert "early free" in {one.kind for one in found}


def test_events_and_streams_do_not_pile_up() -> None:
    for _ in range(1000):
        torch.Event(device=DEVICE).record()
    assert len({stream().stream_id for _ in range(600)}) < 256

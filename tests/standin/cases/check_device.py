"""The rules of the device. A use of memory that is not ordered behind the last one is an error at its call,
whatever ran first. Memory is out of the CPU's reach, poisoned when freed, freed in the order of its stream.
Each time that the host waits is counted, with its line."""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import standin
import torch
from torch import Tensor

DEVICE = "standin"


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def refused(*words: str) -> object:
    """The next block is a race with these words in its text."""
    return pytest.raises(RuntimeError, match=".*".join(("race:", *words)))


def forget() -> None:
    standin.reports.clear()


def test_it_does_not_depend_on_what_ran_first() -> None:
    """The first kernel is over long before the second one is enqueued; and the other way round."""
    x, other = torch.ones(100, device=DEVICE), stream()
    time.sleep(0.05)  # and the host has not asked whether it is over
    with other, refused("reads"):
        x * 2
    assert "check_device.py:" in standin.reports[0].place
    gate = threading.Event()
    standin.launch(current(), "gate", gate.wait)
    y = torch.ones(100, device=DEVICE)
    other.wait_stream(current())
    with other:
        y * 2  # waits on the device, not here
    current().wait_stream(other)
    gate.set()
    forget()


def test_an_event_orders_what_was_before_it_only() -> None:
    x, event, other = torch.ones(8, device=DEVICE), torch.Event(device=DEVICE), stream()
    event.record()
    y = torch.ones(8, device=DEVICE)
    other.wait_event(event)
    with other:
        x + 1
        with refused("reads 32 bytes that fill_"):
            y + 1
    forget()
    current().wait_stream(other)


def test_memory_is_taken_in_the_order_of_its_stream() -> None:
    x, other = torch.empty(8, device=DEVICE), stream()
    with other, refused("allocation on stream 0"):
        x.zero_()
    forget()


def test_parts_of_one_block_are_apart() -> None:
    x, other = torch.zeros(100, device=DEVICE), stream()
    other.wait_stream(current())
    with other:
        x[:50].fill_(1)
    x[50:].fill_(2)
    with refused("writes"):
        x[49:51].fill_(3)
    forget()
    current().wait_stream(other)
    assert x.sum().item() == 150


def test_events_tell_the_time_between_them() -> None:
    begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    standin.launch(current(), "pause", lambda: threading.Event().wait(0.02))
    end.record()
    end.synchronize()
    assert 15 < begin.elapsed_time(end) < 5000


def test_a_failed_kernel_is_reported_at_a_later_call() -> None:
    x = torch.ones(4, device=DEVICE)
    y = x[torch.tensor([9], device=DEVICE)]
    with pytest.raises(RuntimeError, match="a kernel failed on stream 0 of standin:0: index"):
        y.sum().item()


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


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: float(x[0]),
    "copy to the host": lambda x: x.cpu(),
    "copy from pageable memory": lambda x: torch.zeros(8).to(DEVICE),
    "nonzero": lambda x: torch.nonzero(x),
    "equal": lambda x: torch.equal(x, x),
    "stream.synchronize": lambda x: torch.accelerator.current_stream().synchronize(),
    "device.synchronize": lambda x: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted_with_file_and_line(what: str) -> None:
    x = torch.ones(8, device=DEVICE)
    with standin.counted_syncs() as waits:
        WAITS[what](x)
    assert [wait.text for wait in waits] == [what]
    assert waits[0].place.rpartition("/")[2].startswith("check_device.py:")


def test_a_pageable_copy_waits_though_it_should_not_block() -> None:
    with standin.counted_syncs() as waits:
        torch.zeros(8).to(DEVICE, non_blocking=True)
        torch.tensor(1.0, device=DEVICE)
    assert len(waits) == 2

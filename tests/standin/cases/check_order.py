"""A use of memory that is not ordered behind the last one is an error at its call, whatever ran first."""

from __future__ import annotations

import threading
import time

import pytest
import standin
import torch

DEVICE = "standin"


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def beside() -> torch.Stream:
    """Behind all that the default stream was given so far."""
    other = stream()
    other.wait_stream(current())
    return other


def refused(*words: str) -> object:
    """The next block is a race with these words in its text."""
    return pytest.raises(RuntimeError, match=".*".join(("race:", *words)))


def forget() -> None:
    standin.reports.clear()


def test_a_read_before_the_write_is_reported_with_both_ops_and_streams() -> None:
    x, other = torch.ones(100, device=DEVICE), stream()
    with other, refused("mul on stream", "reads 400 bytes that fill_ on stream 0 of standin:0 writes"):
        x * 2
    assert standin.reports[0].kind == "race" and "check_order.py:" in standin.reports[0].place
    forget()


def test_it_does_not_depend_on_what_ran_first() -> None:
    """The first kernel is over long before the second one is enqueued; and the other way round."""
    x, other = torch.ones(100, device=DEVICE), stream()
    time.sleep(0.05)  # and the host has not asked whether it is over
    with other, refused("reads"):
        x * 2
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


def test_parts_of_one_block_are_apart(beside: torch.Stream) -> None:
    x = torch.zeros(100, device=DEVICE)
    beside.wait_stream(current())
    with beside:
        x[:50].fill_(1)
    x[50:].fill_(2)
    with refused("writes"):
        x[49:51].fill_(3)
    forget()
    current().wait_stream(beside)
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

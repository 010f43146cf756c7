"""Ctrl-C ends a wait that Python's own handling cannot reach."""

import signal
import threading

import pytest

from pipeloom.runtime.failure.ctrl_c import CtrlC


def test_a_blocked_wait_is_interrupted() -> None:
    interrupted = threading.Event()
    ctrl_c = CtrlC(lambda: True, interrupted.set)
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupted.wait(300)
    ctrl_c.stop()
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor is given back"


def test_a_thread_that_runs_python_code_needs_no_help() -> None:
    interrupted = threading.Event()
    ctrl_c = CtrlC(lambda: False, interrupted.set)
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    ctrl_c.stop()  # its thread has ended then
    assert not interrupted.is_set()


def test_a_handler_of_the_users_is_left_alone() -> None:
    interrupted = threading.Event()
    ctrl_c = CtrlC(lambda: True, interrupted.set)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        ctrl_c.start()
        signal.raise_signal(signal.SIGINT)
        ctrl_c.stop()  # its thread has ended then
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupted.is_set()


def test_a_wake_up_descriptor_in_use_is_left_alone() -> None:
    first = CtrlC(lambda: True, lambda: None)
    first.start()
    second = CtrlC(lambda: True, lambda: None)
    second.start()
    second.stop()
    before = signal.set_wakeup_fd(-1)
    assert before != -1, "the first one still has it"
    signal.set_wakeup_fd(before)
    first.stop()


def test_other_threads_start_nothing() -> None:
    ctrl_c = CtrlC(lambda: True, lambda: None)
    thread = threading.Thread(target=ctrl_c.start)
    thread.start()
    thread.join()
    ctrl_c.stop()
    assert signal.set_wakeup_fd(-1) == -1

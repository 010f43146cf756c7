"""A script that closes nothing ends well, keeps what it has in its globals, and tells what it ended with.
Ctrl-C ends a wait that Python's own handling cannot reach."""

import signal
import sys
import textwrap
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import nets
import pytest
import runs
from boards import local_boards
from processes import ends_of, start_ranks

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import CommunicationError, PipeloomError
from pipeloom.runtime import connect
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.watch import CtrlC, Watch, shorten_peer_errors

SCRIPT = textwrap.dedent(
    """
    import atexit, sys, threading

    def last():  # registered first, so called last
        print("at exit:", *(name for name in KEPT if globals().get(name) is None))
        print("threads:", *(t.name for t in threading.enumerate() if "pipeloom" in t.name))

    atexit.register(last)
    KEPT = ["pipeline", "group", "mesh", "views"]
    import plain_net, runs
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from pipeloom import Options, Pipeline

    mesh = False
    if sys.argv[1] == "theirs":
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    job = plain_net.two_linears()
    plan = runs.even_plan(job, 2, microbatches=2)
    pipeline = Pipeline(job, plan, options=Options(compare=False), group=mesh or None)
    group = dist.group.WORLD
    atexit.register(lambda: print("initialised:", dist.is_initialized()))
    for step in range(2):
        pipeline.step(job.batch(step, 4))
    views = [p.view(-1) for p in pipeline.weights.params.values()]
    if sys.argv[1] == "fails" and pipeline.rank == 1:
        raise ValueError("no such luck")
    if sys.argv[1] == "fails":
        pipeline.step(job.batch(3, 4))
    """
)


@pytest.mark.sampled("ours")
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_it_ends_with_status_0_and_keeps_its_globals(kind: str) -> None:
    for status, output, errors in ends_of(*start_ranks(2, "-c", SCRIPT, kind)):
        assert (status, errors) == (0, "")
        assert output.splitlines() == ["initialised: True", "at exit:", "threads:"]


@pytest.mark.slow
def test_what_it_ends_with_is_told_to_the_others() -> None:
    waiting, failed = ends_of(*start_ranks(2, "-c", SCRIPT, "fails"))
    assert failed[0] == 1 and failed[2].count("Traceback") == 1 and "no such luck" in failed[2]
    assert waiting[0] == 1 and "rank 1 failed: ValueError: no such luck" in waiting[2]


@pytest.fixture
def nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a script."""
    monkeypatch.setattr(connect, "_OPEN", WeakSet())
    monkeypatch.setattr("pipeloom.runtime.watch.UNCAUGHT", uncaught := [])
    monkeypatch.setattr(connect, "UNCAUGHT", uncaught)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)


def watches(count: int) -> list[Watch]:
    made = [Watch(board) for board in local_boards(count)]
    for watch in made:
        watch.__enter__()
        connect.close_at_exit(watch)
    return made


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("uncaught", [False, True])
def test_a_script_ends_with_an_error_that_nobody_has_handled(monkeypatch, uncaught) -> None:
    """IPython and pytest leave those that were handled in `sys.last_value`."""
    error = ValueError("no such luck")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watch, _ = watches(2)
    shorten_peer_errors()
    if uncaught:
        sys.excepthook(ValueError, error, None)
    connect._leave_ranks()
    failure = watch._board.failure
    assert (failure is not None and "no such luck" in failure.summary) == uncaught


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("error", [OSError("disk"), CommunicationError("lost")])
def test_an_error_of_one_pipeline_leaves_no_other_open(monkeypatch, error) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(connect._OURS, "is_set", lambda: True)
    monkeypatch.setattr(connect.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(connect.dist, "destroy_process_group", lambda: ended.append("groups"))
    for watch in watches(3):
        watch.on_exit(partial(ended.append, watch.rank))
        watch.on_exit(Mock(side_effect=error))
    with suppress(OSError):
        connect._leave_ranks()
    assert sorted(ended[:-1]) == [0, 1, 2] and ended[-1] == "groups"


@pytest.mark.usefixtures("nothing_open")
def test_what_is_offloaded_to_is_closed_too(tmp_path: Path) -> None:
    job = nets.job("skips")
    plan = runs.treated_plan(job, runs.even_plan(job, 1, microbatches=2, schedule="gpipe"), "offload")
    before = threading.enumerate()
    pipeline = Pipeline(job, plan, options=Options(offload_dir=tmp_path))
    pipeline.step(job.batch(0, 4))
    threads = {thread for thread in threading.enumerate() if thread not in before}
    connect._leave_ranks()
    assert threads and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_may_close_again_and_do_nothing_after_that(ranks: int) -> None:
    job = nets.job("skips")
    plan = runs.even_plan(job, ranks, microbatches=2)

    def rank(_: int, channel: Channel) -> None:
        with Pipeline(job, plan, channel=channel) as pipeline:
            pipeline.close()
        with pytest.raises(PipeloomError, match="closed"):
            pipeline.step(job.batch(0, 4))

    runs.threads(ranks, rank, timeout_s=60.0)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("blocked", [True, False])
def test_a_blocked_wait_is_interrupted(blocked: bool, own: bool) -> None:
    """One in Python code is left alone, and so is a handler of the user's own."""
    interrupted = threading.Event()
    ctrl_c = CtrlC(lambda: blocked, interrupted.set)
    before = signal.signal(signal.SIGINT, (lambda *_: None) if own else signal.default_int_handler)
    try:
        ctrl_c.start()
        with nullcontext() if own else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert own or not blocked or interrupted.wait(300)
        ctrl_c.stop()  # its thread has ended then
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set() == (blocked and not own)
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor is given back"


def test_it_starts_neither_in_other_threads_nor_where_somebody_else_listens() -> None:
    first, second = CtrlC(lambda: True, lambda: None), CtrlC(lambda: True, lambda: None)
    thread = threading.Thread(target=first.start)
    thread.start()
    thread.join()
    first.stop()
    assert signal.set_wakeup_fd(-1) == -1
    first.start()
    second.start()
    second.stop()
    before = signal.set_wakeup_fd(-1)
    assert before != -1, "the first one still has it"
    signal.set_wakeup_fd(before)
    first.stop()

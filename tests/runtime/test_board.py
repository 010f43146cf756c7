"""How ranks learn of a failure: boards on a store, silent ranks, the table of who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zoo
from boards import local_boards
from runs import capture_of, even_plan, threads

from pipeloom import Pipeline
from pipeloom.ir.errors import CommunicationError, PeerError
from pipeloom.runtime import checkpoint
from pipeloom.runtime.board import FINISHED, Board, Failure, RankStatus, who_waits
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.watch import Watch

BOOM = Failure(rank=1, summary="ValueError: boom", traceback="Traceback ...")


def served() -> dist.TCPStore:
    limit = timedelta(seconds=300)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Three boards with connections of their own."""
    store = served()
    made = [Board(dist.PrefixStore("x", store), r, 3, interval_s=0.05, lost_s=0.5) for r in range(3)]
    yield made
    for board in made:
        board.stop()


def test_all_ranks_see_what_each_posted(boards: list[Board]) -> None:
    boards[0].start(lambda: RankStatus(doing="0F1"), print)
    boards[2].start(
        lambda: RankStatus(waits_for="1SEND_B0>0 from rank 1", waits_on=(1,), waiting_s=1.5), print
    )
    first, second, third = boards[1].statuses()
    assert first is not None and (first.doing, first.waits_for) == ("0F1", "")
    assert second is None or second.doing == "", "rank 1 posts only itself, by asking"
    assert third is not None and (third.waits_on, third.waiting_s) == ((1,), 1.5)


def test_a_failure_reaches_all_ranks_and_the_first_one_wins(boards: list[Board]) -> None:
    heard: list[Failure] = []
    told = threading.Event()

    def failed(failure: Failure) -> None:
        heard.append(failure)
        told.set()

    boards[0].start(RankStatus, failed)
    assert boards[1].announce(BOOM) == BOOM
    assert boards[2].announce(Failure(rank=2, summary="later")) == BOOM
    assert told.wait(300)
    assert heard == [BOOM]
    assert boards[0].failure == BOOM


def test_waiting_for_a_failure_asks_the_store_itself(boards: list[Board]) -> None:
    assert boards[0].wait_for_failure(0.01) is None
    boards[1].announce(BOOM)
    assert boards[0].wait_for_failure(300) == BOOM


def test_a_rank_that_falls_silent_has_failed(boards: list[Board]) -> None:
    boards[1].start(RankStatus, print)
    boards[1].stop()  # it no longer posts, and has not said that it finished
    boards[0].start(RankStatus, print)
    failure = boards[2].wait_for_failure(15)
    assert failure is not None and failure.rank == 1
    assert failure.summary.startswith("no sign of life for 0.5 s")
    assert [line.split()[0] for line in failure.table.splitlines()] == ["rank", "0", "1", "2"]


def test_a_rank_that_finished_may_fall_silent(boards: list[Board]) -> None:
    boards[1].start(lambda: RankStatus(doing=FINISHED), print)
    boards[1].stop()
    boards[0].start(RankStatus, print)
    assert boards[0].wait_for_failure(1.5) is None


def test_a_store_that_goes_away_is_a_failure() -> None:
    store = served()
    board = Board(store, 0, 2, interval_s=0.05)
    del store
    failure = board.wait_for_failure(300)
    assert failure is not None and failure.rank is None
    assert failure.summary.startswith("the store that joins the ranks cannot be reached: ")
    assert board.statuses() == [None, None]
    assert board.announce(BOOM) == failure, "what was known first counts"


class FrozenStore:
    """A store whose server does not answer any more."""

    def __init__(self) -> None:
        self.frozen = threading.Event()
        self.thawed = threading.Event()
        self._store = dist.HashStore()

    def __getattr__(self, call: str) -> Any:
        if self.frozen.is_set():
            assert self.thawed.wait(60), "for ever, were it not for this test"
        return getattr(self._store, call)


def test_a_store_that_does_not_answer_is_a_failure_and_holds_up_nobody() -> None:
    """Who serves it may be frozen. The side thread waited for it for ever, and whoever asked the board waited
    for the side thread. What was last heard of the others is told."""
    store = FrozenStore()
    boards = [Board(store, r, 3, interval_s=0.02, lost_s=0.5, server=0) for r in range(3)]
    known = threading.Event()
    for rank, board in enumerate(boards):
        board.start(lambda rank=rank: RankStatus(doing=f"{rank}F1"), lambda _: known.set())  # type: ignore[misc]
    for board in boards:
        while any(status is None for status in board.statuses()):
            time.sleep(0.01)
    store.frozen.set()
    begin = time.monotonic()
    assert known.wait(50)
    for board in boards[1:]:
        while board.failure is None:
            time.sleep(0.01)
        assert board.failure.rank == 0 and board.failure.found_by == board.rank
        assert board.failure.summary.startswith(
            "the store that joins the ranks, which it serves, has not answered for 0.5 s: "
        )
        assert [line.split()[:2] for line in board.failure.table.splitlines()[1:]] == [
            ["0", "0F1"],
            ["1", "1F1"],
            ["2", "2F1"],
        ]
        assert [status.doing for status in board.statuses() if status] == ["0F1", "1F1", "2F1"]
        assert board.announce(BOOM) == board.failure, "what was known first counts"
    for board in boards:
        board.stop()
    assert time.monotonic() - begin < 55, "no call waited for the store"
    store.thawed.set()


def test_who_was_frozen_itself_blames_nobody() -> None:
    """After Ctrl-Z of a whole run every rank finds that none has posted for long."""
    store = FrozenStore()
    board, other = (Board(store, r, 2, lost_s=5.0) for r in range(2))
    other.start(RankStatus, print)
    other.stop()
    for own_pause_s, blames in ((100, False), (0, True)):
        board._exchange()
        board._heard[1] = board._heard[1]._replace(at_s=time.monotonic() - 100)
        board._exchanged_s = time.monotonic() - own_pause_s
        board._exchange()
        assert (board.failure is not None) == blames
    board.stop()


def test_a_broken_wait_that_nobody_explains_says_so(boards: list[Board]) -> None:
    def block() -> None:
        raise ConnectionError("closed by peer")

    with pytest.raises(CommunicationError) as found:
        Watch(boards[0], cause_timeout_s=0.1).wait("1SEND_B0>0 from rank 1", (1,), block)
    assert found.value.message == (
        "rank 0 lost its connection while it waited for 1SEND_B0>0 from rank 1, "
        "and no rank said why: closed by peer"
    )
    assert boards[2].wait_for_failure(300) is not None, "the others are told"


def test_a_rank_that_ended_early_is_named(boards: list[Board]) -> None:
    def block() -> None:
        raise ConnectionError("closed by peer")

    with Watch(boards[1]):
        pass
    with pytest.raises(CommunicationError) as found:
        Watch(boards[0], cause_timeout_s=0.1).wait("a sum over all ranks", (1, 2), block)
    assert found.value.hint is not None and "rank 1 has closed" in found.value.hint


@pytest.mark.parametrize("waits_for", [{1: 0}, {1: 0, 2: 1}, {1: 2, 2: 3, 3: 0}])
def test_who_waits_for_a_rank_that_has_finished_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, waits_for: dict[int, int]
) -> None:
    """As where the script of the rank that serves the store ends early; or for who waits for that one."""
    monkeypatch.setattr("pipeloom.runtime.watch.STUCK_S", 0.0)
    first, *others = local_boards(1 + len(waits_for))
    waits, told, ended = threading.Semaphore(0), threading.Event(), []

    def block() -> None:
        waits.release()
        raise ConnectionError if told.wait(20) else TimeoutError

    def wait(board: Board) -> None:
        with pytest.raises((PeerError, CommunicationError)) as caught, Watch(board) as watch:
            watch.on_failure(told.set)
            watch.wait("a sum over all ranks", (waits_for[board.rank],), block)
        ended.append(caught.type)

    threads = [threading.Thread(target=wait, args=(board,)) for board in others]
    for thread in threads:
        thread.start()
    with pytest.raises(CommunicationError, match="finished"), Watch(first, hosts_store=True):
        assert all(waits.acquire(timeout=300) for _ in others)
    for thread in threads:
        thread.join(300)
    assert ended == [PeerError] * len(others)


def waiting(doing: str, what: str, *ranks: int) -> RankStatus:
    return RankStatus(doing=doing, waits_for=what, waits_on=ranks, waiting_s=2.04)


def test_a_circle_is_named() -> None:
    states = [
        RankStatus(doing="0F7"),
        waiting("1B0", "2SEND_B0>1 from rank 3", 3),
        None,
        waiting("2F11", "1SEND_F11>2 from rank 1", 1),
    ]
    assert who_waits(states) == (
        "rank  does  waits for\n"
        "0     0F7   -\n"
        "1     1B0   2SEND_B0>1 from rank 3, for 2.0 s\n"
        "2     ?     (it has not said anything yet)\n"
        "3     2F11  1SEND_F11>2 from rank 1, for 2.0 s\n"
        "rank 1 -> rank 3 -> rank 1: they wait for each other"
    )


@pytest.mark.parametrize(
    "states",
    [
        [waiting("a", "x", 1), waiting("b", "y", 2), RankStatus(doing="c")],
        # Behind a link that was cut: what it waits for now is not known, and it is the cause.
        [waiting("a", "x", 1), replace(waiting("b", "y", 0), silent_s=15.0)],
        [waiting("a", "a sum over all ranks", 1, 2), waiting("b", "a sum over all ranks", 0, 2), None],
    ],
    ids=["a chain", "a silent rank", "all ranks"],
)
def test_what_is_no_circle(states: list[RankStatus | None]) -> None:
    table = who_waits(states)
    assert "each other" not in table
    assert ("(silent for 15 s)" in table) == any(state and state.silent_s for state in states)


# Collectives outside a step: who is blamed when one fails.


def test_the_rank_that_went_is_named_and_not_who_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zoo.job("skips")
    plan, captured = even_plan(job, 2, microbatches=2), capture_of(job)
    saves, prepare = threading.Event(), checkpoint.files.prepare

    def prepared(directory: Path, step: int) -> Path:
        saves.set()
        return prepare(directory, step)

    monkeypatch.setattr(checkpoint.files, "prepare", prepared)

    def rank(index: int, channel: Channel) -> str:
        try:
            with Pipeline(job, plan, channel=channel, captured=captured) as pipeline:
                if index == 0:
                    pipeline.save(tmp_path)
                assert saves.wait(60)
                raise SystemExit("it goes")
        except (SystemExit, PeerError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    survivor, lost = threads(2, rank, timeout_s=60)
    assert survivor == "PeerError: rank 1 failed: SystemExit: it goes"
    assert lost == "SystemExit: it goes"
    assert not list(tmp_path.glob("step-????????"))

"""Boards on a store: what ranks post, the first failure, and ranks that fall silent."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipeloom.ir.errors import CommunicationError, PeerError
from pipeloom.runtime.failure.noticeboard import Failure, Noticeboard, StoreBoard, local_boards
from pipeloom.runtime.failure.rank_status import FINISHED, RankStatus
from pipeloom.runtime.failure.watch import Watch

BOOM = Failure(rank=1, summary="ValueError: boom", traceback="Traceback ...")


@pytest.fixture
def store() -> dist.TCPStore:
    limit = timedelta(seconds=300)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)


@pytest.fixture
def boards(store: dist.TCPStore) -> Iterator[list[StoreBoard]]:
    """Three boards with connections of their own."""
    made = [StoreBoard(dist.PrefixStore("x", store), r, 3, interval_s=0.05, lost_s=0.5) for r in range(3)]
    yield made
    for board in made:
        board.stop()


def test_all_ranks_see_what_each_posted(boards: list[StoreBoard]) -> None:
    boards[0].start(lambda: RankStatus(doing="0F1"), print)
    boards[2].start(
        lambda: RankStatus(waits_for="1SEND_B0>0 from rank 1", waits_on=(1,), waiting_s=1.5), print
    )
    first, second, third = boards[1].statuses()
    assert first is not None and (first.doing, first.waits_for) == ("0F1", "")
    assert second is None or second.doing == "", "rank 1 posts only itself, by asking"
    assert third is not None and (third.waits_on, third.waiting_s) == ((1,), 1.5)


def test_a_failure_reaches_all_ranks_and_the_first_one_wins(boards: list[StoreBoard]) -> None:
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


def test_waiting_for_a_failure_asks_the_store_itself(boards: list[StoreBoard]) -> None:
    assert boards[0].wait_for_failure(0.01) is None
    boards[1].announce(BOOM)
    assert boards[0].wait_for_failure(300) == BOOM


def test_a_rank_that_falls_silent_has_failed(boards: list[StoreBoard]) -> None:
    boards[1].start(RankStatus, print)
    boards[1].stop()  # it no longer posts, and has not said that it finished
    boards[0].start(RankStatus, print)
    failure = boards[2].wait_for_failure(15)
    assert failure is not None and failure.rank == 1
    assert failure.summary.startswith("no sign of life for 0.5 s")
    assert [line.split()[0] for line in failure.table.splitlines()] == ["rank", "0", "1", "2"]


def test_a_rank_that_finished_may_fall_silent(boards: list[StoreBoard]) -> None:
    boards[1].start(lambda: RankStatus(doing=FINISHED), print)
    boards[1].stop()
    boards[0].start(RankStatus, print)
    assert boards[0].wait_for_failure(1.5) is None


def test_a_store_that_goes_away_is_a_failure() -> None:
    limit = timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    board = StoreBoard(store, 0, 2, interval_s=0.05)
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
        self._values: dict[str, str] = {}

    def _answer(self) -> None:
        if self.frozen.is_set():
            assert self.thawed.wait(60), "for ever, were it not for this test"

    def set(self, key: str, value: str) -> None:
        self._answer()
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self._answer()
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._answer()
        return self._values.setdefault(key, desired_value).encode()


def test_a_store_that_freezes_is_known_within_the_limit() -> None:
    """The side thread waited for it for ever, and whoever asked the board waited for the side thread."""
    store = FrozenStore()
    board = StoreBoard(store, 1, 2, interval_s=0.02, lost_s=0.3, server=0)
    known = threading.Event()
    board.start(RankStatus, lambda _: known.set())
    store.frozen.set()
    try:
        assert known.wait(15), "nobody was told"
        assert board.failure is not None and board.failure.rank == 0
        assert "has not answered for 0.3 s" in board.failure.summary
        assert len(board.statuses()) == 2
    finally:
        store.thawed.set()
        board.stop()


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_a_failure_and_holds_up_nobody() -> None:
    """Who serves it may be frozen. What was last heard of the others is told."""
    store = FrozenStore()
    boards = [StoreBoard(store, r, 3, interval_s=0.02, lost_s=1.0, server=0) for r in range(3)]
    known = threading.Event()
    for rank, board in enumerate(boards):
        board.start(lambda rank=rank: RankStatus(doing=f"{rank}F1"), lambda _: known.set())  # type: ignore[misc]
    for board in boards:
        while any(status is None for status in board.statuses()):
            pass
    store.frozen.set()
    begin = time.monotonic()
    assert known.wait(50)
    for board in boards[1:]:
        while board.failure is None:
            time.sleep(0.01)
        assert board.failure.rank == 0 and board.failure.found_by == board.rank
        assert board.failure.summary.startswith(
            "the store that joins the ranks, which it serves, has not answered for 1 s: "
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
    board, other = (StoreBoard(store, r, 2, lost_s=5.0) for r in range(2))
    other.start(RankStatus, print)
    other.stop()
    for own_pause_s, blames in ((100, False), (0, True)):
        board._exchange()
        board._heard[1] = board._heard[1]._replace(at_s=time.monotonic() - 100)
        board._exchanged_s = time.monotonic() - own_pause_s
        board._exchange()
        assert (board.failure is not None) == blames
    board.stop()


def test_a_broken_wait_names_the_rank_that_failed(boards: list[StoreBoard]) -> None:
    watch = Watch(boards[0])
    boards[1].announce(BOOM)

    def block() -> None:
        raise ConnectionError("closed")

    with pytest.raises(PeerError) as found:
        watch.wait("1SEND_B0>0 from rank 1", (1,), block)
    assert str(found.value) == "rank 1 failed: ValueError: boom\nTraceback ..."


def test_a_broken_wait_that_nobody_explains_says_so(boards: list[StoreBoard]) -> None:
    def block() -> None:
        raise ConnectionError("closed by peer")

    with pytest.raises(CommunicationError) as found:
        Watch(boards[0], cause_timeout_s=0.1).wait("1SEND_B0>0 from rank 1", (1,), block)
    assert found.value.message == (
        "rank 0 lost its connection while it waited for 1SEND_B0>0 from rank 1, "
        "and no rank said why: closed by peer"
    )
    assert boards[2].wait_for_failure(300) is not None, "the others are told"


def test_a_broken_wait_leaves_the_interrupt_to_the_side_thread(boards: list[StoreBoard]) -> None:
    """A rank that is blocked learns of a failure elsewhere, as the watch calls its interrupt."""
    watch = Watch(boards[0])
    released = threading.Event()
    watch.on_failure(released.set)

    def block() -> None:
        assert released.wait(300)
        raise ConnectionError("interrupted")

    with pytest.raises(PeerError, match="rank 1 failed: ValueError: boom"), watch:
        boards[1].announce(BOOM)
        watch.wait("1SEND_B0>0 from rank 1", (1,), block)


@pytest.mark.parametrize("waits_for", [{1: 0}, {1: 0, 2: 1}, {1: 2, 2: 3, 3: 0}])
def test_who_waits_for_a_rank_that_has_finished_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, waits_for: dict[int, int]
) -> None:
    """As where the script of the rank that serves the store ends early; or for who waits for that one."""
    monkeypatch.setattr("pipeloom.runtime.failure.watch.STUCK_S", 0.0)
    first, *others = local_boards(1 + len(waits_for))
    waits, told, ended = threading.Semaphore(0), threading.Event(), []

    def block() -> None:
        waits.release()
        raise ConnectionError if told.wait(20) else TimeoutError

    def wait(board: Noticeboard) -> None:
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

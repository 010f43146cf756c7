"""How ranks learn of a failure: boards on a store, silent ranks, the table of who waits for whom."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import nets
import pytest
import torch.distributed as dist
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


def test_a_failure_reaches_all_ranks_and_the_first_one_wins(boards: list[Board]) -> None:
    told = threading.Event()
    boards[0].start(RankStatus, lambda _: told.set())
    assert boards[2].wait_for_failure(0.01) is None
    assert boards[1].announce(BOOM) == BOOM
    assert boards[2].announce(Failure(rank=2, summary="later")) == boards[2].wait_for_failure(300) == BOOM
    assert told.wait(300) and boards[0].failure == BOOM


@pytest.mark.parametrize("finished", [False, True])
def test_a_rank_that_falls_silent_has_failed_unless_it_has_finished(boards, finished) -> None:
    boards[1].start(lambda: RankStatus(doing=FINISHED if finished else "0F1"), print)
    boards[1].stop()
    boards[0].start(RankStatus, print)
    failure = boards[2].wait_for_failure(1.5 if finished else 15)
    assert (failure is None) == finished
    if failure is not None:
        assert failure.rank == 1 and "no sign of life" in failure.summary
        assert [line.split()[0] for line in failure.table.splitlines()] == ["rank", "0", "1", "2"]


def test_a_store_that_goes_away_is_a_failure() -> None:
    store = served()
    board = Board(store, 0, 2, interval_s=0.05)
    del store
    failure = board.wait_for_failure(300)
    assert failure.rank is None and board.statuses() == [None, None]
    assert board.announce(BOOM) == failure, "what was known first counts"


def test_who_was_frozen_itself_blames_nobody() -> None:
    """After Ctrl-Z of a whole run every rank finds that none has posted for long."""
    store = dist.HashStore()
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


closed = Mock(side_effect=ConnectionError("closed by peer"))


def test_a_broken_wait_that_nobody_explains_says_so(boards: list[Board]) -> None:
    with pytest.raises(CommunicationError, match="rank 0 .* 1SEND_B0>0 .* no rank said why: closed by peer"):
        Watch(boards[0], cause_timeout_s=0.1).wait("1SEND_B0>0 from rank 1", (1,), closed)
    assert boards[2].wait_for_failure(300) is not None, "the others are told"


def test_the_others_hear_of_a_file_whose_name_is_not_utf_8(boards: list[Board]) -> None:
    with pytest.raises(ValueError), Watch(boards[1]):
        raise ValueError("no rows in \udcff.txt")
    assert boards[0].wait_for_failure(300).summary.endswith(r"\udcff.txt")


@pytest.mark.parametrize("leave", [print, sys.exit])
def test_a_rank_that_ended_early_is_named(boards: list[Board], leave: Callable[[], object]) -> None:
    with suppress(SystemExit), Watch(boards[1]):
        leave()
    with pytest.raises(CommunicationError) as found:
        Watch(boards[0], cause_timeout_s=0.1).wait("a sum over all ranks", (1, 2), closed)
    assert found.value.hint is not None and "rank 1 has closed" in found.value.hint


@pytest.mark.parametrize("waits_for", [{1: 0}, {1: 0, 2: 1}, {1: 2, 2: 3, 3: 0}])
def test_who_waits_for_a_rank_that_has_finished_holds_up_nobody(monkeypatch, waits_for) -> None:
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


def waiting(*ranks: int) -> RankStatus:
    return RankStatus(doing="0F7", waits_for="a sum", waits_on=ranks, waiting_s=2.04)


IDLE = RankStatus(doing="0F7")


@pytest.mark.parametrize(
    ("states", "circle", "said"),
    [
        ([IDLE, waiting(3), None, waiting(1)], True, "rank 1 -> rank 3 -> rank 1: they wait for each other"),
        ([waiting(1), waiting(2), IDLE], False, "a sum, for 2.0 s"),
        # Behind a link that was cut: what it waits for now is not known, and it is the cause.
        ([waiting(1), replace(waiting(0), silent_s=15.0)], False, "(silent for 15 s)"),
        ([waiting(1, 2), waiting(0, 2), None], False, "a sum"),
    ],
    ids=["a circle", "a chain", "a silent rank", "all ranks"],
)
def test_the_table_names_a_circle(states: list[RankStatus | None], circle: bool, said: str) -> None:
    table = who_waits(states)
    assert len(table.splitlines()) == 1 + len(states) + circle
    assert said in table and ("each other" in table) == circle


def test_the_rank_that_went_is_named_and_not_who_waited_for_it(tmp_path, monkeypatch) -> None:
    job = nets.job("skips")
    plan, captured = even_plan(job, 2, microbatches=2), capture_of(job)
    saves, prepare = threading.Event(), checkpoint.files.prepare

    def prepared(directory: Path, step: int) -> Path:
        saves.set()
        return prepare(directory, step)

    monkeypatch.setattr(checkpoint.files, "prepare", prepared)

    def rank(index: int, channel: Channel) -> str:
        with pytest.raises((SystemExit, PeerError)) as caught:
            with Pipeline(job, plan, channel=channel, captured=captured) as pipeline:
                if index == 0:
                    pipeline.save(tmp_path)
                assert saves.wait(60)
                raise SystemExit("it goes")
        return str(caught.value).partition("\n")[0]

    assert threads(2, rank, timeout_s=60) == ["rank 1 failed: SystemExit: it goes", "it goes"]
    assert not list(tmp_path.glob("step-????????"))

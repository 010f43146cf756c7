"""Collectives outside a step: who is blamed when one fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zoo
from runs import capture_of, even_plan, threads

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import CommunicationError, PeerError
from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.transports.local_channel import LocalChannel, local_channels

GLOO = "[.../gloo/transport/tcp/pair.cc:539] Connection closed by peer [127.0.0.1]:40000"


def test_the_rank_that_went_is_named_and_not_who_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank was killed while a checkpoint was written: a survivor was blamed, with a traceback of
    gloo's, as the collectives that write it were called outside the watch."""
    job = zoo.job("skips")
    plan, captured = even_plan(job, 2, microbatches=2), capture_of(job)
    saves, gone = threading.Event(), threading.Event()

    def lose_connection(*_: object, **__: object) -> Path:
        saves.set()
        assert gone.wait(60)
        raise RuntimeError(GLOO)

    monkeypatch.setattr(checkpoint, "save", lose_connection)

    def rank(index: int, channel: LocalChannel) -> str:
        try:
            with Pipeline(job, plan, options=Options(), channel=channel, captured=captured) as pipeline:
                if index == 0:
                    pipeline.save(tmp_path)
                assert saves.wait(60)
                raise SystemExit("it goes")
        except (SystemExit, RuntimeError, PeerError) as error:
            gone.set()
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    survivor, lost = threads(2, rank, timeout_s=60)
    assert survivor == "PeerError: rank 1 failed: SystemExit: it goes"
    assert lost == "SystemExit: it goes"


def test_a_pair_that_gloo_gives_up_is_a_wait_that_took_too_long() -> None:
    """A rank frozen while a checkpoint was written: the other one ended with a traceback, not with the
    table, since this error of gloo does not begin with a place in its source."""
    channel = local_channels(1)[0]

    def give_up() -> None:
        raise RuntimeError("Application timeout caused pair closure")

    with channel.watch, pytest.raises(CommunicationError, match="waited .* for all ranks to save") as caught:
        channel.watch.wait_for_all("all ranks to save a checkpoint", give_up)
    assert "rank  does  waits for" in str(caught.value)


def test_other_errors_stay_as_they_are() -> None:
    channel = local_channels(1)[0]

    def fail() -> None:
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"), channel.watch:
        channel.watch.wait_for_all("all ranks to save a checkpoint", fail)

"""A rank frozen while a checkpoint was written: the other one ended with a traceback, not with the table,
since this error of gloo does not begin with a place in its source."""

from __future__ import annotations

import pytest

from pipeloom.ir.errors import CommunicationError
from pipeloom.runtime.transports.local_channel import local_channels


def test_a_pair_that_gloo_gives_up_is_a_wait_that_took_too_long() -> None:
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

"""What changes a rank's memory, in bytes: tables that `memory` makes of costs and `memory_replay` reads."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.columns import Bools, Ints, Longs
from .loop_state import Floats


class MemoryChanges(NamedTuple):
    """What changes memory, in bytes; when follows from the times of a simulation."""

    begin: Longs
    """(stages, kinds, 3): residuals, boundary and transient bytes that come when an action begins."""
    finish: Longs
    """(stages, kinds, 3): the change when it ends, below 0 for what goes."""
    drops: Bools
    """(entries,): whether it is an F that keeps `dropped[stage]` bytes less, as a RECOMPUTE makes them again;
    empty where there is none."""
    dropped: Longs
    """(stages,)"""
    message_bytes: Longs
    """(routes,)"""
    begin_s: Floats
    """(ranks,): when each starts, in seconds."""
    first_in: Ints
    """(ranks + 1,): the channels to rank r are `channels_in[first_in[r] : first_in[r + 1]]`."""
    channels_in: Longs
    first_out: Ints
    channels_out: Longs

    def outgoing(self, rank: int) -> Longs:
        return self.channels_out[self.first_out[rank] : self.first_out[rank + 1]]

"""How long ranks hold what they have sent: until they notice that it is through.

A rank looks after its sends between two actions. A small message is looked at only at the end of the step,
since that takes longer than it does. Where an action would pass the rank's cap because of that, the runtime
waits for its sends before it; so the peak is then that of messages that go as soon as they are through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..ir.columns import SEND_B_, SEND_F_
from .loop_state import Floats
from .memory import Memory


def held_longer(memory: Memory, small_bytes: int, caps: Sequence[int] = ()) -> Memory:
    """The same step with messages held until their sender notices.

    small_bytes: messages up to this size are held until the end.  caps: bytes of each rank, or none.
    """
    noticed, sender = _noticed(memory, small_bytes)
    late = replace(memory, gone_s=noticed)
    if not len(caps):
        return late
    over = np.array([sum(peak.values()) > cap for peak, cap in zip(late.peaks(), caps, strict=True)])
    return replace(memory, gone_s=np.where(over[sender], memory.state.move_end, noticed))


def _noticed(memory: Memory, small_bytes: int) -> tuple[Floats, np.ndarray]:
    """Of each message when its sender notices that it is through, and who that is."""
    p, s = memory.layout, memory.state
    count = int(p.first[-1])
    gone, sender = s.move_end[:count].copy(), np.zeros(count, np.int64)
    size = memory.books.message_bytes[p.route[:count]]
    own_clock = p.stream[p.kind] == 0
    for rank in range(len(p.offsets) - 1):
        low, high = int(p.offsets[rank]), int(p.offsets[rank + 1])
        here = np.arange(low, high)
        sends = here[(p.kind[low:high] == SEND_F_) | (p.kind[low:high] == SEND_B_)]
        ends = np.maximum.accumulate(s.end[low:high][own_clock[low:high]])
        if not len(sends):
            continue
        message = p.message[sends]
        through = s.move_end[message]
        at = np.searchsorted(ends, through)
        seen = np.where(at < len(ends), ends[np.minimum(at, len(ends) - 1)], through)
        seen = np.where(through <= s.end[sends], through, seen)
        gone[message] = np.where(size[message] <= small_bytes, max(ends[-1], through.max()), seen)
        sender[message] = rank
    for pipe in range(len(p.target)):
        low, high = int(p.first[pipe]), int(p.first[pipe + 1])
        gone[low:high] = np.maximum.accumulate(gone[low:high])
    return gone, sender

"""Memory that the process gives back."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from processes import output

MIB = 1 << 20

CHILD = textwrap.dedent(
    """
    import json
    from resource import getpagesize
    from pipeloom.runtime.allocator import give_back_freed_memory, keep_freed_memory

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * getpagesize()

    told, before = keep_freed_memory(), resident()
    kept, pins = [], []
    for number in range(128):
        kept.append(bytes([number]) * (1 << 20))
        pins.append(bytes([number]) * 2000)  # lies behind it, so that freed memory is no end of the heap
    del kept
    freed = resident()
    give_back_freed_memory()
    print(json.dumps([told, freed - before, resident() - before]))
    """
)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_it_is_given_back() -> None:
    told, kept, left = json.loads(output("-c", CHILD))
    if not told:
        pytest.skip("needs glibc")
    assert kept > 120 * MIB and left < 16 * MIB

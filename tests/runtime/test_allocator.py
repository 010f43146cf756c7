"""Memory that the process keeps, and gives back."""

import json
import textwrap
from pathlib import Path

import pytest
from processes import output

MIB = 1 << 20

CHILD = textwrap.dedent(
    """
    import json
    from resource import RUSAGE_SELF, getpagesize, getrusage
    from pipeloom.runtime.allocator import give_back_freed_memory, keep_freed_memory

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * getpagesize()

    def faults():
        return getrusage(RUSAGE_SELF).ru_minflt

    keep_freed_memory(grown_for=4 << 20)
    before = faults()
    grown = [bytes([number]) * (4 << 20) for number in range(6)]
    fresh = (faults() - before) * getpagesize()
    del grown
    give_back_freed_memory()
    told, before = keep_freed_memory(), resident()
    kept, pins = [], []
    for number in range(128):
        kept.append(bytes([number]) * (1 << 20))
        pins.append(bytes([number]) * 2000)  # lies behind it, so that freed memory is no end of the heap
    del kept
    freed = resident()
    give_back_freed_memory()
    print(json.dumps([told, fresh, freed - before, resident() - before]))
    """
)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_it_is_kept_and_given_back() -> None:
    told, fresh, kept, left = json.loads(output("-c", CHILD))
    if not told:
        pytest.skip("needs glibc")
    assert fresh < 8 * MIB  # of 24 that were taken
    assert kept > 120 * MIB and left < 16 * MIB

"""EVICT and FETCH could be read as text only after `bpipe` had been built in the same process."""

import subprocess
import sys

READS = """
from pipeloom.ir.schedule import parse_rows
print(*parse_rows(("0F0 0EVICT0 0FETCH0 0B0",))[0])
"""


def test_a_fresh_process_reads_them() -> None:
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("0F0 0EVICT0 0FETCH0 0B0\n", 0), done.stderr

"""A rank that was killed while the launching process planned was only missed once the plan was there."""

import signal
import subprocess
import sys
import textwrap

LAUNCHER = textwrap.dedent(
    """
    import os, signal, time
    from pipeloom.runtime.launch import StartedRanks

    with StartedRanks(2) as started:
        os.kill(started._processes._ranks[1].process.pid, signal.SIGKILL)
        time.sleep(600)
    """
)


def test_the_launcher_does_not_go_on_planning() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == "rank 1 was killed by SIGKILL (perhaps the machine ran out of memory)\n"

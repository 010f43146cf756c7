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


OPTIONAL = LAUNCHER.replace("StartedRanks(2)", "StartedRanks(2, needed=False)").replace(
    "time.sleep(600)", "time.sleep(1)\n    print(started.run(print))"
)


def test_a_plan_is_not_lost_with_ranks_that_were_to_rehearse_it() -> None:
    done = subprocess.run([sys.executable, "-c", OPTIONAL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(128 + signal.SIGKILL)
    assert done.stderr == "rank 1 was killed by SIGKILL (perhaps the machine ran out of memory)\n"

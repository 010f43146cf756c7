"""The channel between real processes, and how they end together. Each test costs a start of torch."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = HERE / "dist_targets.py"

LAUNCHER = """
import json, sys
from pipeloom.runtime.launch import launch
import dist_targets
sys.exit(launch(getattr(dist_targets, sys.argv[1]), int(sys.argv[2])))
"""


def finished(command: list[str]) -> tuple[int, str, str]:
    """Exit status, output and errors. What hangs is not waited for."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=500)  # below the 600 s of a rank that only sleeps
        finally:
            process.kill()
    return process.returncode, out, err


def launched(target: str, ranks: int) -> tuple[int, str, str]:
    return finished([sys.executable, "-c", LAUNCHER, target, str(ranks)])


def test_messages_sums_objects_groups_and_meshes_then_one_ranks_exception_ends_all() -> None:
    """With its traceback once; also one that waits, and one that is stuck where no exception reaches it."""
    status, out, err = launched("exchange_then_fail", 3)
    assert {"[rank 1] all well", "[rank 2] all well", "all well"} <= set(out.splitlines())
    assert status == 1
    assert "rank 0 knows why" in out
    assert err.count("Traceback") == err.count('raise ValueError("boom")') == 1
    assert err.startswith("rank 1 failed:\nTraceback")
    assert "Warning" not in err and "terminate" not in err


@pytest.mark.slow
def test_a_killed_rank_ends_the_others() -> None:
    status, _, err = launched("killed", 2)
    assert status == 128 + 9
    assert err == "rank 1 was killed by SIGKILL (perhaps the machine ran out of memory)\n"


def test_a_rank_killed_while_a_checkpoint_is_written_is_named_and_no_survivor() -> None:
    status, _, err = launched("killed_while_saving", 3)
    assert err == "rank 2 was killed by SIGKILL (perhaps the machine ran out of memory)\n"
    assert status == 128 + 9


def test_a_wait_over_the_limit_says_who_waits_for_whom() -> None:
    status, _, err = launched("deadlock", 3)
    assert status == 1
    assert err.count("Traceback") == 1
    seconds = r"for \d+\.\d s\n"
    assert re.search(
        r"CommunicationError: rank 0 waited \d+(\.\d+)? s for 1SEND_F0>0 from rank 1\n"
        r"rank  does  waits for\n"
        rf"0     0F0   1SEND_F0>0 from rank 1, {seconds}"
        rf"1     1F0   0SEND_F0>1 from rank 0, {seconds}"
        rf"2     2F0   0SEND_F0>2 from rank 0, {seconds}"
        r"rank 0 -> rank 1 -> rank 0: they wait for each other\n",
        err,
    ), err


def under_torchrun(target: str, ranks: int) -> tuple[int, str, str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return finished([*run, str(TARGETS), target])


@pytest.mark.slow
def test_under_torchrun_an_exception_ends_all_with_its_traceback_once() -> None:
    status, _, err = under_torchrun("fail_while_others_wait", 3)
    assert status != 0
    assert err.count('raise ValueError("boom")') == 1


@pytest.mark.slow
def test_under_torchrun_a_wait_over_the_limit_says_who_waits_for_whom() -> None:
    status, _, err = under_torchrun("deadlock", 3)
    assert status != 0
    assert err.count("they wait for each other") == 1


@pytest.mark.slow
def test_under_torchrun_ctrl_c_ends_ranks_that_wait() -> None:
    """torchrun passes the signal on, and kills only what has not ended by itself some time later."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*run, str(TARGETS), "wait"], env=env, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=500)  # ends with the last process that writes here
        finally:
            process.kill()
    assert "SIGKILL" not in err

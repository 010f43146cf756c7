"""The channel between real processes, and how they end together. Each test costs a start of torch."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = HERE / "dist_targets.py"

LAUNCHER = """
import json, sys
from pipeloom.runtime.launch.launch import launch
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


@pytest.mark.slow
def test_a_rank_killed_while_a_checkpoint_is_written_is_named_and_no_survivor() -> None:
    status, _, err = launched("killed_while_saving", 3)
    assert err == "rank 2 was killed by SIGKILL (perhaps the machine ran out of memory)\n"
    assert status == 128 + 9


def without_launcher(target: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Three ranks that nobody looks after, as on three machines; rank 0 serves the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"},
        **variables,
    }
    return [
        subprocess.Popen(
            [sys.executable, str(TARGETS), target],
            env=env | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


def said_by(ranks: list[subprocess.Popen[str]], survivors: set[int]) -> dict[int, str]:
    """What the survivors write before they end; nobody else is waited for."""
    try:
        return {rank: ranks[rank].communicate(timeout=300)[1] for rank in survivors}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_rank_killed_while_a_checkpoint_is_written_is_named_by_all_survivors() -> None:
    """Nobody else says so here. The survivors told of gloo's error, each as its own failure."""
    said = said_by(without_launcher("killed_while_saving"), {0, 1})
    for text in said.values():
        first = next(line for line in text.splitlines() if "failed" in line)
        assert re.match(
            r"pipeloom: this rank ends because rank 2 failed: no sign of life since rank [01] "
            "lost its connection while it waited for all ranks to save a checkpoint: it was killed, or ",
            first,
        ), text
        assert "Traceback" not in text


@pytest.mark.slow
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


def waits_in_table(text: str) -> list[str]:
    """The rows of the table of who waits for whom, without seconds."""
    lines = text.splitlines()
    start = lines.index("rank  does  waits for")
    return [re.sub(r" for \d+(\.\d)? s", " for N s", line) for line in lines[start + 1 : start + 4]]


def expected_waits(frozen: int) -> list[str]:
    """Each rank waits for the next one, but the frozen one is silent."""
    rows = []
    for rank in range(3):
        source = (rank + 1) % 3
        row = f"{rank}     {rank}F0   {source}SEND_F0>{rank} from rank {source}, for N s"
        rows.append(f"{rank}     {rank}F0   - (silent for N s)" if rank == frozen else row)
    return rows


FROZEN = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_frozen_rank_ends_all_with_the_table(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, too, which served the store: the others waited for the store for ever, with no table."""
    monkeypatch.setenv("FROZEN", str(frozen))
    monkeypatch.setenv("LOST_S", "4")
    start = time.monotonic()
    status, _, err = launched("frozen", 3)
    assert status != 0
    assert err.startswith(f"rank {frozen} failed: no sign of life for 4 s: it was killed or is frozen, or ")
    assert waits_in_table(err) == expected_waits(frozen), err
    assert time.monotonic() - start < 400, "it had to be killed"


@pytest.mark.slow
@pytest.mark.parametrize("frozen", range(3))
def test_without_a_launcher_too_a_frozen_rank_ends_all(frozen: int) -> None:
    """Rank 0 serves the store. Nobody kills the frozen one: the others end all the same."""
    said = said_by(without_launcher("frozen", FROZEN=str(frozen), LOST_S="4"), {0, 1, 2} - {frozen})
    whole = "".join(said.values())
    if frozen == 0:
        reason = "rank 0 failed: the store that joins the ranks, which it serves, has not answered for 4 s"
    else:
        reason = f"rank {frozen} failed: no sign of life for 4 s"
        assert waits_in_table(whole) == expected_waits(frozen), whole
    assert all(reason in text for text in said.values()), whole
    assert whole.count("rank  does  waits for") >= 1 and "Traceback" not in whole


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

"""The channel between real processes, and how they end together. Each test costs a start of torch."""

import importlib
import re
import signal
from pathlib import Path

import pytest
from checkpoint_ranks import assert_one_process_loads
from processes import ends_of, run, start, start_ranks

from pipeloom.runtime.flight_recorder import PLACE
from pipeloom.runtime.launch import launch

TARGETS = Path(__file__).with_name("dist_targets.py")


@pytest.mark.slow
def test_messages_groups_meshes_and_checkpoints_then_one_ranks_exception_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor can another machine reach them. The exception ends one that waits, and one that is stuck where no
    exception reaches it, and is told with its traceback once."""
    monkeypatch.syspath_prepend(TARGETS.parent)
    status = launch(importlib.import_module("dist_targets").exchange_then_fail, 3, args=(str(tmp_path),))
    out, err = capfd.readouterr()
    assert {"[rank 1] all well", "[rank 2] all well", "all well"} <= set(out.splitlines())
    assert status == 1
    assert "rank 0 knows why" in out
    assert err.count("Traceback") == err.count('raise ValueError("boom")') == 1
    assert err.startswith("rank 1 failed:\nTraceback")
    assert "Warning" not in err and "terminate" not in err
    assert_one_process_loads(tmp_path)


def said_without_launcher(target: str, survivors: set[int], **env: str) -> dict[int, str]:
    """What they write before they end of three ranks that nobody looks after; rank 0 serves the store."""
    ranks = start_ranks(3, TARGETS, target, env=env)
    try:
        return {rank: ends_of(ranks[rank])[0][2] for rank in survivors}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_rank_killed_while_a_checkpoint_is_written_is_named_by_all_survivors(tmp_path: Path) -> None:
    """Nobody else says so here. The survivors told of gloo's error, each as its own failure."""
    said = said_without_launcher("killed_while_saving", {0, 1}, FOLDER=str(tmp_path))
    for text in said.values():
        first = next(line for line in text.splitlines() if "failed" in line)
        assert re.match(
            r"pipeloom: this rank ends because rank 2 failed: no sign of life since rank [01] "
            "lost its connection while it waited for all ranks to save a checkpoint: it was killed, or ",
            first,
        ), text
        assert "Traceback" not in text


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


@pytest.mark.slow
@pytest.mark.parametrize("frozen", range(3))
def test_without_a_launcher_too_a_frozen_rank_ends_all(frozen: int) -> None:
    """Rank 0 serves the store. Nobody kills the frozen one: the others end all the same."""
    said = said_without_launcher("frozen", {0, 1, 2} - {frozen}, FROZEN=str(frozen), LOST_S="4")
    whole = "".join(said.values())
    if frozen == 0:
        reason = "rank 0 failed: the store that joins the ranks, which it serves, has not answered for 4 s"
    else:
        reason = f"rank {frozen} failed: no sign of life for 4 s"
        assert waits_in_table(whole) == expected_waits(frozen), whole
    assert all(reason in text for text in said.values()), whole
    assert whole.count("rank  does  waits for") >= 1 and "Traceback" not in whole


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "words"),
    [("fail_while_others_wait", 'raise ValueError("boom")'), ("deadlock", "they wait for each other")],
)
def test_under_torchrun_what_ends_all_is_said_once(tmp_path: Path, target: str, words: str) -> None:
    status, _, err = run(*TORCHRUN, 3, TARGETS, target, env={PLACE: str(tmp_path / "rank_")})
    assert status != 0
    assert err.count(words) == 1
    recorded = ["rank_0", "rank_1", "rank_2"] if target == "deadlock" else []
    assert sorted(file.name for file in tmp_path.iterdir()) == recorded


@pytest.mark.slow
def test_under_torchrun_ctrl_c_ends_ranks_that_wait() -> None:
    """torchrun passes the signal on, and kills only what has not ended by itself some time later."""
    process = start(*TORCHRUN, 2, TARGETS, "wait")
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
    finally:
        (_, _, err), *_ = ends_of(process)  # ends with the last process that writes here
    assert "SIGKILL" not in err

"""The channel between real processes, and how they end together. Each test costs a start of torch."""

import importlib
import re
import signal
from pathlib import Path

import pytest
from processes import ends_of, run, start, start_ranks

from pipeloom.runtime.flight_recorder import PLACE
from pipeloom.runtime.launch import launch

TARGETS = Path(__file__).with_name("dist_targets.py")


@pytest.mark.slow
def test_messages_groups_and_meshes_then_one_ranks_exception_ends_all(monkeypatch, capfd) -> None:
    """Nor can another machine reach them. The exception ends one that waits, and one that is stuck where no
    exception reaches it, and is told with its traceback once."""
    monkeypatch.syspath_prepend(TARGETS.parent)
    status = launch(importlib.import_module("dist_targets").exchange_then_fail, 3)
    out, err = capfd.readouterr()
    assert status == 1
    assert {"[rank 1] all well", "[rank 2] all well", "all well", "rank 0 knows why"} <= set(out.splitlines())
    assert err.count("Traceback") == err.count('raise ValueError("boom")') == 1
    assert err.startswith("rank 1 failed:\nTraceback")
    assert "Warning" not in err and "terminate" not in err


def said_without_launcher(target: str, survivors: set[int], **env: str) -> list[str]:
    """What they write before they end of three ranks that nobody looks after; rank 0 serves the store."""
    ranks = start_ranks(3, TARGETS, target, env=env)
    try:
        return [ends_of(ranks[rank])[0][2] for rank in survivors]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_rank_killed_while_a_checkpoint_is_written_is_named_by_all_survivors(tmp_path: Path) -> None:
    """Nobody else says so here. The survivors told of gloo's error, each as its own failure."""
    for text in said_without_launcher("killed_while_saving", {0, 1}, FOLDER=str(tmp_path)):
        first = next(line for line in text.splitlines() if "failed" in line)
        assert "this rank ends because rank 2 failed: no sign of life since rank" in first, text
        assert "save a checkpoint: it was killed" in first and "Traceback" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_without_a_launcher_too_a_frozen_rank_ends_all(frozen: int) -> None:
    """Rank 0 serves the store. Nobody kills the frozen one: the others end all the same."""
    said = said_without_launcher("frozen", {0, 1, 2} - {frozen}, FROZEN=str(frozen), LOST_S="4")
    whole = "".join(said)
    reason = "it serves, has not answered" if frozen == 0 else "no sign of life"
    for text in said:
        assert re.search(f"rank {frozen} failed: .*{reason} for 4 s", text), whole
    table = re.split(r"^rank +does +waits for\n", whole, flags=re.MULTILINE)[1].splitlines()[:3]
    for rank, row in enumerate(table):  # each waits for the next one
        waits = f"{(rank + 1) % 3}SEND_F0>{rank} from rank {(rank + 1) % 3}, for"
        assert row.startswith(f"{rank} ") and ("(silent for" if rank == frozen else waits) in row, whole
    assert "Traceback" not in whole


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

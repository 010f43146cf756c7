"""Real offloading: two processes under a cap that only offloading keeps, to memory and to a slow disk."""

import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
import runs
from deep import ROWS, TANH
from offloaded_ranks import MICROBATCHES, compare_folders

from pipeloom import plan
from pipeloom.ir.cluster import Link
from pipeloom.runtime.file_tier import lies_in_memory
from pipeloom.runtime.launch import launch

SHM = Path("/dev/shm")


def test_two_processes_offload_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHM.is_dir() and lies_in_memory(SHM)):
        pytest.skip("this system has no tmpfs on /dev/shm")
    fast = Link(bandwidth_bytes_per_s=1e12)  # however slow the disk is: it is to be planned with
    monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", lambda directory: (fast, fast, []))
    make = partial(
        plan,
        TANH,
        ranks=2,
        microbatches=MICROBATCHES,
        microbatch_size=ROWS,
        schedule="gpipe",
        captured=runs.capture_of(TANH, ROWS),
    )
    free = make()
    cap = round(0.8 * max(free.peaks))
    capped = make(memory=cap, offload_dir=tmp_path, treatments=("offload",))
    disk, results = tmp_path / "disk", tmp_path / "results"
    results.mkdir()
    with tempfile.TemporaryDirectory(dir=SHM) as memory:
        assert launch(compare_folders, 2, args=(free, capped, Path(memory), disk, results)) == 0
        assert list(Path(memory).iterdir()) == list(disk.iterdir()) == []
    ranks = [json.loads((results / str(rank)).read_text()) for rank in range(2)]
    assert any(rank["free"]["peak"] > cap for rank in ranks), "without offloading it does not fit"
    for where in ("memory", "slow disk"):
        assert any(rank[where]["offloaded"] > 0 for rank in ranks), "something is offloaded"
        for rank in ranks:
            assert rank[where]["peak"] <= cap == rank[where]["cap"]
            assert rank[where]["losses"] == rank["free"]["losses"], "the same numbers to the last bit"

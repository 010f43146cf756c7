"""metrics.jsonl on a disk that refuses."""

import resource
from pathlib import Path

import pytest

from pipeloom.ir.errors import ConfigError
from pipeloom.train.run_directory import Metrics


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """Closing the file tried the refused line again, and ended with our traceback."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write .*/m.jsonl: File too large"):  # noqa: SIM117
            with Metrics(tmp_path / "m.jsonl", after_step=0) as metrics:
                for step in range(20):
                    metrics.write({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Metrics(tmp_path / "m.jsonl", after_step=9) as metrics:
        assert [line["step"] for line in metrics.read()] == list(range(8))


DAMAGED = {
    "a blank line": b"\n",
    "NULs": b"\0" * 40 + b"\n",
    "no UTF-8": b'{"step": 2, "loss": "\xff"}\n',
    "no object": b"[2]\n",
    "no step": b'{"loss": 1.0}\n',
    "a loss that is a text": b'{"step": 2, "loss": "1.0"}\n',
    "too deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_lines_are_dropped_and_said(tmp_path: Path, damage: bytes) -> None:
    """A power cut or an editor left them, and resuming ended with our traceback."""
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 3.0}\n' + damage + b'{"step": 3, "loss": 2.0}\n{"step": 4')
    with pytest.warns(UserWarning, match="1 damaged lines are dropped, the first of them line 2"):  # noqa: SIM117
        with Metrics(file, after_step=5) as metrics:
            assert [line["step"] for line in metrics.read()] == [1, 3]
    assert len(file.read_bytes().splitlines()) == 2

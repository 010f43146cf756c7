"""metrics.jsonl on a disk that refuses."""

import resource
from pathlib import Path

import pytest

from pipeloom.ir.errors import ConfigError
from pipeloom.train import Metrics


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

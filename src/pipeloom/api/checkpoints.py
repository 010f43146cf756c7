"""Checkpoints of a run: how far the newest one is, and its model as one file."""

from __future__ import annotations

from pathlib import Path

from ..runtime.checkpoint.files import newest, read_index, verify_sizes


def checkpoint_step(directory: Path) -> int:
    """Steps done in the newest checkpoint of a directory, whose files are looked at but not read.

    Raises: CheckpointError if there is none, or it is not whole.
    """
    path = newest(directory)
    index = read_index(path)
    verify_sizes(path, index)
    return index.step

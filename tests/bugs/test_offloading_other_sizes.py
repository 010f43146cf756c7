"""The file of offloaded residuals grew with every new size of micro-batch, as places were kept by size."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pipeloom.runtime.offload.file_tier import PAGE, FileTier
from pipeloom.tracer.stage.functions import Slot

SLOT = Slot("residual", "a")


def never() -> None:
    return None


def lengths(tier: FileTier, pages: list[int]) -> list[int]:
    """Pages of the file after each of several steps of four micro-batches, which come back as they were."""
    found = []
    for size in pages:
        given = [torch.full((size * PAGE // 4,), float(size + number)) for number in range(4)]
        copies = [tier.start_offload("0OFFLOAD0", {SLOT: tensor.clone()}) for tensor in given]
        for copy, tensor in zip(copies, given, strict=True):
            tier.start_reload(copy)
            assert torch.equal(tier.wait_reload(copy, never)[SLOT], tensor)
        found.append(os.fstat(tier._file.fileno()).st_size // PAGE)
    return found


def test_the_file_is_as_long_as_the_largest_step(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 0)
    assert lengths(tier, [8, 9, 3, 12, 5, 11, 12]) == [32, 36, 36, 48, 48, 48, 48]
    tier.close()

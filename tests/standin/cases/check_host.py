"""Each time that the host waits for the device is counted, with its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import standin
import torch
from torch import Tensor

DEVICE = "standin"


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: float(x[0]),
    "copy to the host": lambda x: x.cpu(),
    "copy from pageable memory": lambda x: torch.zeros(8).to(DEVICE),
    "nonzero": lambda x: torch.nonzero(x),
    "equal": lambda x: torch.equal(x, x),
    "stream.synchronize": lambda x: torch.accelerator.current_stream().synchronize(),
    "device.synchronize": lambda x: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted_with_file_and_line(what: str) -> None:
    x = torch.ones(8, device=DEVICE)
    with standin.counted_syncs() as waits:
        WAITS[what](x)
    assert [wait.text for wait in waits] == [what]
    assert waits[0].place.rpartition("/")[2].startswith("check_host.py:")


def test_a_pageable_copy_waits_though_it_should_not_block() -> None:
    with standin.counted_syncs() as waits:
        torch.zeros(8).to(DEVICE, non_blocking=True)
        torch.tensor(1.0, device=DEVICE)
    assert len(waits) == 2

"""Bookkeeping of the tier in pinned memory, with stand-ins for streams and events: what copies where, which
memory is used again. Order on a real device: tests/gpu."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pipeloom.runtime import pinned_tier
from pipeloom.runtime.pinned_tier import CHUNK, PinnedTier
from pipeloom.runtime.recorder import DeviceClock
from pipeloom.tracer.stage.functions import Slot


class Anything(nullcontext[None]):
    """A stream or event whose work is done at once."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> PinnedTier:
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: real(*size, **how))
    monkeypatch.setattr(torch.accelerator, "current_stream", Anything)
    monkeypatch.setattr(pinned_tier, "_on_device", lambda tensor: tensor.dim() > 0)
    monkeypatch.setattr(torch, "Stream", Anything)
    monkeypatch.setattr(DeviceClock, "mark", Anything)
    return PinnedTier(0)


def residuals(*lengths: int) -> dict[Slot, Tensor]:
    return {Slot("residual", f"r{i}"): torch.arange(1.0, n + 1) for i, n in enumerate(lengths)}


def test_what_left_comes_back_and_what_is_on_the_host_stays_there(tier: PinnedTier) -> None:
    """The host would write to a chunk at once, though a copy from it may be pending."""
    transposed, seed = torch.arange(12.0).reshape(3, 4).T, torch.tensor(7)
    sent = residuals(0, 5, CHUNK // 2, CHUNK // 4 - 7)
    sent |= {Slot("residual", "view"): transposed, Slot("residual", "seed"): seed}
    expected = {slot: t.clone() for slot, t in sent.items()}
    copy = tier.offload("0OFFLOAD0", sent)
    assert not sent and tier.used_bytes == copy.bytes
    assert copy.bytes == sum(t.nbytes for t in expected.values()) - seed.nbytes
    copy.reload()
    found = copy.take(lambda: None)
    assert found.keys() == expected.keys() and found[Slot("residual", "seed")] is seed
    assert all(torch.equal(found[slot], t) for slot, t in expected.items())
    assert found[Slot("residual", "view")].stride() == transposed.stride()
    assert tier.used_bytes == 0


def test_pinned_memory_is_used_again_whatever_the_sizes(tier: PinnedTier) -> None:
    for length in (17 * CHUNK // 16, CHUNK, CHUNK // 2, 3):
        copies = [tier.offload(f"0OFFLOAD{m}", residuals(length)) for m in range(2)]
        for copy in copies:
            assert copy.bytes <= len(copy.host) * CHUNK < copy.bytes + CHUNK, "much more is pinned than held"
            copy.reload()
            copy.take(lambda: None)
    assert len(tier._idle_chunks) == len(copies) * 5


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_given_up_leaves_its_place_to_others(tier: PinnedTier, asked: bool) -> None:
    for _ in range(2):
        copy = tier.offload("0OFFLOAD0", residuals(CHUNK // 4))
        if asked:
            copy.reload()
        copy.discard()
        assert tier.used_bytes == 0 and not tier._reloading and len(tier._idle_chunks) == 1


def test_a_broken_device_is_not_said_twice(tier: PinnedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Anything, "synchronize", Mock(side_effect=RuntimeError("CUDA error: assert")))
    tier.close()

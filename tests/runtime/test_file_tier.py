"""Residuals in files: what comes back, what leaves memory, and what can go wrong with a disk."""

import errno
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st

from pipeloom.ir.errors import ConfigError, OffloadError, PeerError
from pipeloom.runtime.file_tier import PAGE, FileCopy, FileTier, lies_in_memory
from pipeloom.tracer.stage.functions import Slot, Tensors


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, 3)
    yield made
    made.close()


def one(count: int = 1000) -> Tensors:
    return {Slot("residual", "a"): torch.zeros(count)}


def residuals() -> Tensors:
    tensors = {
        "dense": torch.arange(24, dtype=torch.float32).reshape(4, 6),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "part": torch.arange(100, dtype=torch.int64)[10:20],
        "half": torch.randn(5).bfloat16(),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    return {Slot("residual", name): tensor for name, tensor in tensors.items()}


def there_and_back(tier: FileTier, tensors: Tensors) -> Tensors:
    copy = tier.offload("1OFFLOAD2", tensors)
    copy.reload()
    return copy.take(Mock())


def test_everything_comes_back_as_it_was_and_is_freed_in_between(tier: FileTier) -> None:
    """No thread starts: where no memory was left for its stack, Python waited for it for ever."""
    given, threads = residuals(), threading.enumerate()
    before = {slot: t.clone(memory_format=torch.preserve_format) for slot, t in given.items()}
    alive = weakref.ref(given[Slot("residual", "dense")].untyped_storage())
    copy = tier.offload("0OFFLOAD0", given)
    copy.away.result(10)
    assert alive() is None and not given
    copy.reload()
    found = copy.take(Mock())
    assert found.keys() == before.keys() and threading.enumerate() == threads
    for slot, tensor in found.items():
        assert torch.equal(tensor, before[slot]) and tensor.dtype == before[slot].dtype
        if slot.name != "part":  # a clone of a part has a storage of its own size
            assert tensor.stride() == before[slot].stride()


def test_a_directory_may_be_made_and_vanish_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    place = tmp_path / "new" / "one"
    first, second = FileTier(place, 0), FileTier(place, 1)
    assert not list(place.iterdir())
    first.close()
    first.close()
    place.rmdir()
    there_and_back(second, residuals())
    second.close()
    assert not place.exists()
    place.write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        FileTier(place / "deep", 3)


def test_a_full_disk_is_said_before_anything_is_written(tier, tmp_path, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    tensors = residuals()
    with pytest.raises(OffloadError) as caught:
        tier.offload("1OFFLOAD2", tensors)
    assert all(part in str(caught.value) for part in ("rank 3", "1OFFLOAD2", "No space left", str(tmp_path)))
    assert len(tensors) == 7  # they are where they were


def test_a_file_that_was_cut_short_is_said(tier: FileTier) -> None:
    copy = tier.offload("1OFFLOAD2", one(3000))
    copy.away.result(10)
    os.ftruncate(tier._file.fileno(), 5000)
    copy.reload()
    with pytest.raises(OffloadError, match="1OFFLOAD2, .* are left"):
        copy.take(Mock())


@pytest.mark.parametrize(("kind", "found"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_folders_in_memory_are_told_by_their_mount(tmp_path: Path, kind: str, found: bool) -> None:
    here = tmp_path / "a b"
    here.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(here).replace(" ", "\\040")
    mounts.write_text(f"none {escaped}/nowhere tmpfs rw 0 0\nnone {escaped} {kind} rw 0 0\n")
    assert lies_in_memory(here, mounts) is found
    assert lies_in_memory(here / "not" / "yet" / "there", mounts) is found
    assert not lies_in_memory(here, tmp_path / "no mounts, as elsewhere than on Linux")


def test_a_wait_ends_when_another_rank_fails(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, check = threading.Event(), Mock(side_effect=PeerError("rank 1 failed"))
    monkeypatch.setattr(tier, "_write", lambda copy: stuck.wait(300))
    copy = tier.offload("1OFFLOAD2", one(10))
    copy.reload()
    for wait in (copy.leave, copy.take):
        with pytest.raises(PeerError):
            wait(check)
    stuck.set()


EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("call", "asked"), [("pwrite", False), ("pwrite", True), ("preadv", True)])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EIO, OffloadError),
        (MemoryError(), OffloadError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OffloadError),
        (TypeError("nobody thought of it"), TypeError),
    ],
    ids=repr,
)
def test_what_fails_is_said_and_its_place_is_free_again(tier, monkeypatch, call, asked, error, kind) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, call, Mock(side_effect=error))
        copy = tier.offload("0OFFLOAD0", one(PAGE // 4))
        if asked:
            copy.reload()
        with pytest.raises(kind, match="rank 3 .*0OFFLOAD0" if kind is OffloadError else None):
            (copy.take if asked else copy.leave)(Mock())
        if call == "pwrite":
            with pytest.raises(kind):
                copy.gone()
    copy.discard()
    there_and_back(tier, one(PAGE // 4))  # copies back follow each other, so the place is given back now
    assert tier.used_bytes == 0
    assert {tier.offload("0OFFLOAD0", one(PAGE // 4)).file_offset for _ in range(2)} == {0, PAGE}
    assert os.fstat(tier._file.fileno()).st_size == 2 * PAGE


@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_places_never_overlap_and_the_file_does_not_grow(moves, tmp_path_factory) -> None:
    """Each move offloads some pages or gives back what was offloaded. Another step uses the same file."""
    tier = FileTier(tmp_path_factory.mktemp("tier"), 3)
    lengths = []
    for _ in range(2):
        copies: list[tuple[FileCopy, int]] = []
        for number, (leaves, pages) in enumerate(moves):
            if leaves:
                given = {Slot("residual", "a"): torch.full((pages * PAGE,), number, dtype=torch.uint8)}
                copies.append((tier.offload("0OFFLOAD0", given), number))
            elif copies:
                come_back(*copies.pop(pages % len(copies)))
        for copy, number in copies:
            come_back(copy, number)
        assert tier.used_bytes == 0
        lengths.append(os.fstat(tier._file.fileno()).st_size)
    tier.close()
    assert lengths[0] == lengths[1]


def come_back(copy: FileCopy, number: int) -> None:
    copy.reload()
    (tensor,) = copy.take(Mock()).values()
    assert (tensor == number).all()

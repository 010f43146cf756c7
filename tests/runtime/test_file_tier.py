"""Residuals in files: what comes back, what leaves memory, and what can go wrong with a disk."""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import zoo
from hypothesis import given, strategies as st

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import ConfigError, OffloadError, PeerError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.runtime.file_tier import PAGE, FileAllocator, FileTier, lies_in_memory
from pipeloom.runtime.open_tier import open_tier
from pipeloom.runtime.tier import Copy
from pipeloom.tracer.stage.functions import Slot, Tensors


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, 3)
    yield made
    made.close()


def never() -> None:
    return None


def one(count: int = 1000) -> Tensors:
    return {Slot("residual", "a"): torch.zeros(count)}


def residuals() -> Tensors:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        Slot("residual", "dense"): whole,
        Slot("residual", "transposed"): torch.arange(6.0).reshape(2, 3).t(),
        Slot("residual", "part"): torch.arange(100, dtype=torch.int64)[10:20],
        Slot("residual", "half"): torch.randn(5).bfloat16(),
        Slot("residual", "mask"): torch.tensor([True, False]),
        Slot("residual", "scalar"): torch.tensor(2.5),
        Slot("residual", "empty"): torch.empty(0, 3),
    }


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def there_and_back(tier: FileTier, tensors: Tensors) -> Tensors:
    copy = tier.offload("1OFFLOAD2", tensors)
    copy.reload()
    return copy.take(never)


def test_everything_comes_back_as_it_was(tier: FileTier) -> None:
    given = residuals()
    before = {slot: t.clone(memory_format=torch.preserve_format) for slot, t in given.items()}
    found = there_and_back(tier, given)
    assert not given and found.keys() == before.keys()
    for slot, tensor in found.items():
        assert torch.equal(tensor, before[slot]) and tensor.dtype == before[slot].dtype
        if slot.name != "part":  # a clone of a part has a storage of its own size
            assert tensor.stride() == before[slot].stride()


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_given_up_leaves_its_place_to_others(tier: FileTier, asked: bool) -> None:
    copy = tier.offload("0OFFLOAD0", one())
    if asked:
        copy.reload()
    copy.discard()
    assert copy.back is not None and copy.back.exception(60) is None
    assert tier.used_bytes == 0
    there_and_back(tier, one())
    assert os.fstat(tier._file.fileno()).st_size == 4096


def test_what_is_there_is_counted(tier: FileTier) -> None:
    copies: list[Copy] = [tier.offload(f"0OFFLOAD{m}", one()) for m in range(2)]
    assert tier.used_bytes == 8000
    for copy in copies:
        copy.reload()
        copy.take(never)
        assert copy.gone() and copy.offload_span is not None and copy.reload_span is not None
    assert tier.used_bytes == 0


def test_tensors_are_freed_once_they_are_written(tier: FileTier) -> None:
    tensors = one()
    alive = weakref.ref(tensors[Slot("residual", "a")].untyped_storage())
    copy = tier.offload("0OFFLOAD0", tensors)
    copy.away.result(10)
    assert alive() is None


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "new" / "one", 0)
    tier.offload("0OFFLOAD0", residuals())
    assert not list((tmp_path / "new" / "one").iterdir())
    tier.close()
    tier.close()
    assert not list((tmp_path / "new" / "one").iterdir())


def test_a_rank_that_ends_first_leaves_the_directory_to_the_others(tmp_path: Path) -> None:
    first, second = FileTier(tmp_path / "shared", 0), FileTier(tmp_path / "shared", 1)
    first.close()
    assert (tmp_path / "shared").is_dir()
    there_and_back(second, residuals())
    second.close()


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="rank 3 cannot offload to .*file/deep: Not a directory") as caught:
        FileTier(tmp_path / "file" / "deep", 3)
    assert "--offload-dir" in str(caught.value.hint)


def test_a_full_disk_is_said_before_anything_is_written(
    tier: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    tensors = residuals()
    with pytest.raises(OffloadError) as caught:
        tier.offload("1OFFLOAD2", tensors)
    said = str(caught.value)
    assert all(part in said for part in ("rank 3", "24.0 KiB at 1OFFLOAD2", "No space left", str(tmp_path)))
    assert len(tensors) == 7  # they are where they were


def test_a_file_that_was_cut_short_is_said(tier: FileTier) -> None:
    copy = tier.offload("1OFFLOAD2", one(3000))
    copy.away.result(10)
    os.ftruncate(tier._file.fileno(), 5000)
    copy.reload()
    with pytest.raises(OffloadError, match="11.7 KiB at 1OFFLOAD2, .* 4.9 KiB are left"):
        copy.take(never)


OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "words"),
    [(RuntimeError(OUT_OF_MEMORY), "can't allocate memory"), (MemoryError(), "out of memory")],
)
def test_no_memory_to_read_into_is_said(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    copy = tier.offload("1OFFLOAD2", one())
    copy.leave(never)
    monkeypatch.setattr(torch, "empty", failing(error))
    copy.reload()
    with pytest.raises(OffloadError) as caught:
        copy.take(never)
    assert all(part in caught.value.message for part in ("rank 3", "3.9 KiB offloaded at 1OFFLOAD2", words))
    assert "resume from the last checkpoint" in str(caught.value.hint)


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


def test_a_directory_that_vanishes_does_not_matter(tmp_path: Path) -> None:
    place = tmp_path / "gone"
    tier = FileTier(place, 0)
    place.rmdir()
    given = residuals()
    expected = given[Slot("residual", "dense")].clone()
    assert torch.equal(there_and_back(tier, given)[Slot("residual", "dense")], expected)
    tier.close()


def test_a_wait_ends_when_another_rank_fails(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise PeerError("rank 1 failed")

    stuck = threading.Event()
    monkeypatch.setattr(tier, "_write", lambda copy: stuck.wait(300))
    copy = tier.offload("1OFFLOAD2", one(10))
    copy.reload()
    for wait in (copy.leave, copy.take):
        with pytest.raises(PeerError):
            wait(check)
    stuck.set()


PLAN = Plan(
    graph="",
    planner="",
    stages=tuple(StagePlan(ops=(name,)) for name in "abc"),
    placement=(0, 1, 2),
    schedule="1f1b",
    schedule_rows=(),
    microbatches=1,
    memory=MemoryPolicy(stages=({}, {"relu": "offload"}, {"relu": "offload"})),
)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_first_rank_that_offloads_to_a_folder_in_memory_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    monkeypatch.setattr("pipeloom.runtime.file_tier.lies_in_memory", lambda folder: in_memory)
    warned = []
    for rank in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tier = open_tier(PLAN, (rank,), torch.device("cpu"), tmp_path, rank)
        if tier is not None:
            tier.close()
        warned += [(rank, str(warning.message)) for warning in seen]
    assert [rank for rank, _ in warned] == ([1] if in_memory else [])
    assert all("tmpfs" in text and str(tmp_path) in text and "--offload-dir" in text for _, text in warned)


# Copies of residuals in a file, and the places they take there.


EIO = OSError(errno.EIO, os.strerror(errno.EIO))


def test_no_thread_starts_in_a_step(tier: FileTier) -> None:
    """Where no memory was left for its stack, Python waited for the thread for ever."""
    before = {thread.ident for thread in threading.enumerate()}
    there_and_back(tier, one(PAGE // 4))
    assert {thread.ident for thread in threading.enumerate()} == before


@pytest.mark.parametrize(("call", "asked"), [("pwrite", False), ("pwrite", True), ("preadv", True)])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(EIO, OffloadError), (MemoryError(), OffloadError), (TypeError("nobody thought of it"), TypeError)],
)
def test_it_is_said_and_its_place_and_bytes_are_given_back(
    tier: FileTier,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    asked: bool,
    error: Exception,
    kind: type[Exception],
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(error))
        copy = tier.offload("0OFFLOAD0", one(PAGE // 4))
        if asked:
            copy.reload()
        said = "rank 3 .* 4.0 KiB at 0OFFLOAD0: Input/" if error is EIO and call == "pwrite" else None
        with pytest.raises(kind, match=said):
            (copy.take if asked else copy.leave)(never)
        if call == "pwrite":
            with pytest.raises(kind):
                copy.gone()
    copy.discard()
    there_and_back(tier, one(PAGE // 4))  # copies back follow each other, so the place is given back now
    assert tier.used_bytes == 0
    assert {tier.offload("0OFFLOAD0", one(PAGE // 4)).file_offset for _ in range(2)} == {0, PAGE}
    assert os.fstat(tier._file.fileno()).st_size == 2 * PAGE


def test_steps_after_one_that_failed_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = zoo.job("skips")
    plan = runs.treated_plan(job, runs.even_plan(job, 1, microbatches=4, schedule="gpipe"), "offload")
    with Pipeline(job, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        tier = pipeline.tier
        assert isinstance(tier, FileTier)
        pipeline.step(job.batch(0, 8))
        for call in ("pwrite", "preadv"):
            with monkeypatch.context() as broken:
                broken.setattr(os, call, failing(EIO))
                with pytest.raises(OffloadError, match="Input/output error"):
                    pipeline.step(job.batch(1, 8))
            pipeline.step(job.batch(2, 8))
            assert tier.used_bytes == pipeline.ledger.host == 0
        assert tier._allocator._free == [(0, tier._allocator.end)]


# Free room of a file: what is taken never overlaps, and what is given back is used again.


SIZES = st.integers(0, 12)
MOVES = st.lists(st.tuples(st.booleans(), SIZES), max_size=60)
"""Take a place of that size, or give back one of those taken (the number picks it)."""


class File:
    """A file that may be `limit` long, and what of it is taken, as a list of pieces."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.length, self.limit = 0, limit
        self.taken: list[tuple[int, int]] = []
        self.allocator = FileAllocator(self.lengthen)

    def lengthen(self, end: int, size: int) -> None:
        assert end == self.length and size > 0
        if end + size > self.limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.length += size

    def take(self, size: int) -> None:
        gaps, before = list(self.gaps()), self.length
        begin = self.allocator.allocate(size)
        if size and self.length > before:
            assert all(length < size for _, length in gaps), "there was room"
            last = next((length for at, length in gaps if at + length == before), 0)
            assert self.length == before + size - last
        elif size:
            assert (begin, min(length for _, length in gaps if length >= size)) in gaps
        self.taken.append((begin, size))

    def give_back(self, which: int) -> None:
        if self.taken:
            self.allocator.free(*self.taken.pop(which % len(self.taken)))

    def gaps(self) -> Iterator[tuple[int, int]]:
        at = 0
        for begin, size in [*sorted(piece for piece in self.taken if piece[1]), (self.length, 0)]:
            assert at <= begin <= begin + size <= self.length, "they overlap, or lie outside"
            if begin > at:
                yield at, begin - at
            at = begin + size

    def assert_right(self) -> None:
        assert self.allocator.end == self.length
        assert self.allocator._free == list(self.gaps())


@given(MOVES)
def test_places_never_overlap_and_all_comes_back(moves: list[tuple[bool, int]]) -> None:
    file = File()
    for takes, number in moves:
        file.take(number) if takes else file.give_back(number)
        file.assert_right()
    while file.taken:
        file.give_back(-1)
    file.assert_right()
    assert list(file.gaps()) == ([(0, file.length)] if file.length else [])


@given(MOVES, st.integers(0, 40))
def test_where_the_disk_is_full_nothing_changes(moves: list[tuple[bool, int]], limit: int) -> None:
    file = File(limit)
    for takes, number in moves:
        if not takes:
            file.give_back(number)
            continue
        before = (file.length, list(file.taken))
        try:
            file.take(number)
        except OSError:
            assert before == (file.length, file.taken)
            assert all(length < number for _, length in file.gaps())
        file.assert_right()

"""Residuals of a CPU rank in a file, so that they leave its resident memory.

Written and read through the file descriptor, not mapped: mapped pages would still count as this process's
memory. The file has no name (it is unlinked as soon as it is made), so nothing is left behind however the
process ends, and nobody can remove it under the run. One thread writes and one reads; both release the
interpreter's lock while they copy.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..ir.errors import ConfigError, OffloadError
from ..ir.text import format_bytes
from ..tracer.stage.functions import Tensors
from .tier import Copy, TensorLayout, bytes_of, layouts_of

PAGE = 4096
CHECK_INTERVAL_S = 0.2
"""How often a wait for a copy looks whether another rank has failed."""


@dataclass(eq=False, kw_only=True)
class FileCopy(Copy):
    """Shared by the caller and both threads.

    file_offset: where they begin in the file, in bytes.
    raw: one uint8 tensor per layout: the bytes to write, later the bytes read.
    away, back: the copy there, and the one back once it was asked for.
    discarded: whether that is only to free its bytes of the file.
    """

    tier: FileTier
    raw: list[Tensor]
    file_offset: int = 0
    away: Future[None] = field(init=False)
    back: Future[None] | None = None
    discarded: bool = False

    @property
    def file_bytes(self) -> int:
        return sum(_page_aligned(layout.bytes) for layout in self.layouts)

    def gone(self) -> bool:
        if self.away.done():
            self.tier.wait(self, self.away, lambda: None)
        return self.away.done()

    def leave(self, check: Callable[[], None]) -> None:
        self.tier.wait(self, self.away, check)

    def reload(self) -> None:
        self.back = self.tier.bring_back(self)

    def take(self, check: Callable[[], None]) -> Tensors:
        assert self.back is not None, "it was asked for"
        self.tier.wait(self, self.back, check)
        pairs = zip(self.layouts, self.raw, strict=True)
        residuals = {layout.slot: layout.around(raw) for layout, raw in pairs}
        self.raw.clear()
        return residuals

    def discard(self) -> None:
        self.discarded = True
        if self.back is None:
            self.reload()

    def spans(self) -> Iterator[tuple[TensorLayout, int]]:
        """Each tensor and its offset in the file."""
        at = self.file_offset
        for layout in self.layouts:
            yield layout, at
            at += _page_aligned(layout.bytes)


class FileTier:
    """See `Tier`.

    directory: where the file is; made if it is not there, and left there, as other ranks may be using it.
    Raises: ConfigError if no file can be made there.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.used_bytes = 0
        self._directory, self._rank = directory, rank
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  closed in `close`
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot offload to {directory}: {error.strerror or error}", hint=_ELSEWHERE
            ) from None
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._closed = False
        self._lock = threading.Lock()
        # One thread per direction, so that a copy back overtakes the copies there behind it.
        self._out, self._in = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for thread in (self._out, self._in):
            thread.submit(int).result()  # starts it now: in a step there may be no memory left for its stack

    def offload(self, action: str, residuals: Tensors) -> FileCopy:
        raw = [bytes_of(tensor) for tensor in residuals.values()]
        copy = FileCopy(tier=self, action=action, layouts=layouts_of(residuals), raw=raw)
        self._place(copy)
        residuals.clear()
        copy.away = self._out.submit(self._write, copy)
        return copy

    def bring_back(self, copy: FileCopy) -> Future[None]:
        """Read a copy behind those asked for before, or free its bytes of the file if it is discarded."""
        return self._in.submit(self._read, copy)

    def wait(self, copy: FileCopy, future: Future[None], check: Callable[[], None]) -> None:
        """Raises: OffloadError if the copy fails, whatever else it fails with, and what `check` raises."""
        while not future.done():
            try:
                future.exception(CHECK_INTERVAL_S)
            except TimeoutError:
                check()
        error = future.exception()
        if isinstance(error, OSError):
            raise self._failed(copy.action, f"move {format_bytes(copy.bytes)}", error) from None
        if isinstance(error, RuntimeError | MemoryError):  # as PyTorch and Python say it
            what = "write" if copy.offload_span is None else "bring back"
            raise OffloadError(
                f"rank {self._rank} cannot {what} {format_bytes(copy.bytes)} offloaded at {copy.action}: "
                f"{str(error) or 'out of memory'}",
                hint="leave this machine more memory: end other programs, start fewer ranks on it, or plan "
                f"with smaller micro-batches or a lower cap; {_RESUME}",
            ) from None
        if error is not None:
            raise error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for thread in (self._out, self._in):
            thread.shutdown()
        try:
            self._file.close()
        except OSError as error:  # all that was needed of it has been read
            warnings.warn(
                f"rank {self._rank}: {self._directory} did not close the file of offloaded residuals: "
                f"{error.strerror or error}; nothing that was learnt is lost, but see if the disk is full",
                stacklevel=3,
            )

    def _place(self, copy: FileCopy) -> None:
        """Give it a place in the file that nothing else uses: one of its size that was freed, as most copies
        are of one size, else behind all others."""
        size = copy.file_bytes
        try:
            with self._lock:
                if self._free[size]:
                    copy.file_offset = self._free[size].pop()
                else:
                    if size and hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(self._file.fileno(), self._end, size)
                    copy.file_offset, self._end = self._end, self._end + size
                self.used_bytes += copy.bytes
        except OSError as error:
            raise self._failed(copy.action, f"write {format_bytes(size)}", error) from None

    def _free_place(self, copy: FileCopy) -> None:
        """Once no copy is left, as between two steps, the file is filled from its start again."""
        with self._lock:
            self.used_bytes -= copy.bytes
            self._free[copy.file_bytes].append(copy.file_offset)
            if not self.used_bytes:
                self._free.clear()
                self._end = 0

    def _write(self, copy: FileCopy) -> None:
        self._refuse_if_closed(copy)
        begin = time.perf_counter()
        try:
            for (_, place), raw in zip(copy.spans(), copy.raw, strict=True):
                _copy(os.pwrite, self._file.fileno(), raw, place)
        finally:
            copy.raw.clear()
        self._forget_pages(copy)
        copy.offload_span = (begin, time.perf_counter())

    def _read(self, copy: FileCopy) -> None:
        """Read what is wanted, and free its bytes of the file however that ends."""
        try:
            copy.away.result()
            self._refuse_if_closed(copy)
            if not copy.discarded:
                self._read_back(copy)
        finally:
            self._free_place(copy)

    def _refuse_if_closed(self, copy: FileCopy) -> None:
        if self._closed:
            raise OffloadError(f"{copy.action} was given up", hint="the run had ended")

    def _read_back(self, copy: FileCopy) -> None:
        begin = time.perf_counter()
        for layout, place in copy.spans():
            copy.raw.append(torch.empty(layout.bytes, dtype=torch.uint8))
            done = _copy(_read_into, self._file.fileno(), copy.raw[-1], place)
            if done < layout.bytes:
                raise OffloadError(
                    f"rank {self._rank} offloaded {format_bytes(layout.bytes)} at {copy.action}, but of "
                    f"{layout.slot.name} only {format_bytes(done)} are left in {self._directory}",
                    hint=f"something cut the file short: resume from the last checkpoint, and {_ELSEWHERE}",
                )
        self._forget_pages(copy)
        copy.reload_span = (begin, time.perf_counter())

    def _forget_pages(self, copy: FileCopy) -> None:
        """Tell the system that it need not cache them: it would hold what was to leave its memory."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), copy.file_offset, copy.file_bytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, action: str, what: str, error: OSError) -> OffloadError:
        left = shutil.disk_usage(self._directory).free if self._directory.is_dir() else 0
        return OffloadError(
            f"rank {self._rank} cannot {what} at {action}: {error.strerror or error}; {self._directory} has "
            f"{format_bytes(left)} free, {format_bytes(self.used_bytes)} of residuals are there",
            hint=f"make room there, {_ELSEWHERE}, or plan with fewer offloaded residuals; {_RESUME}",
        )


_ELSEWHERE = "name another directory with --offload-dir (Options.offload_dir)"
_RESUME = "then resume from the last checkpoint: what was learnt since then is lost"


def open_file_tier(rank: int, directory: Path | None, first: bool) -> FileTier:
    """A file in the folder that the user named, or in the system's for temporary ones.

    first: of all ranks that offload; it warns where files there would take memory instead of freeing it.
    """
    folder = directory or Path(tempfile.gettempdir())
    if first and lies_in_memory(folder):
        warnings.warn(
            f"offloaded residuals go to {folder}, which lies in memory (tmpfs): offloading frees none there; "
            "name a folder on a disk with --offload-dir (Options.offload_dir)",
            stacklevel=5,  # whoever made the pipeline
        )
    return FileTier(folder, rank)


def lies_in_memory(directory: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether files there take the machine's memory, as far as the system says: Linux does, in `mounts`.

    directory: it, or the nearest of its parents that is there, is looked at.
    """
    try:
        there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
        device = there.stat().st_dev
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for _, point, kind, *_ in map(str.split, lines):
        if kind in ("tmpfs", "ramfs"):
            path = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)  # a space is \040 there
            with suppress(OSError):  # one that we may not look into is not the one that we write to
                if os.stat(path).st_dev == device:
                    return True
    return False


def _page_aligned(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _copy(move: Callable[[int, memoryview, int], int], file: int, raw: Tensor, place: int) -> int:
    """Move all of `raw`, which may take several calls. Returns the bytes moved: fewer at the file's end."""
    view, done = memoryview(raw.numpy().data), 0
    while done < len(view):
        moved = move(file, view[done:], place + done)
        if not moved:
            break
        done += moved
    return done


def _read_into(file: int, view: memoryview, place: int) -> int:
    return os.preadv(file, [view], place)

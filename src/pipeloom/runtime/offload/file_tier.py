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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from ...ir.errors import ConfigError, OffloadError
from ...ir.units import format_bytes
from ...tracer import Tensors
from .file_allocator import Places
from .tier import Layout, Trip, bytes_of

PAGE = 4096
NOTICE_S = 0.2
"""How often a wait looks whether another rank has failed."""


@dataclass(eq=False)
class FileTrip(Trip):
    """place: offset in the file.  raw: the bytes to write, later those read.  error: why a copy failed.

    asked, unwanted: whether it is to come back, and whether only its place is.
    """

    action: str = ""
    place: int = 0
    raw: list[Tensor] = field(default_factory=list)
    away: threading.Event = field(default_factory=threading.Event)
    back: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    asked: bool = False
    unwanted: bool = False

    def spans(self) -> Iterator[tuple[Layout, int]]:
        """Each tensor and its offset in the file."""
        at = self.place
        for layout in self.layouts:
            yield layout, at
            at += _whole_pages(layout.bytes)


class FileTier:
    """See `Tier`.

    directory: where the file is; made if it is not there, and left there, as other ranks may be using it.
    Raises: ConfigError if no file can be made there.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.held_bytes = self.peak_bytes = 0
        self._directory, self._rank = directory, rank
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  closed in `close`
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot offload to {directory}: {error.strerror or error}", hint=_ELSEWHERE
            ) from None
        self._places = Places(self._reserve)
        self._closed = False
        self._lock = threading.Lock()
        self._out: SimpleQueue[FileTrip | None] = SimpleQueue()
        self._in: SimpleQueue[FileTrip | None] = SimpleQueue()
        work = ((self._out, self._write), (self._in, self._read))
        self._threads = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in work]
        for thread in self._threads:
            thread.start()

    def leave(self, action: str, residuals: Tensors) -> FileTrip:
        layouts = tuple(Layout.of(slot, tensor) for slot, tensor in residuals.items())
        trip = FileTrip(layouts, action=action, raw=[bytes_of(tensor) for tensor in residuals.values()])
        trip.place = self._take(_room(trip), action)
        residuals.clear()
        self._hold(trip.bytes)
        self._out.put(trip)
        return trip

    def is_away(self, trip: Trip) -> bool:
        assert isinstance(trip, FileTrip)
        self._require(trip)
        return trip.away.is_set()

    def finish_leaving(self, trip: Trip, check: Callable[[], None]) -> None:
        assert isinstance(trip, FileTrip)
        while not trip.away.wait(NOTICE_S):
            check()
        self._require(trip)

    def come_back(self, trip: Trip) -> None:
        assert isinstance(trip, FileTrip)
        trip.asked = True
        self._in.put(trip)

    def give_up(self, trip: Trip) -> None:
        assert isinstance(trip, FileTrip)
        trip.unwanted = True
        if not trip.asked:
            self.come_back(trip)

    def arrived(self, trip: Trip, check: Callable[[], None]) -> Tensors:
        assert isinstance(trip, FileTrip)
        while not trip.back.wait(NOTICE_S):
            check()
        self._require(trip)
        found = {layout.slot: layout.around(raw) for layout, raw in zip(trip.layouts, trip.raw, strict=True)}
        trip.raw.clear()
        return found

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for queue in (self._out, self._in):
            queue.put(None)
        for thread in self._threads:
            thread.join()
        try:
            self._file.close()
        except OSError as error:  # all that was needed of it has been read
            warnings.warn(
                f"rank {self._rank}: {self._directory} did not close the file of offloaded residuals: "
                f"{error.strerror or error}; nothing that was learnt is lost, but see if the disk is full",
                stacklevel=3,
            )

    def _take(self, size: int, action: str) -> int:
        """A place in the file."""
        try:
            with self._lock:
                return self._places.take(size)
        except OSError as error:
            raise self._failed(action, f"write {format_bytes(size)}", error) from None

    def _reserve(self, end: int, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), end, size)

    def _serve(self, queue: SimpleQueue[FileTrip | None], work: Callable[[FileTrip], None]) -> None:
        while (trip := queue.get()) is not None:
            if self._closed:
                trip.error = OffloadError(f"{trip.action} was given up", hint="the run had ended")
            try:
                work(trip)
            except Exception as error:  # whatever it is: who waits for the copy is to raise it
                trip.error = error
            if trip.error is not None:
                trip.raw.clear()
                trip.back.set()
            trip.away.set()
            del trip  # or the queue's wait for the next one would keep its tensors

    def _write(self, trip: FileTrip) -> None:
        if trip.error is not None:
            return
        begin = time.perf_counter()
        for (_, place), raw in zip(trip.spans(), trip.raw, strict=True):
            _copy(os.pwrite, self._file.fileno(), raw, place)
        trip.raw.clear()
        self._forget_pages(trip)
        trip.left = (begin, time.perf_counter())

    def _read(self, trip: FileTrip) -> None:
        """Read what is wanted, and give its place back however that ends."""
        trip.away.wait()
        try:
            if trip.error is None and not trip.unwanted:
                self._fetch(trip)
        finally:
            self._hold(-trip.bytes)
            with self._lock:
                self._places.give_back(trip.place, _room(trip))
        trip.back.set()

    def _fetch(self, trip: FileTrip) -> None:
        begin = time.perf_counter()
        for layout, place in trip.spans():
            trip.raw.append(torch.empty(layout.bytes, dtype=torch.uint8))
            done = _copy(_read_into, self._file.fileno(), trip.raw[-1], place)
            if done < layout.bytes:
                raise OffloadError(
                    f"rank {self._rank} offloaded {format_bytes(layout.bytes)} at {trip.action}, but of "
                    f"{layout.slot.name} only {format_bytes(done)} are left in {self._directory}",
                    hint=f"something cut the file short: resume from the last checkpoint, and {_ELSEWHERE}",
                )
        self._forget_pages(trip)
        trip.returned = (begin, time.perf_counter())

    def _hold(self, change: int) -> None:
        """Both the caller's thread and the one that reads change it."""
        with self._lock:
            self.held_bytes += change
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget_pages(self, trip: FileTrip) -> None:
        """Tell the system that it need not cache them: it would hold what was to leave its memory."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), trip.place, _room(trip), os.POSIX_FADV_DONTNEED)

    def _require(self, trip: FileTrip) -> None:
        if isinstance(trip.error, OSError):
            raise self._failed(trip.action, f"move {format_bytes(trip.bytes)}", trip.error) from None
        if isinstance(trip.error, RuntimeError | MemoryError):  # as PyTorch and Python say it
            what = "write" if trip.left is None else "bring back"
            raise OffloadError(
                f"rank {self._rank} cannot {what} {format_bytes(trip.bytes)} offloaded at {trip.action}: "
                f"{str(trip.error) or 'out of memory'}",
                hint="leave this machine more memory: end other programs, start fewer ranks on it, or plan "
                f"with smaller micro-batches or a lower cap; {_RESUME}",
            ) from None
        if trip.error is not None:
            raise trip.error

    def _failed(self, action: str, what: str, error: OSError) -> OffloadError:
        left = shutil.disk_usage(self._directory).free if self._directory.is_dir() else 0
        return OffloadError(
            f"rank {self._rank} cannot {what} at {action}: {error.strerror or error}; {self._directory} has "
            f"{format_bytes(left)} free, {format_bytes(self.held_bytes)} of residuals are there",
            hint=f"make room there, {_ELSEWHERE}, or plan with fewer offloaded residuals; {_RESUME}",
        )


_ELSEWHERE = "name another directory with --offload-dir (Options.offload_dir)"
_RESUME = "then resume from the last checkpoint: what was learnt since then is lost"


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


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _room(trip: Trip) -> int:
    return sum(_whole_pages(layout.bytes) for layout in trip.layouts)


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

"""Text as bytes: which files, which of them for validation, and random windows of them.

The files are read where they lie: a window is read when it is asked for, so neither memory nor start-up
time grows with the text, and nothing is copied.
"""

from __future__ import annotations

import hashlib
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..ir.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class FileSpan:
    """name: what the file is called wherever it lies."""

    path: Path
    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Text:
    """Spans in a fixed order, read as one long text."""

    spans: tuple[FileSpan, ...]

    @cached_property
    def ends(self) -> list[int]:
        """Where each span ends in the long text."""
        return list(accumulate(span.size for span in self.spans))

    def __len__(self) -> int:
        return self.ends[-1] if self.spans else 0

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files' names and sizes: a run does not go on over another text unnoticed."""
        listed = repr([(span.name, span.start, span.stop) for span in self.spans])
        return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()

    def read(self, offset: int, size: int) -> Bytes:
        """`size` bytes from `offset` on, over the borders of files."""
        pieces = []
        index = bisect_right(self.ends, offset)
        while size > 0:
            span = self.spans[index]
            inside = offset - (self.ends[index] - span.size)
            count = min(size, span.size - inside)
            pieces.append(_read(span, inside, count))
            offset, size, index = offset + count, size - count, index + 1
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def windows(self, seed: int, count: int, size: int) -> Bytes:
        """`count` windows of `size` bytes at places drawn from `seed`: [count, size]."""
        starts = np.random.default_rng(seed).integers(0, len(self) - size + 1, size=count)
        return np.stack([self.read(int(start), size) for start in starts])


def standard_library() -> list[FileSpan]:
    """The .py files of this Python's standard library, without its tests, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not _NOT_THE_LIBRARY & {*f.relative_to(root).parts}]
    if not files:
        raise ConfigError(
            f"this Python has no standard library sources in {root}",
            hint="give your own text with --set data.paths=FILE_OR_FOLDER",
        )
    return _spans(root, files)


def files_of(paths: Sequence[str]) -> list[FileSpan]:
    """All files named, and those in folders named that are not hidden."""
    spans: list[FileSpan] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [f for f in path.rglob("*") if not _hidden(f.relative_to(path)) and f.is_file()]
            spans += _spans(path, inside)
        else:
            spans += _spans(path.parent, [path])
    if not sum(span.size for span in spans):
        text = f"data.paths {', '.join(paths)}: no file with text in it"
        raise ConfigError(text, hint="name files or folders that have text")
    return spans


def split(spans: Sequence[FileSpan], validation_share: float) -> tuple[Text, Text]:
    """(training text, validation text): by file, by a hash of its name, so that added files move no other.

    With so few files that one side would stay empty, the end of each file is kept for validation.
    """
    chosen = [span for span in spans if _unit_hash(span.name) < validation_share]
    rest = [span for span in spans if _unit_hash(span.name) >= validation_share]
    if not chosen or not rest:
        border = {span: span.stop - round(span.size * validation_share) for span in spans}
        rest = [replace(span, stop=border[span]) for span in spans]
        chosen = [replace(span, start=border[span]) for span in spans]
    return Text(tuple(rest)), Text(tuple(chosen))


def _spans(root: Path, files: Sequence[Path]) -> list[FileSpan]:
    spans = []
    for file in files:
        try:
            size = file.stat().st_size
            with file.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot read data file {file}: {error.strerror}", hint="check data.paths"
            ) from None
        spans.append(FileSpan(file, file.relative_to(root).as_posix(), 0, size))
    return sorted((span for span in spans if span.size), key=lambda span: span.name)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _unit_hash(name: str) -> float:
    """In [0, 1)."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _read(span: FileSpan, offset: int, size: int) -> bytes:
    try:
        with span.path.open("rb") as file:
            file.seek(span.start + offset)
            content = file.read(size)
    except OSError as error:
        raise ConfigError(
            f"cannot read data file {span.path}: {error.strerror}", hint="put it back and resume"
        ) from None
    if len(content) < size:
        raise ConfigError(
            f"data file {span.path} has become shorter during the run", hint="put it back and resume"
        )
    return content

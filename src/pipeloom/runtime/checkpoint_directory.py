"""Checkpoint directories on disk: whole or absent, whatever happens while one is written.

    checkpoint/
      latest                     the name of the newest complete one, replaced atomically
      step-00000100/             complete: index.json was written last, and only then the folder renamed
        rank-0.safetensors       tensors, one file per rank that wrote any
        index.json               what is in here and where, and size and CRC-32 of every other file
      step-00000200.partial/     being written, or left by a crash: never read, removed by the next save
      step-00000100.old/         the same step saved again: read only if the new one did not come to stand
      step-00000050.doomed/      being removed

A save, and what a crash behind each of its steps leaves to readers and to the next save:

    prepare   mkdir step-N.partial          removed by the next save; readers never look at it
    (each rank writes its tensors)
    publish   write index.json              still .partial: removed
              step-N -> step-N.old          only if step N was saved before; .old is read, and renamed back
              step-N.partial -> step-N      complete; `latest` names the one before, which is complete, too
              latest -> step-N              done
              old ones -> .doomed, removed  the next save removes the rest

Nothing here knows about tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..ir.errors import CheckpointError, shown

SCHEMA = 3
INDEX = "index.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_CHUNK_BYTES = 1 << 22
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in a file's place makes nobody wait
ELSEWHERE = "remove it to use the one before it, or name another checkpoint"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a checkpoint holds besides its tensors.

    model: FQN -> (shape, dtype) of each parameter and buffer.  aliases: other name of a tied
    parameter -> the name it is stored under.  optimizers: FQN -> class of its optimizer.
    groups: FQN -> its hyper-parameters.  values: FQN -> optimizer state that is not a tensor;
        of lists, tuples and dicts their shape as torch's pytree writes it, and leaves that are no tensors.
    extra: what the caller added.  files: name -> (bytes, CRC-32).  tensors: key -> the file that has it.
    complex: keys of complex numbers that are stored as pairs, as safetensors has no such dtype.
    parts: FQN of a parameter that is stored in parts -> the rows of each. The part of a tensor with the key
    k, such as `model.lm_head.weight`, has the key `k[0:16000]`.
    """

    schema: int
    step: int
    model: Mapping[str, tuple[tuple[int, ...], str]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    complex: tuple[str, ...] = ()
    parts: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def keys(self, key: str, fqn: str) -> list[str]:
        """Where a tensor of a parameter or buffer is stored: under its key, or in parts."""
        parts = [] if key in self.tensors else [key_of(key, rows) for rows in self.parts.get(fqn, ())]
        return parts if parts and all(part in self.tensors for part in parts) else [key]


def key_of(key: str, rows: tuple[int, int] | None) -> str:
    """
    >>> key_of("model.head.weight", (0, 16000)), key_of("model.norm.weight", None)
    ('model.head.weight[0:16000]', 'model.norm.weight')
    """
    return key if rows is None else f"{key}[{rows[0]}:{rows[1]}]"


def name_of(step: int) -> str:
    """
    >>> name_of(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints of a directory, oldest step first."""
    if not directory.is_dir():
        return []
    named = [(int(m[1]), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))]
    own = [path for _, path in sorted(named) if not path.is_symlink() and (path / INDEX).is_file()]
    return [path for path in own if not _replaced(path)]


def newest(directory: Path) -> Path:
    """The checkpoint to read: `directory` itself if it is one, else the one that `latest` names.

    A crash between the renaming and the writing of `latest` leaves the one before named, which is
    complete too. Without `latest`, or the one that it names, the highest step counts. Links among the
    checkpoints of a directory are not followed: name such a checkpoint itself.

    Raises: CheckpointError if there is none, or `latest` leads elsewhere.
    """
    if (directory / INDEX).is_file():
        return directory
    checkpoints = complete(directory)
    latest = directory / LATEST
    if latest.is_file():
        hint = "write the one to go on with there: "
        hint += ", ".join(path.name for path in checkpoints) or "none is there"
        try:
            name = read(latest).decode(errors="replace").strip()
        except OSError as error:
            why = "it is a link" if latest.is_symlink() else error.strerror
            raise CheckpointError(f"cannot read {latest}: {why}", hint=hint) from None
        if _NAME.fullmatch(name) is None:
            raise CheckpointError(f"{latest} names no checkpoint of its directory: {shown(name)}", hint=hint)
        for named in (directory / name, directory / (name + ".old")):
            if named in checkpoints:
                return named
    if checkpoints:
        return checkpoints[-1]
    what = "holds no complete checkpoint" if directory.is_dir() else "does not exist"
    raise CheckpointError(f"checkpoint directory {directory} {what}", hint="check the path, or train first")


def prepare(directory: Path, step: int) -> Path:
    """An empty folder to write into, after clearing what crashes have left."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob("step-*.old"):
            if not _replaced(left):
                left.replace(left.with_suffix(""))
        _sweep(directory, ".partial", ".old", ".doomed")
        partial = directory / (name_of(step) + ".partial")
        partial.mkdir()
    except OSError as error:
        raise _cannot_write(directory, error) from None
    return partial


def publish(partial: Path, index: Index, *, keep: int) -> Path:
    """Make a written folder the newest checkpoint, then drop old ones so that `keep` remain."""
    directory, final = partial.parent, partial.with_suffix("")
    try:
        write_new(partial / INDEX, json.dumps(asdict(index)))
        sync(partial)
        if final.exists():  # saved again at the same step: the old one steps aside until the new one stands
            final.replace(final.with_name(final.name + ".old"))
        partial.replace(final)
        sync(directory)
        new_latest = directory / (LATEST + ".partial")
        new_latest.unlink(missing_ok=True)  # left by a crash
        write_new(new_latest, final.name + "\n")
        new_latest.replace(directory / LATEST)
        sync(directory)
        _prune(directory, index.step, keep)
    except OSError as error:
        raise _cannot_write(directory, error) from None
    return final


def read_index(path: Path) -> Index:
    try:
        plain = json.loads(read(path / INDEX))
        schema = plain["schema"]
        if schema != SCHEMA:
            raise CheckpointError(
                f"checkpoint {path} has schema {schema}, this pipeloom reads {SCHEMA}",
                hint="load it with the version that wrote it",
            )
        index = msgspec.convert(plain, Index)
        for name in index.files:
            if name != Path(name).name or name == ".." or "\0" in name:
                raise ValueError(f"it names the file {shown(name)}, which is not in its folder")
        for key, name in index.tensors.items():
            if name not in index.files:
                raise ValueError(f"it has {shown(key)} in {shown(name)}, no file of the checkpoint")
        stored = {name: index.keys(f"model.{name}", name) for name in index.model}
        if lost := next((n for n, keys in stored.items() if not index.tensors.keys() >= {*keys}), None):
            raise ValueError(f"it does not say where {shown(lost)} is")
        return index
    except OSError as error:
        raise CheckpointError(
            f"cannot read checkpoint {path}: {error.strerror}", hint="check the path"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # of msgspec and json
        raise corrupt(path, f"{INDEX}: {error}") from None


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Name -> (bytes, CRC-32) of the files."""
    sums = {}
    for name in names:
        size = crc = 0
        with os.fdopen(os.open(folder / name, _TO_READ), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        sums[name] = (size, crc)
    return sums


def verify_sizes(path: Path, index: Index) -> None:
    for name, (size, _) in sorted(index.files.items()):
        try:
            found = (path / name).lstat()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} is incomplete: {name}: {error.strerror}", hint=ELSEWHERE
            ) from None
        if not stat.S_ISREG(found.st_mode):
            hint = "put the file itself there, or name another checkpoint"
            raise corrupt(path, f"{name} is no file but a {_kind(found.st_mode)}", hint)
        if found.st_size != size:
            raise corrupt(path, f"{name} has {found.st_size} bytes instead of {size}")


def verify(path: Path, index: Index, *, share: int, shares: int) -> None:
    """Check all sizes, and the bytes of every `shares`-th file: ranks divide the reading among them."""
    verify_sizes(path, index)
    for name in sorted(index.files)[share::shares]:
        try:
            same = checksums(path, [name])[name] == tuple(index.files[name])
        except OSError as error:
            raise CheckpointError(f"cannot read {path / name}: {error.strerror}", hint=ELSEWHERE) from None
        if not same:
            raise corrupt(path, f"the bytes of {name} have changed since it was saved")


def corrupt(path: Path, why: str, hint: str = ELSEWHERE) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is corrupt: {why}", hint=hint)


def discard(partial: Path) -> None:
    """Remove a folder that could not be finished, so that it does not keep a full disk full."""
    shutil.rmtree(partial, ignore_errors=True)


def _prune(directory: Path, step: int, keep: int) -> None:
    """Later steps than the one just saved are another run's future: they stay."""
    old = [path for path in complete(directory) if int(path.name.removeprefix("step-")) < step]
    for path in old[: max(len(old) - (keep - 1), 0)]:
        doomed = path.with_name(path.name + ".doomed")
        path.replace(doomed)  # never half deleted under its own name
    _sweep(directory, ".old", ".doomed")


def _replaced(path: Path) -> bool:
    return path.suffix == ".old" and path.with_suffix("").exists()


def _sweep(directory: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        for path in directory.glob(f"step-*{suffix}"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)


def _kind(mode: int) -> str:
    return "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "device or pipe"


def read(path: Path) -> bytes:
    """A file of a checkpoint. Raises: OSError if it is not there, or a link."""
    with os.fdopen(os.open(path, _TO_READ), "rb") as file:
        return file.read()


def write_new(path: Path, text: str) -> None:
    """A file that is not there yet: nobody can have put a link in its place."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write a checkpoint in {directory}: {error.strerror or error}",
        hint="free some space or choose another directory; earlier checkpoints are untouched",
    )

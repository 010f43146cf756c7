"""Run directories: runs/<name>-<n>, with everything that a run leaves behind.

config.toml      the resolved settings          plan.json     how the model is spread
metrics.jsonl    one line a step                checkpoint/   see runtime/checkpoint_directory.py
trace.json       for Perfetto                   report.html   open it in a browser
timelines.json   for the studio                 summary.json  the figures that `--json` prints

Nothing of these is written before a run trains: a start that fails leaves a directory as it was.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from ..ir.errors import ConfigError
from ..ir.text import write_whole, writing
from ..runtime.checkpoint_directory import complete

RUNS, METRICS, LOCK, TIMELINES = Path("runs"), "metrics.jsonl", "lock", "timelines.json"

REPORT = ("trace.json", "report.html", "summary.json")
"""What is written when all steps are done, in this order."""

FILES = ("config.toml", "plan.json", METRICS, LOCK, "checkpoint", TIMELINES, *REPORT)
"""All that a run reads and writes in its directory."""

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""What disks say that know no locks, as some network disks."""

_log = logging.getLogger("pipeloom")


@contextmanager
def run_directory(name: str, out: Path | None, *, resume: bool) -> Iterator[Path]:
    """The directory of a new run, or of the one to resume, in which no other run trains meanwhile.
    At the end the folders that were made for it are removed if nothing was written into them."""
    path, new_folders = (find_run(name, out), []) if resume else new_directory(name, out)
    lock = FileLock(path / LOCK, timeout=0)
    try:
        require_plain_files(path)
        _acquire(lock, path)
        if not resume and (path / "config.toml").exists():
            hint = "add --resume to go on with it, or give another --out"
            if not complete(path / "checkpoint"):
                hint = "it has no checkpoint to go on from: remove it, or give another --out"
            raise ConfigError(f"{path} holds a run already", hint=hint)
        yield path
    finally:
        if lock.is_locked:
            (path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # something is in it
            for folder in new_folders:
                folder.rmdir()
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a run trains in a directory. The lock's file may be left of one that was killed."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except OSError:  # a Timeout is one; others come from disks without locks, or of somebody else
        return True


def _acquire(lock: FileLock, path: Path) -> None:
    was_there = (path / LOCK).exists()
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{path} is in use by another run", hint="wait until that has ended, or choose another --out"
        ) from None
    except OSError as error:
        if not was_there:
            with suppress(OSError):  # of a disk that cannot be written
                (path / LOCK).unlink()
        if error.errno not in NO_LOCKS:
            raise ConfigError(f"cannot lock {path}: {error.strerror}", hint="choose another --out") from None
        text = "%s is on a disk without locks (%s): see to it that no other run trains in it"
        _log.warning(text, path, error.strerror)


def new_directory(name: str, out: Path | None) -> tuple[Path, list[Path]]:
    """`out`, or the next free runs/<name>-<n>; and the folders that were made, the innermost first."""
    try:
        if out is not None:
            new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
            return out, new_folders
        new_folders = [] if RUNS.exists() else [RUNS]
        RUNS.mkdir(exist_ok=True)
        number = max(_numbers(name), default=0) + 1
        while True:
            try:
                (path := RUNS / f"{name}-{number}").mkdir()
                return path, [path, *new_folders]
            except FileExistsError:  # another run started at the same moment
                number += 1
    except OSError as error:
        raise ConfigError(
            f"cannot make a run directory: {error.filename}: {error.strerror}", hint="choose another --out"
        ) from None


def find_run(name: str, out: Path | None) -> Path:
    """`out`, or the newest run of that name that has a checkpoint; if none has, the newest."""
    if out is not None:
        if (out / "config.toml").is_file():
            return out
        raise ConfigError(f"{out} holds no run", hint="give the directory of a run, or leave out --resume")
    paths = [RUNS / f"{name}-{number}" for number in sorted(_numbers(name), reverse=True)]
    if runs := [path for path in paths if (path / "config.toml").is_file()]:
        return next((path for path in runs if complete(path / "checkpoint")), runs[0])
    raise ConfigError(
        f"there is no run {RUNS / name}-<n> to resume",
        hint="give its directory with --out, go to the folder in which it was started, or train first",
    )


def _numbers(name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    runs = RUNS.iterdir() if RUNS.is_dir() else ()
    return [int(m[1]) for run in runs if (m := pattern.fullmatch(run.name))]


def require_plain_files(path: Path) -> None:
    """Refuse a directory in which a link would lead a run's reading and writing out of it."""
    for name in FILES:
        file = path / name
        if file.is_symlink():
            raise ConfigError(
                f"{file} is a link to {os.readlink(file)}: a run keeps its files in its own directory",
                hint="copy what it leads to in its place, or choose another --out, which may be a link",
            )
        if file.exists() and not (file.is_dir() if name == "checkpoint" else file.is_file()):
            raise ConfigError(f"{file} is in the way of a run's file of that name", hint="move it")


def has_report(path: Path, steps: int) -> bool:
    """Whether a run's report is there, whole and of so many steps."""
    try:
        summary = msgspec.json.decode((path / "summary.json").read_bytes(), type=dict[str, object])
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return summary.get("steps") == steps and all((path / name).is_file() for name in REPORT)


class StepLine(msgspec.Struct):
    step: int
    loss: float | None = None
    validation_loss: float | None = None
    step_s: float | None = None


class Metrics(AbstractContextManager["Metrics"]):
    """metrics.jsonl: one JSON object per step, on disk as soon as the step is over, of `progress.figures_of`.

        {"step": 12, "loss": 2.9, "learning_rate": 0.0012, "step_s": 0.31, "rows_per_s": 103.2,
         "tokens_per_s": 13213.0, "bubble": 0.11, "peak_bytes": [41943040, 40265318], "grad_norm": 1.7,
         "validation_loss": 2.8}

    `validation_loss` stands only on steps after which validation ran, and on a line for step 0, which has
    nothing else: the untrained model's. `learning_rate` and `grad_norm` stand only where they are known.

    Figures that are no numbers stand as NaN or Infinity, as Python's json writes them.
    Appends to the file. A resumed run first drops the steps that it will run again, and what is no line of
    figures: the last one may have been cut by a crash.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        write_whole(path, "".join(text for text, line in _lines(path) if line.step <= after_step))
        with writing(path):
            self._file = path.open("a")

    def write(self, values: Mapping[str, Any]) -> None:
        """Figures that are None are left out."""
        with writing(self.path):
            self._file.write(json.dumps({k: v for k, v in values.items() if v is not None}) + "\n")
            self._file.flush()

    def __exit__(self, *error: object) -> None:
        with writing(self.path):  # a line that the disk refused is tried once more here
            self._file.close()


def read_metrics(path: Path) -> list[StepLine]:
    """The lines of a metrics.jsonl, also of a run that trains; none if there is no such file yet."""
    return [line for _, line in _lines(path)]


def _lines(path: Path) -> list[tuple[str, StepLine]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check its rights") from None
    lines, damaged = [], 0
    for line in content.splitlines(keepends=True):
        try:
            text = line.decode()
            lines.append((text, msgspec.convert(json.loads(text), StepLine)))
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            damaged += line.endswith(b"\n")
    if damaged:
        _log.warning("%s has %d lines that are no figures of a step: left out", path, damaged)
    return lines

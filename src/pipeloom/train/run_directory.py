"""Run directories: runs/<name>-<n>, with everything that a run leaves behind.

config.toml      the resolved settings          plan.json     how the model is spread
metrics.jsonl    one line a step                checkpoint/   see runtime/checkpoint/files.py
trace.json       for Perfetto                   report.html   open it in a browser
summary.json     the figures that `--json` prints
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..ir.errors import ConfigError
from ..ir.text_files import write_whole, writing
from .run_lock import LOCK

RUNS = Path("runs")

STARTED = "metrics.jsonl"
"""The first file that training writes."""

WRITTEN = ("config.toml", "plan.json")
"""What is written before the ranks start."""


REPORT = ("trace.json", "report.html", "summary.json")
"""What is written when all steps are done, in this order."""

OWN = (*WRITTEN, STARTED, LOCK, "checkpoint", *REPORT)
"""All that a run reads and writes in its directory."""


def require_own_files(out: Path) -> None:
    """Refuse a directory in which a link would lead a run's reading and writing out of it.

    Raises: ConfigError that names the link.
    """
    for name in OWN:
        path = out / name
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}: a run keeps its files in its own directory",
                hint="copy what it leads to in its place, or choose another --out, which may be a link",
            )
        if path.exists() and not (path.is_dir() if name == "checkpoint" else path.is_file()):
            raise ConfigError(f"{path} is in the way of a run's file of that name", hint="move it")


def require_new(out: Path | None) -> None:
    """Refuse a directory for a new run before work is done for it.

    Raises: ConfigError if `out` holds a run already, or nothing may be written there.
    """
    if out is not None and (out / "config.toml").exists():
        raise ConfigError(
            f"{out} holds a run already", hint="add --resume to go on with it, or give another --out"
        )
    if out is not None:
        require_own_files(out)
    place = out or RUNS
    folder = next(path for path in (place, *place.parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "writing there is not allowed" if folder.is_dir() else "it is no folder"
        raise ConfigError(f"cannot make a run directory: {folder}: {reason}", hint="choose another --out")


def new_run(name: str, out: Path | None) -> Path:
    """A fresh directory: `out`, or the next free runs/<name>-<n>.

    Raises: ConfigError if `out` holds a run already, or the disk refuses.
    """
    require_new(out)
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            return out
        RUNS.mkdir(exist_ok=True)
        number = max(_numbers(name), default=0) + 1
        while True:
            try:
                (run := RUNS / f"{name}-{number}").mkdir()
                return run
            except FileExistsError:  # another run started at the same moment
                number += 1
    except OSError as error:
        raise ConfigError(
            f"cannot make a run directory: {error.filename}: {error.strerror}", hint="choose another --out"
        ) from None


@dataclass(frozen=True, kw_only=True)
class DirectorySnapshot:
    """A run directory before a start: if the ranks end before they train, it is put back, so that the next
    try finds the place free, or the run as it was.

    existed: the directory.  files: what a start writes, None for what was not there.  stamp: tells whether
        `STARTED` was written since.
    """

    existed: bool
    files: Mapping[str, bytes | None]
    stamp: tuple[int, int] | None

    @staticmethod
    def of(out: Path | None) -> DirectorySnapshot:
        """out: None for a directory that is yet to be made."""
        if out is None or not out.exists():
            return DirectorySnapshot(existed=False, files=dict.fromkeys(WRITTEN), stamp=None)
        paths = {name: out / name for name in WRITTEN}
        files = {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}
        return DirectorySnapshot(existed=True, files=files, stamp=_stamp(out))

    def restore(self, out: Path) -> None:
        """Make `out` what it was, unless training began."""
        if not out.exists() or _stamp(out) != self.stamp:
            return
        for name, content in self.files.items():
            if content is None:
                (out / name).unlink(missing_ok=True)
            else:
                (out / name).write_bytes(content)
        if not self.existed and {path.name for path in out.iterdir()} <= {LOCK}:
            (out / LOCK).unlink(missing_ok=True)
            out.rmdir()


@dataclass(frozen=True)
class Reported:
    """What summary.json says of how far a run got. first_step: steps done when it was last started."""

    steps: int
    first_step: int


def reported(out: Path) -> Reported | None:
    """Of which steps a run's directory has a whole report; None if it was never written, or is damaged."""
    if not all((out / name).is_file() for name in REPORT):
        return None
    try:
        return msgspec.json.decode((out / "summary.json").read_bytes(), type=Reported)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _stamp(out: Path) -> tuple[int, int] | None:
    try:
        found = (out / STARTED).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def find_run(name: str, out: Path | None) -> Path:
    """The run to resume: `out`, or the newest of that name.

    Raises: ConfigError if there is none.
    """
    if out is not None:
        if not (out / "config.toml").is_file():
            raise ConfigError(
                f"{out} holds no run", hint="give the directory of a run, or leave out --resume"
            )
        require_own_files(out)
        return out
    for number in sorted(_numbers(name), reverse=True):
        run = RUNS / f"{name}-{number}"
        if (run / "config.toml").is_file():
            require_own_files(run)
            return run
    raise ConfigError(
        f"there is no run {RUNS / name}-<n> to resume", hint="give its directory with --out, or train first"
    )


def _numbers(name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    return [int(m[1]) for run in RUNS.glob(f"{name}-*") if (m := pattern.fullmatch(run.name))]


def _figures_of(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None if it is none.

    >>> _figures_of(b'{"step": 1, "loss": 0.5}'), _figures_of(b'{"step": 1, "loss": "0.5"}'), _figures_of(b"")
    ({'step': 1, 'loss': 0.5}, None, None)
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    losses = [found.get(key, 0.0) for key in ("loss", "validation_loss")]
    return found if all(type(loss) in (int, float) for loss in losses) else None


class Metrics:
    """metrics.jsonl: one JSON object per step, on disk as soon as the step is over.

        {"step": 12, "loss": 2.9, "learning_rate": 0.0012, "step_s": 0.31, "rows_per_s": 103.2,
         "tokens_per_s": 13213.0, "bubble": 0.11, "peak_bytes": [41943040, 40265318], "grad_norm": 1.7,
         "validation_loss": 2.8}

    `validation_loss` stands only on steps after which validation ran, and on a line for step 0, which has
    nothing else: the untrained model's. `learning_rate` and `grad_norm` stand only where they are known.
    `rehearsed_step_s`, on steps before which the run rehearsed, is what the step was predicted to take.

    Appends to the file; made anew for a resumed run, it first drops the steps that will be run again, and
    lines that a power cut or an editor has damaged, of which it warns.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        kept = [line for line in self.read(warn=True) if line["step"] <= after_step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        with writing(path):
            self._file = path.open("a")

    def write(self, values: Mapping[str, Any]) -> None:
        """One step's figures; those that are None are left out. Raises: ConfigError if the disk refuses."""
        with writing(self.path):
            self._file.write(json.dumps({k: v for k, v in values.items() if v is not None}) + "\n")
            self._file.flush()

    def read(self, *, warn: bool = False) -> list[dict[str, Any]]:
        """The steps' figures. Raises: ConfigError if the file cannot be read."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}", hint="check its rights") from None
        lines = content.split(b"\n")[:-1]  # whole ones only: a crash may have cut the last one
        figures = [_figures_of(line) for line in lines]
        damaged = [number for number, found in enumerate(figures, 1) if found is None]
        if damaged and warn:
            warnings.warn(
                f"{self.path}: {len(damaged)} damaged lines are dropped, the first of them line {damaged[0]}",
                stacklevel=2,
            )
        return [found for found in figures if found is not None]

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self.path):  # a line that the disk refused is tried once more here
            self._file.close()

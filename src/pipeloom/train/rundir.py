"""Run directories: runs/<name>-<n>, with everything that a run leaves behind.

config.toml      the resolved settings          plan.json     how the model is spread
metrics.jsonl    one line a step                checkpoint/   see runtime/checkpoint_files.py
trace.json       for Perfetto                   report.html   open it in a browser
summary.json     the figures that `--json` prints
"""

from __future__ import annotations

import re
from pathlib import Path

from ..ir.errors import ConfigError

RUNS = Path("runs")


def new_run(name: str, out: Path | None) -> Path:
    """A fresh directory: `out`, or the next free runs/<name>-<n>.

    Raises: ConfigError if `out` holds a run already, or the disk refuses.
    """
    try:
        if out is not None:
            if (out / "config.toml").exists():
                raise ConfigError(
                    f"{out} holds a run already", hint="add --resume to go on with it, or give another --out"
                )
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


def find_run(name: str, out: Path | None) -> Path:
    """The run to resume: `out`, or the newest of that name.

    Raises: ConfigError if there is none.
    """
    if out is not None:
        if not (out / "config.toml").is_file():
            raise ConfigError(
                f"{out} holds no run", hint="give the directory of a run, or leave out --resume"
            )
        return out
    for number in sorted(_numbers(name), reverse=True):
        run = RUNS / f"{name}-{number}"
        if (run / "config.toml").is_file():
            return run
    raise ConfigError(
        f"there is no run {RUNS / name}-<n> to resume", hint="give its directory with --out, or train first"
    )


def _numbers(name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    return [int(m[1]) for run in RUNS.glob(f"{name}-*") if (m := pattern.fullmatch(run.name))]

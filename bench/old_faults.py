"""Faults that pipeloom once had, brought back one at a time: the tests that guard each must fail.

    python bench/old_faults.py [--only 3 10]

`bench/old_faults.toml` names, for each fault, its tests and the smallest edits of the source that bring it
back. They are made in a copy of the repository in a temporary directory, so nothing here changes. All tests
pass there first; then, fault by fault, the edits are made, the tests of this fault run, and the edits are
undone. A test counts as failing if it fails itself, not if it cannot be collected, imported or set up, or
does not end within 120 s. Prints a table and writes bench/results/old_faults.json, unless `--only` chooses
some numbers. The status is 1 if any test passes with its fault, or if an edit no longer fits the source. 9
minutes of one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machine import describe_machine

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
RESULT = Path(__file__).parent / "results" / "old_faults.json"
LIMIT_S = 120.0
"""How long the tests of one fault may take."""

LEFT_OUT = (".*", "__pycache__", "build", "dist", "runs", "results", "*.egg-info")
MISTAKES = re.compile(r"\b(Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error: ")
"""What a wrong edit gives, and no fault."""

FAILS, PASSES, MISTAKEN = "fails without the fix", "PASSES without the fix", "MISTAKE in the table"
HANGS = "NO END without the fix"
"""It may be the fault, or a machine that has much else to do: no row may need it."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """file: below src/pipeloom.  fixed: text as it stands, once.  faulty: what brings the fault back."""

    file: str
    fixed: str
    faulty: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """numbers: under which faults that were found together go; several where one of them is behind them all.
    tests: ids of pytest."""

    numbers: tuple[int, ...]
    what: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def label(self) -> str:
        return ", ".join(map(str, self.numbers))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """verdict: what becomes of the tests.  says: how the first of them fails, or what the mistake is."""

    verdict: str
    says: str
    took_s: float = 0.0


def read_table(only: Sequence[int]) -> list[Fault]:
    rows = tomllib.loads(TABLE.read_text())["fault"]
    faults = [
        Fault(
            numbers=tuple(row["numbers"]),
            what=row["what"],
            tests=tuple(row["tests"]),
            edits=tuple(Edit(**edit) for edit in row["edit"]),
        )
        for row in rows
    ]
    if unknown := set(only) - {number for fault in faults for number in fault.numbers}:
        raise SystemExit(f"{TABLE.name} has no fault of number {min(unknown)}")
    return [fault for fault in faults if not only or set(only) & set(fault.numbers)]


@contextmanager
def copied_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="old-faults-") as folder:
        copy = Path(folder) / "pipeloom"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        require_import_from(copy)
        yield copy


def require_import_from(copy: Path) -> None:
    """Raises: SystemExit if Python would take pipeloom from elsewhere, as from an editable install."""
    command = [sys.executable, "-c", "import pipeloom; print(pipeloom.__file__)"]
    found = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_relative_to(copy):
        raise SystemExit(f"pipeloom is imported from {found.stdout.strip()}, not from {copy}{found.stderr}")


def environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def edited(copy: Path, edits: Sequence[Edit]) -> Iterator[None]:
    """In the block the copy's source has the edits.

    Raises: ValueError if a text does not stand there exactly once.
    """
    files = {edit.file: copy / "src" / "pipeloom" / edit.file for edit in edits}
    before = {name: path.read_text() for name, path in files.items()}
    texts = dict(before)
    for edit in edits:
        if (count := texts[edit.file].count(edit.fixed)) != 1:
            raise ValueError(f"{edit.file} has this text {count} times: {edit.fixed.strip().splitlines()[0]}")
        texts[edit.file] = texts[edit.file].replace(edit.fixed, edit.faulty)
    try:
        write_all(files, texts)
        yield
    finally:
        write_all(files, before)


def write_all(files: dict[str, Path], texts: dict[str, str]) -> None:
    for name, path in files.items():
        path.write_text(texts[name])
        # Bytecode is told apart by seconds and sizes, which an edit may leave as they were.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """pytest's status, None if it did not end in time, and the last line that it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick"]
    command += ["--junitxml", str(copy / "report.xml"), *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, f"no end within {limit_s:g} s"
    finally:  # also after Ctrl-C, of which a process of another session is not told
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, next((line for line in reversed(said.splitlines()) if line), "")


def bring_back(copy: Path, fault: Fault) -> Outcome:
    """Run a fault's tests with the fault."""
    start = time.monotonic()
    try:
        with edited(copy, fault.edits):
            status, last = run_tests(copy, fault.tests, LIMIT_S)
    except (ValueError, OSError) as error:
        return Outcome(verdict=MISTAKEN, says=str(error))
    verdict, says = (HANGS, last) if status is None else judge(copy / "report.xml", status, last)
    return Outcome(verdict=verdict, says=says, took_s=round(time.monotonic() - start, 1))


def judge(report: Path, status: int, last: str) -> tuple[str, str]:
    """A verdict on tests that ended, and the first words of what they said."""
    if status == 0:
        return PASSES, last
    if status < 0:
        return FAILS, f"a fault ended Python with signal {-status}"
    cases = list(ElementTree.parse(report).iter("testcase")) if status == 1 else []
    found = [failure for case in cases if (failure := case.find("failure")) is not None]
    failures = [failure.get("message", "").replace(tempfile.gettempdir(), "...") for failure in found]
    if not failures or any(case.find("error") is not None for case in cases):
        return MISTAKEN, last
    first = failures[0].strip().splitlines()[0]
    if any(MISTAKES.search(message) for message in failures):
        return MISTAKEN, first
    if len(failures) < len(cases):
        return PASSES, f"only {len(failures)} of {len(cases)} cases fail: {first}"
    return FAILS, first


def require_passing(copy: Path, faults: Sequence[Fault]) -> None:
    """Raises: SystemExit if a test fails without any fault."""
    tests = sorted({test for fault in faults for test in fault.tests})
    status, last = run_tests(copy, tests, LIMIT_S * len(faults))
    if status != 0:
        raise SystemExit(f"without a fault, tests fail or are not found (status {status}): {last}")
    print(f"without a fault: {last.strip('= ')}", flush=True)


def print_row(fault: Fault, outcome: Outcome) -> None:
    print(f"{fault.label:<11} {outcome.verdict:<22} {outcome.took_s:5.1f} s  {fault.what}")
    for test in fault.tests:
        print(f"{'':<11} {test}")
    print(f"{'':<11} {outcome.says[:150]}", flush=True)


def as_row(fault: Fault, outcome: Outcome) -> dict[str, object]:
    return {
        "numbers": fault.numbers,
        "fault": fault.what,
        "tests": fault.tests,
        "verdict": outcome.verdict,
        "says": outcome.says[:300],
        "took_s": outcome.took_s,
    }


def main(only: Sequence[int]) -> int:
    machine = describe_machine()
    faults = read_table(only)
    found: list[tuple[Fault, Outcome]] = []
    with copied_repository() as copy:
        require_passing(copy, faults)
        for fault in faults:
            found.append((fault, bring_back(copy, fault)))
            print_row(*found[-1])
    wrong = [fault.label for fault, outcome in found if outcome.verdict != FAILS]
    numbers = {number for fault in faults for number in fault.numbers}
    print(f"{len(found) - len(wrong)} of {len(found)} rows, for {len(numbers)} numbers: {FAILS}")
    if not only:
        rows = [as_row(*pair) for pair in found]
        RESULT.write_text(json.dumps({"machine": machine, "faults": rows}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", type=int, default=[], metavar="NUMBER", help="numbers of faults")
    sys.exit(main(parser.parse_args().only))

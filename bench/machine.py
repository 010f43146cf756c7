"""What bench scripts share: the stamp of a measurement, tables, parts of a script, processes, plans.

Importing it puts `tests/support` on the path.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom import Plan
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.graph import OpGraph
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.planners import make_plan
from pipeloom.planning import estimate
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.launch import launch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "support"))

# --- what is printed ------------------------------------------------------------------------------


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions, date and commit, to stand beside every figure."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit that is measured, with "-dirty" if tracked files differ; "unknown" outside of a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=FOLDER, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def print_stamp() -> None:
    """One line, as docs/results.md wants it beside figures."""
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Rows as columns of text, as docs/results.md has them, one column per key; a table within a row becomes
    columns "outer inner"."""
    if not rows:
        print(f"{title or 'table'}: no rows", flush=True)
        return
    flat = [dict(_cells(row)) for row in rows]
    columns = {
        name: max(len(name), *(len(row.get(name, "-")) for row in flat)) for row in flat for name in row
    }
    lines = [columns, *([row.get(name, "-") for name in columns] for row in flat)]
    print(f"\n{title}")
    for line in lines:
        texts = zip(line, columns.values(), strict=True)
        print("  ".join(text.ljust(width) for text, width in texts).rstrip())
    print(flush=True)


def _cells(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("\n", " ")


# --- the parts of a script ------------------------------------------------------------------------


def parser_of(doc: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A script's options. With parts, its positional arguments choose among them; by default all run."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts := [*parts]:
        parser.add_argument("parts", nargs="*", metavar="part", choices=[*parts, parts, []], default=parts)
    return parser


def run_parts(names: Iterable[str], parts: Mapping[str, Callable[[], Any]]) -> int:
    """Run parts, each with its table and the seconds that it took. A part returns the rows of a table, or
    False if it did not find what it should. Returns: an exit status."""
    print_stamp()
    passed = True
    for name in names:
        begin = time.perf_counter()
        result = parts[name]()
        if isinstance(result, list):
            print_table(result, name)
        passed = passed and result is not False
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return 0 if passed else 1


# --- processes ------------------------------------------------------------------------------------


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What function(*args) returns on each of so many ranks of one thread; it must be JSON."""
    with tempfile.TemporaryDirectory() as folder:
        if launch(_Kept(function, Path(folder)), ranks, args=args) != 0:
            raise SystemExit(f"ranks of {function.__name__} failed")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


class _Kept:
    """A function whose result each rank writes to a file. It names the function's module as its own: if that
    is the running script, `launch` loads it in the ranks."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self.function, self.folder, self.__module__ = function, folder, function.__module__

    def __call__(self, *args: Any) -> None:
        torch.set_num_threads(1)
        result = self.function(*args)
        (self.folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def run_python(
    *words: object, cwd: Path = FOLDER, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process of its own. Raises: SystemExit with all that it printed,
    if it fails."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


# --- jobs, devices and plans ----------------------------------------------------------------------


def tokens(vocabulary: int, length: int) -> Callable[[int, int], dict[str, Tensor]]:
    """Batches of random tokens for Hugging Face's models, all of them targets."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return batch


def next_tokens(vocabulary: int, length: int) -> Callable[[int, int], dict[str, Tensor]]:
    """Batches of random tokens, and of those that follow them."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        text = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    return batch


def changed(cluster: Cluster, **fields: Any) -> Cluster:
    """The same change in all devices, such as `memory_bytes`."""
    return replace(cluster, devices=tuple(replace(device, **fields) for device in cluster.devices))


FREE = 1 << 50
"""A cap under which everything fits."""


def by_roofline(graph: OpGraph, cluster: Cluster, size: int) -> ProfiledModel:
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, cluster))


def roofline_plan(graph: OpGraph, cluster: Cluster, **changes: Any) -> Plan:
    """A plan for all devices of a cluster of one kind; changes: of `PlanOptions`, see `make_plan`."""
    profile = roofline(graph, cluster.devices[0])
    return make_plan(
        graph, profile, cluster, **{"ranks": len(cluster.devices), "planner": "exact", **changes}
    )

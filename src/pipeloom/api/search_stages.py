"""Stages to search a schedule for: from a TOML file that a user writes, or from a saved plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ..ir.errors import ConfigError
from ..ir.operation import Operation
from ..ir.plan import load_plan
from ..ir.text_files import parse_toml
from ..ir.units import parse_bytes
from ..planner.plan_table import branch_figures
from ..schedules.search.problem import SearchProblem, SearchStage
from .microbatch_times import load_work

KEYS = ("name", "F", "B", "I", "W", "bytes", "after", "ranks")

FINE = 1 << 20
"""Bytes that a unit of memory stands for where sizes are small numbers: residuals are counted in whole
bytes."""


@dataclass(frozen=True, kw_only=True)
class StagesToSchedule:
    """stages: those without ranks get some from the search.  ranks: how many there are.  unit: bytes that the
    number 1 stands for, in sizes and limits.  memory: the file's own limit, or none."""

    stages: tuple[SearchStage, ...]
    ranks: int
    transfer_s: float = 0.0
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    unit: int = 1
    memory: str = ""

    def caps(self, memory: str) -> tuple[float, ...]:
        """Bytes per rank: of one limit for all ranks, or of several with commas; none without a limit.

        Raises: ConfigError if it cannot be read.
        """
        parts = [part.strip() for part in (memory or self.memory).split(",") if part.strip()]
        if not parts:
            return ()
        if len(parts) not in (1, self.ranks):
            raise ConfigError(
                f"--memory has {len(parts)} limits for {self.ranks} ranks",
                hint="give one for all ranks, or one per rank with commas",
            )
        return tuple(_size(part, self.unit, "--memory") for part in parts * (self.ranks // len(parts)))

    def problem(
        self,
        stages: tuple[SearchStage, ...],
        microbatches: int,
        caps: tuple[float, ...],
        operations: tuple[Operation, ...] = (),
    ) -> SearchProblem:
        """What the search is asked, for stages with ranks."""
        return SearchProblem(
            stages=stages,
            microbatches=microbatches,
            transfer_s=self.transfer_s,
            edge_s=self.edge_s,
            caps=caps,
            operations=operations,
            unit=self.unit,
        )


def read_stages(path: Path, ranks: int = 0) -> StagesToSchedule:
    """Stages of a TOML file, see docs/schedule-search.md.

    ranks: how many there are, where stages leave theirs out and the file does not say.
    Raises: ConfigError that names the stage and the key that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="name a TOML file of stages") from None
    return stages_of(parse_toml(text, str(path)), str(path), ranks)


def stages_of(document: Mapping[str, Any], what: str, ranks: int = 0) -> StagesToSchedule:
    """The same from plain values.

    >>> both = [{"F": 1, "B": 2, "bytes": 1, "ranks": 0}, {"F": 1, "I": 1, "W": 1, "ranks": [0, 1]}]
    >>> made = stages_of({"stage": both, "transfer": 0.5}, "an example")
    >>> made.stages[1].after, made.stages[1].ranks, made.caps("4")
    ((0,), (0, 1), (4194304.0, 4194304.0))
    """
    known = ("stage", "edge", "transfer", "ranks", "memory")
    _refuse_unknown(document, known, what)
    tables = document.get("stage")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"{what} has no stages", hint="write a [[stage]] with F and B for each")
    names = {str(table.get("name", s)): s for s, table in enumerate(tables)}
    if len(names) < len(tables):
        raise ConfigError(f"{what}: two stages have the same name", hint="name each stage once")
    sizes = [table.get("bytes", 0) for table in tables]
    small = all(isinstance(size, int | float) and size < FINE for size in sizes)
    unit = FINE if small else 1
    stages = tuple(_stage(table, s, names, unit) for s, table in enumerate(tables))
    most = max((rank for stage in stages for rank in stage.ranks), default=-1) + 1
    count = int(ranks or document.get("ranks", 0) or most)
    if count < 1:
        raise ConfigError(
            f"{what} does not say how many ranks there are", hint="give stages ranks, or say -p 4"
        )
    if count < most:
        raise ConfigError(f"{what} uses rank {most - 1} of {count} ranks", hint=f"use -p {most}")
    return StagesToSchedule(
        stages=stages,
        ranks=count,
        transfer_s=_seconds(document.get("transfer", 0.0), f"{what}: transfer"),
        edge_s=_edges(document.get("edge", []), names, stages),
        unit=unit,
        memory=str(document.get("memory", "")),
    )


def stages_of_plan(path: Path) -> StagesToSchedule:
    """The stages of a saved plan as a chain, each on its rank, with their times and residuals; of one of its
    pipelines, where it has several.

    Raises: ConfigError if the file is none, or if its stages run side by side: what they read is not in it.
    """
    plan = load_plan(path)
    if branch_figures(plan):
        raise ConfigError(
            f"the stages of {path} are no chain, and a plan does not say which reads which",
            hint="write a TOML file with a [[stage]] for each and what it runs `after`",
        )
    times = load_work(path, plan.as_schedule.ranks)
    assert isinstance(times.forward_s, tuple) and isinstance(times.input_grad_s, tuple)
    assert isinstance(times.weight_grad_s, tuple)
    count = len(times.forward_s)
    placement = plan.placement[:count]  # of the first replica
    ranks = sorted(set(placement))
    sizes = times.residual_bytes or (1.0,) * count
    stages = tuple(
        SearchStage(
            name=str(s),
            forward_s=times.forward_s[s],
            input_grad_s=times.input_grad_s[s],
            weight_grad_s=times.weight_grad_s[s],
            split=True,
            residual_bytes=sizes[s],
            after=(s - 1,) if s else (),
            ranks=(ranks.index(placement[s]),),
        )
        for s in range(count)
    )
    return StagesToSchedule(stages=stages, ranks=len(ranks))


def _stage(table: Mapping[str, Any], s: int, names: Mapping[str, int], unit: int) -> SearchStage:
    what = f"stage {table.get('name', s)}"
    _refuse_unknown(table, KEYS, what)
    split = "I" in table or "W" in table
    if "F" not in table or ("B" in table) == split or (split and not {"I", "W"} <= set(table)):
        raise ConfigError(f"{what} has the times {_given(table)}", hint="give F and B, or F, I and W")
    whole = 0.0 if split else _seconds(table["B"], f"{what}: B")
    after = table.get("after", [s - 1] if s else [])
    return SearchStage(
        name=str(table.get("name", s)),
        forward_s=_seconds(table["F"], f"{what}: F"),
        input_grad_s=_seconds(table["I"], f"{what}: I") if split else whole / 2,
        weight_grad_s=_seconds(table["W"], f"{what}: W") if split else whole / 2,
        split=split,
        residual_bytes=_size(str(table["bytes"]), unit, f"{what}: bytes") if table.get("bytes") else 0.0,
        after=tuple(_stage_named(one, names, what) for one in _listed(after)),
        ranks=tuple(_rank(one, what) for one in _listed(table.get("ranks", []))),
    )


def _given(table: Mapping[str, Any]) -> str:
    return ", ".join(key for key in ("F", "B", "I", "W") if key in table) or "none"


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _rank(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 4096:
        raise ConfigError(f"{what} is on rank {value!r}", hint="ranks are numbered from 0")
    return value


def _stage_named(value: Any, names: Mapping[str, int], what: str) -> int:
    if str(value) in names and not isinstance(value, bool):
        return names[str(value)]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    raise ConfigError(
        f"{what} comes after {value!r}, which is no stage", hint=f"the stages are {', '.join(names)}"
    )


def _edges(
    tables: Any, names: Mapping[str, int], stages: Sequence[SearchStage]
) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict) or set(table) != {"from", "to", "transfer"}:
            raise ConfigError(f"an [[edge]] has {table!r}", hint='write from = "a", to = "b", transfer = 0.5')
        source, target = (_stage_named(table[key], names, "an edge") for key in ("from", "to"))
        if source not in stages[target].after:
            raise ConfigError(
                f"stage {table['to']} does not come after {table['from']}", hint="add it to after="
            )
        found[source, target] = _seconds(table["transfer"], "an edge's transfer")
    return found


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ConfigError(f"{what} is {value!r}", hint="times are finite numbers, at least 0")
    return float(value)


def _size(text: str, unit: int, what: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        return float(parse_bytes(text))
    if not 0 <= amount < inf:
        raise ConfigError(f"{what} is {text}", hint="sizes are finite numbers, at least 0")
    return amount * unit


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(f"{what} has the unknown key {unknown[0]!r}", hint=f"use {', '.join(known)}")

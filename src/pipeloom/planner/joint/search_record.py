"""What a search tried, what each axis gained, what was refused and why: told as notes of its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ...ir.errors import PipeloomError
from ...ir.plan import Plan
from ...ir.text import show_time

PREFIX = "search."

KINDS = "planners", "schedules", "gained", "tried", "died", "passed_over", "widths"
"""The tables of a record."""

SPENT, INTERRUPTED, TIME_LIMIT = "budget spent", "interrupted", "time limit"

ENDED = f"{PREFIX}ended"
"""Note of how a search ended."""


@dataclass
class SearchRecord:
    """planners: seconds of the best step of what each found, or why it has nothing.  schedules: seconds of
    the best step in each, or why there is none.  tried: candidates of each axis.  gained: seconds by which
    each shortened the best step.  died: candidates that were not simulated, by the tier that judged them.
    passed_over: seconds of the best step in schedules for which a simpler plan was taken, see
    `PlanOptions.simpler_within`.  widths: seconds of the best step of each number of pipelines side by side,
    or why there is none; empty where it was given.  bound_s: no step is shorter.  ended: converged, `SPENT`
    on other candidates, time limit, or `INTERRUPTED` by Ctrl-C.
    """

    planners: dict[str, float | str] = field(default_factory=dict)
    schedules: dict[str, float | str] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    gained: dict[str, float] = field(default_factory=dict)
    died: Counter[str] = field(default_factory=Counter)
    passed_over: dict[str, float | str] = field(default_factory=dict)
    widths: dict[str, float | str] = field(default_factory=dict)
    bound_s: float = 0.0
    ended: str = "converged"

    def note(self, table: dict[str, float | str], name: str, found: float | str) -> None:
        """Keep the shortest step, or the first refusal if there is none."""
        known = table.get(name)
        if isinstance(found, str):
            table.setdefault(name, found)
        elif not isinstance(known, float) or found < known:
            table[name] = found

    def notes(self) -> dict[str, str]:
        told = {"bound_s": repr(self.bound_s), "ended": self.ended}
        for kind in KINDS:
            told |= {f"{kind}.{name}": _text(value) for name, value in getattr(self, kind).items()}
        return {f"{PREFIX}{key}": text for key, text in told.items()}


def notes_of_widths(
    found: Mapping[int, Plan], refused: Mapping[int, PipeloomError], ended: Sequence[str], taken: Plan
) -> dict[str, str]:
    """For the one taken of some plans, by how many pipelines they have side by side. ended: each search."""
    tried = {width: repr(plan.predicted_step_s) for width, plan in found.items()}
    tried |= {width: error.message for width, error in refused.items()}
    bound = f"{PREFIX}bound_s"
    least = min((plan.notes[bound] for plan in found.values()), key=float)
    worst = next((end for end in (INTERRUPTED, TIME_LIMIT, SPENT) if end in ended), "converged")
    widths = {f"{PREFIX}widths.{width}": tried[width] for width in sorted(tried)}
    passed_over = {
        f"{PREFIX}passed_over.{_pipelines(width)}": repr(plan.predicted_step_s)
        for width, plan in found.items()
        if plan.predicted_step_s < taken.predicted_step_s * (1 - SAME)
    }
    return widths | passed_over | {bound: least, ENDED: worst}


def least_known_s(plan: Plan) -> float:
    """Seconds of the fastest step that its search knows, also of a plan that it passed over; of those of
    several pipelines it does not know the sums."""
    known = [plan.predicted_step_s]
    if plan.width == 1 and (told := searched_for(plan)) is not None:
        known += [found for found in told["passed_over"].values() if not isinstance(found, str)]
    return min(known)


def _pipelines(width: int) -> str:
    return "one pipeline" if width == 1 else f"{width} side by side"


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else repr(value)


def searched_for(plan: Plan) -> dict[str, Any] | None:
    """The record that a plan's notes tell, with the gap to the bound; None if no search made the plan."""
    told = {k.removeprefix(PREFIX): text for k, text in plan.notes.items() if k.startswith(PREFIX)}
    if "bound_s" not in told:
        return None
    bound_s = float(told["bound_s"])
    found: dict[str, Any] = {"bound_s": bound_s, "ended": told["ended"], "width": plan.width}
    found["gap"] = plan.predicted_step_s / bound_s - 1 if bound_s else None
    for kind in KINDS:
        own = {k.removeprefix(f"{kind}."): t for k, t in told.items() if k.startswith(f"{kind}.")}
        found[kind] = {name: _value(text) for name, text in own.items()}
    return found


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


SAME = 1e-9
"""Share of a step by which it may differ by rounding."""

NOT_ASKED = "not asked"
"""How it begins why a planner has nothing that was passed over, as its search takes long."""

SHOWN = 6
"""Steps and refusals that are printed; all are in --json."""


def sentences(told: Mapping[str, Any]) -> list[str]:
    """A record for a screen."""
    widths = {_pipelines(int(width)): found for width, found in told["widths"].items()}
    alone = ", before sums over replicas" if told["width"] > 1 else ""
    said = [f"pipelines: {_steps(widths)}"] if widths else []
    if told["planners"]:
        said.append(f"planners{alone}: {_steps(told['planners'])}")
    if told["schedules"]:
        said.append(f"schedules{alone}: {_steps(told['schedules'])}")
    if told["passed_over"]:
        said.append(
            f"not taken{alone}: {_steps(told['passed_over'])}: too little faster for more stages, as "
            "predictions for ranks on a machine's own cores are off by as much"
        )
    gained = {name: s for name, s in told["gained"].items() if s > 0}
    if gained:
        each = ", ".join(f"{name} {show_time(s)}" for name, s in gained.items())
        said.append(f"gained by axis: {each}")
    tried, died = sum(told["tried"].values()), sum(told["died"].values())
    gap = "" if told["gap"] is None else f"; no step is shorter than {show_time(told['bound_s'])}, "
    gap += "" if told["gap"] is None else f"the gap is {max(0.0, told['gap']):.1%}"
    said.append(f"search: {tried:.0f} simulated, {died:.0f} not worth it, {told['ended']}{gap}")
    tables = widths, told["planners"], told["schedules"]
    refused = {name: why for table in tables for name, why in table.items() if _no(why)}
    listed = [(name, why) for name, why in refused.items() if not why.startswith(NOT_ASKED)][:SHOWN]
    said += [f"refused: {name}: {why}" for name, why in listed]
    if len(refused) > len(listed):
        said.append(f"refused: {len(refused) - len(listed)} more, see --json")
    return said


def _no(value: float | str) -> bool:
    return isinstance(value, str)


def _steps(table: Mapping[str, float | str]) -> str:
    """The fastest, those that are equally fast together.

    >>> _steps({"1f1b": 0.4, "zb_v": 0.2, "gis": 0.4, "gpipe": "no cut fits"})
    'zb_v 200.0 ms; 1f1b, gis 400.0 ms'
    """
    named: dict[str, list[str]] = {}
    for seconds, name in sorted((s, n) for n, s in table.items() if not isinstance(s, str) and s < inf):
        named.setdefault(show_time(seconds), []).append(name)
    shown = [f"{', '.join(names)} {took}" for took, names in named.items()]
    left = sum(map(len, [*named.values()][SHOWN:]))
    more = [f"{left} more, see --json"] if left else []
    return "; ".join(shown[:SHOWN] + more) or "none fits"

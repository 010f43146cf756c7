"""What the page asks of schedules: to draw them, why things are as they are, if an edit can run, and files.

A request names the setting by the words of the command line (`-p 4 -m 8 -F 1,2`), which the command itself
reads: so figures here and there are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from ..ir.errors import ConfigError, DeadlockError, PipeloomError, PlanError, ScheduleError
from ..ir.explanation import Explanation
from ..ir.text import show_share
from ..reports import MICROBATCHES, rank_columns, schedule_page
from ..schedules.formats import parse_text
from ..schedules.language.names import parse_name
from ..schedules.recipe_text import repeating_recipe
from ..schedules.scenario import (
    Scenario,
    SimulatedSchedule,
    build_schedule,
    causes_of,
    csv_text,
    explain,
    library,
    simulate_rows,
    simulate_schedule,
)
from ..simulator.idle_time.wait_causes import Causes, TimedSpan
from ..viewer.chrome import chrome_trace
from ..viewer.labels import chunks
from ..viewer.picture import MANY, memory_panels, picture, reasons
from ..viewer.reasons import path_lines, sentence

Json: TypeAlias = dict[str, Any]
Reader: TypeAlias = Callable[[Sequence[str]], Scenario]
"""Reads the words of a command line."""

DRAWN_RANKS = 16
"""Of pipelines with more ranks, memory is drawn for the first, the last, and the one that holds most."""


class Studied:
    """A simulated schedule, and what is found out about it when somebody asks."""

    def __init__(self, simulated: SimulatedSchedule) -> None:
        self.simulated = simulated

    @cached_property
    def explanation(self) -> Explanation:
        return explain(self.simulated)

    @cached_property
    def causes(self) -> Causes:
        return causes_of(self.simulated)


@lru_cache(maxsize=48)
def studied(name: str, rows: str, scenario: Scenario) -> Studied:
    """rows: those of an edited schedule; empty for one that the library or a file has by its name."""
    if rows:
        return Studied(simulate_rows(parse_text(rows, name=name), scenario))
    return Studied(simulate_schedule(name, scenario))


class ScheduleDesk:
    """Answers for one studio. files: schedules that its command line named; no other file is opened."""

    def __init__(self, read: Reader, files: Sequence[str] = (), times: Path | None = None) -> None:
        self._read, self.files, self._times = read, tuple(files), times

    def draw(self, asked: Json) -> Json:
        """Pictures and figures of `asked["entries"]`, each with a name, and rows if these were edited."""
        drawn: list[Json] = []
        timelines, names = [], []
        scenario = self._scenario(asked)
        for entry in asked["entries"]:
            try:
                one = self._studied(entry, scenario)
            except (ScheduleError, PlanError, ConfigError) as error:  # another entry may be built so
                drawn.append({"name": entry["name"], "error": broken_rule(error)})
                continue
            drawn.append(_described(entry["name"], one))
            timelines.append(one.simulated)
            names.append(entry["name"])
        return {"drawn": drawn, "memory": _memory(timelines, names)}

    def figures(self, asked: Json) -> Json:
        """Of one schedule: a point of the chart of memory against the step."""
        scenario = self._scenario(asked)
        try:
            return self._studied(asked, scenario).simulated.figures()
        except (ScheduleError, PlanError, ConfigError) as error:
            return {"error": broken_rule(error)}

    def ask(self, asked: Json) -> Json:
        """Of an action: what it waited for, the chain of causes, and what it holds. Of a moment in which a
        rank is idle: the reason, and the action that ends it."""
        one = self._studied(asked, self._scenario(asked))
        simulated, causes = one.simulated, one.causes
        if "action" not in asked:
            return _gap(one, int(asked["rank"]), float(asked["time"]))
        item = causes.find(str(asked["action"]))
        action = item.action
        events = {e.action: e for e in simulated.timeline.events}
        letters = re.fullmatch(r"(\d+)F(\d+)", action)
        freed = [f"{letters[1]}{kind}{letters[2]}" for kind in ("B", "W")] if letters else []
        until = next((events[name] for name in freed if name in events), None)
        schedule, costs = simulated.schedule, simulated.costs
        own = [costs[s].residual_bytes for s, r in enumerate(schedule.placement) if r == events[action].rank]
        whole = sum(own) * schedule.slices / simulated.stages.replicas
        return {
            "waits": [_waited_for(causes, item, wait) for wait in causes.waits(item)],
            "chain": list(causes.path(item, item.end_s)),
            "holds": None
            if letters is None or until is None
            else {
                "share": costs[int(letters[1])].residual_bytes / whole if whole else 0.0,
                "until": until.action,
                "from": events[action].start_s,
                "to": until.end_s,
            },
        }

    def path(self, asked: Json) -> Json:
        """Why ranks are idle: the critical path, idle time by reason, and both for the picture."""
        one = self._studied(asked, self._scenario(asked))
        explanation, timeline = one.explanation, one.simulated.timeline
        few = len(timeline.events) <= MANY
        return {
            "path": path_lines(explanation.path),
            "reasons": explanation.by_reason,
            "idle_s": explanation.idle_s,
            "picture": reasons(explanation, timeline.end_s) if few or asked.get("path") else {},
        }

    def recognise(self, asked: Json) -> Json:
        """The library's names of an order, for the same ranks, micro-batches and stages per rank."""
        scenario = self._scenario(asked)
        own = self._studied(asked, scenario).simulated.schedule
        each = replace(scenario, ranks=own.ranks, microbatches=own.microbatches, memory="")
        per_rank, found = own.stages // own.ranks, []
        for name, entry in library().items():
            several = entry["place"] in ("loop", "wave")
            if name == asked["name"] or several != (per_rank > 1):
                continue
            try:
                built, _, _ = build_schedule(name, replace(each, chunks=per_rank if several else 0))
            except (ScheduleError, ConfigError):
                continue
            if built.placement == own.placement and str(built) == str(own):
                found.append({"name": name, "about": entry["about"], "aliases": entry["aliases"]})
        return {"names": found}

    def save(self, asked: Json) -> Json:
        """A file's text: rows, torch's CSV, a recipe, a trace for Perfetto, or a page."""
        simulated = self._studied(asked, self._scenario(asked)).simulated
        form, name = asked["form"], re.sub(r"\W+", "_", str(asked["name"])).strip("_") or "mine"
        if form == "rows":
            return {"file": f"{name}.txt", "text": f"{simulated.schedule}\n"}
        if form == "csv":
            return {"file": f"{name}.csv", "text": csv_text(simulated)}
        if form == "trace":
            return {"file": f"{name}.json", "json": chrome_trace([simulated.timeline])}
        if form == "page":
            return {"file": f"{name}.html", "text": schedule_page(simulated)}
        if not name.isidentifier():
            name = "mine"
        text = repeating_recipe(simulated.schedule, simulated.stages, name=name)
        if text is None:
            raise ScheduleError(
                f"{asked['name']} does not repeat, or has pairs or copies: no line per rank gives these "
                "rows, again and again",
                hint="save the rows; or let each turn in the middle be like the one before",
            )
        return {"file": f"{name}.py", "text": text}

    def _scenario(self, asked: Json) -> Scenario:
        words = [str(word) for word in asked["words"]]
        naming = [words[at : at + 2] for at, word in enumerate(words) if word.startswith("--times")]
        if naming and (self._times is None or naming != [["--times", str(self._times)]]):
            raise ConfigError(
                "the page may not name files", hint="start the studio with the plan: pipeloom studio PLAN"
            )
        return self._read(words)

    def _studied(self, entry: Json, scenario: Scenario) -> Studied:
        name, rows = str(entry["name"]), str(entry.get("rows") or "")
        if not rows and parse_name(name).in_file and name not in self.files:
            raise ConfigError(
                f"the page may not name files, as {name}",
                hint=f"start the studio with it: pipeloom studio {name}",
            )
        return studied(name, rows, scenario)


def broken_rule(error: PipeloomError) -> Json:
    """An error for the page: its sentence, the hint, and the rows (ranks) that it names.

    circle: of a deadlock, [rank, what it stands at, what it needs] around it.
    """
    text = error.message
    numbered = re.search(r"\brow (\d+):", text)
    ranks = [int(numbered[1]) - 1] if numbered else [int(n) for n in re.findall(r"\branks? (\d+)", text)]
    circle: list[Any] = []
    if isinstance(error, DeadlockError):
        stuck = {
            int(r): (int(r), at, needs)
            for r, at, needs in re.findall(r"rank (\d+) at (\S+) needs ([^;\s]+)", text)
        }
        loop = re.search(r"rank ([\d> -]+\d)", error.hint or "")
        order = [int(n) for n in loop[1].split(" -> ")[:-1]] if loop else []
        circle = [stuck[rank] for rank in order if rank in stuck]
    return {"message": text, "hint": error.hint, "rows": list(dict.fromkeys(ranks)), "circle": circle}


def _described(name: str, one: Studied) -> Json:
    simulated = one.simulated
    timeline, few = simulated.timeline, len(simulated.timeline.events) <= MANY
    figures, schedule = simulated.figures(), simulated.schedule
    drawn = picture(
        timeline,
        f"{name}   step {figures['step_s']:.6g}, bubble {show_share(figures['bubble'])}, "
        f"peak {figures['peak']:.4g} micro-batches",
        chunks=chunks(timeline) if schedule.stages > schedule.ranks else None,
        scale=("", 1.0),
    )
    return {
        "name": name,
        "figures": figures,
        "ranks": schedule.ranks,
        "microbatches": simulated.microbatches,
        "picture": drawn | {"columns": rank_columns(simulated)},
        # Rows alone are read as one direction of whole micro-batches.
        "rows": str(schedule) if few and schedule.slices == 1 and simulated.stages.replicas == 1 else None,
    }


def _memory(simulated: Sequence[SimulatedSchedule], names: Sequence[str]) -> Json | None:
    if not simulated:
        return None
    ranks = {0}
    for one in simulated:
        peaks = one.peaks
        ranks |= {one.schedule.ranks - 1, max(range(len(peaks)), key=lambda rank: peaks[rank])}
    most = max(one.schedule.ranks for one in simulated)
    least = min(one.schedule.ranks for one in simulated)
    shown = range(least) if most <= DRAWN_RANKS else sorted(rank for rank in ranks if rank < least)
    sized = all(one.peaks_bytes for one in simulated)
    return memory_panels(
        [one.timeline for one in simulated],
        size_unit=None if sized else MICROBATCHES,
        names=names,
        ranks=list(shown),
        per_second=1.0,
    )


def _waited_for(causes: Causes, item: TimedSpan, wait: TimedSpan) -> Json:
    made = causes.maker(wait) if wait.kind == "transfer" else wait
    return {"until": wait.end_s, "action": made.action, "ran": wait is causes.before(item)}


def _gap(one: Studied, rank: int, time: float) -> Json:
    idle = next((i for i in one.explanation.idle if i.rank == rank and i.start_s <= time < i.end_s), None)
    if idle is None:
        raise ScheduleError(f"rank {rank} is not idle at {time:g}", hint="click a gap between two blocks")
    ended = one.causes.find(idle.action) if idle.action else None
    return {
        "reason": idle.reason,
        "sentence": sentence(idle),
        "from": idle.start_s,
        "to": idle.end_s,
        "chain": list(one.causes.path(ended, ended.end_s)) if ended else [],
    }

"""How many equal pipelines work side by side where ranks and replicas are left open: one on all ranks, a
number between, or as many as there are ranks, each with the whole model.

Replicas of the whole model come first: their plan takes no time, and if it is close to the bound no other is
looked for. Of the widths between a quick planner chooses one. Of plans that are nearly as fast as the fastest
that is known that with the fewest stages is taken: `PlanOptions.simpler_within`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .ir.errors import ConfigError, PipeloomError, PlanError, ScheduleError
from .ir.plan import Plan
from .planner.joint.search import CLOSEST
from .planner.joint.search_record import (
    ENDED,
    INTERRUPTED,
    SAME,
    least_known_s,
    notes_of_widths,
    searched_for,
)
from .planner.microbatch_sizes import ProfiledModel
from .planner.shape_search import divisors

if TYPE_CHECKING:
    from .plan_request import PlanRequest


def share_of(microbatches: int, width: int) -> int:
    count, rest = divmod(microbatches, width)
    if rest or not count:
        near = max(1, round(microbatches / width)) * width
        raise ConfigError(
            f"{microbatches} micro-batches per step cannot be shared evenly by {width} replicas",
            hint=f"use a multiple of {width}, such as {near}",
        )
    return count


class WidthSearch:
    """Of one model. found, refused: by width, the number of pipelines. ended: how each search did."""

    def __init__(self, request: PlanRequest, model: ProfiledModel, *, explained: bool) -> None:
        self.request, self.model, self.explained = request, model, explained
        self.ranks, self.until = request.options.ranks, request.until
        self.found = dict[int, Plan]()
        self.refused = dict[int, PipeloomError]()
        self.ended = list[str]()

    def run(self) -> Plan:
        """Raises: what the plan of one pipeline does, if no width has a plan; ConfigError if the rows of a
        step are no multiple of those of a micro-batch."""
        count = self.request.microbatches_of(self.model.size)
        between = [width for width in divisors(self.ranks)[1:-1] if count % width == 0]
        try:
            try:
                share_of(count, self.ranks)
            except ConfigError as error:
                self.refused[self.ranks] = error
            else:
                self._search(self.ranks)
            if self._in_time() and not self._is_close(self.ranks):
                self._search(1, 1 / 2 if between else 1.0)
                width = self._guess(between)
                if width is not None and self._in_time():
                    self._search(width)
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.ended.append(INTERRUPTED)
        if not self.found:
            raise self.refused[1]
        plan = self._simplest()
        notes = notes_of_widths(self.found, self.refused, self.ended, plan)
        return replace(plan, notes={**plan.notes, **notes})

    def _of_width(self, width: int, share: float) -> PlanRequest:
        """The request for so many pipelines, in a share of the time that is left."""
        now, ranks = time.monotonic(), self.ranks // width
        limited = self.request.limited_to(now + share * (self.until - now))
        return limited.changed(ranks=ranks, replicas=width, any_width=False)

    def _search(self, width: int, share: float = 1.0) -> None:
        explained = self.explained and width == 1 and not self.found
        try:
            plan = self._of_width(width, share).plan(self.model, explained=explained)
        except (PlanError, ScheduleError) as error:
            self.refused[width] = error
            return
        self.ended.append(plan.notes.get(ENDED, ""))
        if width not in self.found or plan.predicted_step_s < self.found[width].predicted_step_s:
            self.found[width] = plan

    def _guess(self, widths: list[int]) -> int | None:
        """The fastest by a quick planner, from narrow to wide up to the first that is slower than the one
        before."""
        best: Plan | None = None
        for width in widths:
            if not self._in_time():
                break
            try:
                plan = self._of_width(width, 1 / 2).for_advice.plan(self.model, explained=False)
            except (PlanError, ScheduleError):
                continue
            self.ended.append(plan.notes.get(ENDED, ""))
            if best is not None and plan.predicted_step_s >= best.predicted_step_s:
                break
            best = replace(plan, planner=self.request.options.planner)
        if best is None:
            return None
        self.found[best.width] = best
        return best.width

    def _in_time(self) -> bool:
        return not self.found or (time.monotonic() < self.until and INTERRUPTED not in self.ended)

    def _is_close(self, width: int) -> bool:
        """Whether no plan can be faster by much."""
        told = searched_for(self.found[width]) if width in self.found else None
        return told is not None and (told["gap"] or 0.0) <= max(CLOSEST, self.request.options.simpler_within)

    def _simplest(self) -> Plan:
        """Of those that are nearly as fast as the fastest."""
        plans = self.found.values()
        limit_s = min(map(least_known_s, plans)) * (1 + max(SAME, self.request.options.simpler_within))
        near = [plan for plan in plans if plan.predicted_step_s <= limit_s]
        fastest = min(plans, key=lambda plan: plan.predicted_step_s)
        return min(near, key=lambda plan: (len(plan.placement), -plan.width), default=fastest)

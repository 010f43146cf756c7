"""The rule for weight versions: a micro-batch's forward and backward use the same one, and it is still kept.

Which version that is says the policy, see `ir.weight_policies`. Version 0 is there at the start; version t +
1 of a stage is made as soon as it has the gradients of the micro-batches t * every to (t + 1) * every - 1,
if it has made version t.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..ir.action import Action, B, F, I, W
from ..ir.columns import B_, W_
from ..ir.errors import ScheduleError
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from ..ir.weight_policies import Updates


@dataclass(frozen=True, kw_only=True)
class StageVersions:
    """What one stage does with its weights.

    used: micro-batch -> the version that its forward and backward use.  needed: most versions kept at once.
    staleness: per update t, version t + 1 is made from gradients at version t - staleness.
    """

    stage: int
    rank: int
    used: tuple[int, ...]
    needed: int
    staleness: tuple[int, ...]


def versions(schedule: Schedule, updates: Updates) -> tuple[StageVersions, ...]:
    """Follow the weights of every stage along its row; `schedule` is complete and in order (see `check`).

    Raises: ScheduleError by the rule `weight_versions`.

    >>> from pipeloom.ir.schedule import parse_rows
    >>> rows = parse_rows(("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    >>> made = Schedule(name="", microbatches=3, placement=(0, 1), rows=rows)
    >>> for stage in versions(made, Updates(policy="stash")):
    ...     print(stage.used, stage.needed, stage.staleness)
    (0, 0, 1) 2 (0, 1, 1)
    (0, 1, 2) 1 (0, 0, 0)
    """
    count = schedule.microbatches // schedule.slices
    every = count if updates.rule.flushes else updates.every
    if count % every:
        raise ScheduleError(
            f"{count} micro-batches make no whole number of updates of {every}",
            hint=f"use a multiple of {every}, or another number of micro-batches per update",
        )
    return _followed(schedule, replace(updates, every=every))


def _followed(schedule: Schedule, updates: Updates, *, trial: bool = False) -> tuple[StageVersions, ...]:
    stages: dict[int, _Weights] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage = action.stage
            if stage not in stages:
                stages[stage] = _Weights(schedule, rank, stage, updates, trial=trial)
            stages[stage].run(action)
    return tuple(stages[stage].result() for stage in sorted(stages))


def use_made_weights(schedule: Schedule, updates: Updates) -> bool:
    """Whether a forward uses weights that an update of this schedule has made: with fewer micro-batches any
    schedule keeps the rule, and it says nothing of more."""
    last = schedule.microbatches // schedule.slices - 1
    return updates.rule.version(last, updates.every, last // updates.every) > 0


def weight_versions(schedule: Schedule, stages: StageGraph, updates: Updates) -> None:
    """Forward and backward of every micro-batch find the same version, and no stage keeps too many.

    Raises: ScheduleError, also for tied parameters that their stages update at different times, and for
        stages of one rank of which one is at the next update before another is done with this one.
    """
    stages_versions = versions(schedule, updates)
    _one_update_at_a_time(schedule, updates)
    for name, readers in stages.tied.items():
        first, *others = (stages_versions[stage] for stage in readers)
        for other in others:
            for microbatch, pair in enumerate(zip(first.used, other.used, strict=True)):
                if pair[0] != pair[1]:
                    raise ScheduleError(
                        f"ranks {first.rank} and {other.rank} share {name}, but {first.stage}F{microbatch} "
                        f"uses version {pair[0]} and {other.stage}F{microbatch} version {pair[1]}",
                        hint="use policy 2bw or flush, where all stages use the same version",
                    )


def _one_update_at_a_time(schedule: Schedule, updates: Updates) -> None:
    """A rank has one optimizer for all its stages, and one set of gradients for it."""
    columns = schedule.columns
    adds = np.flatnonzero((columns.kind == B_) | (columns.kind == W_))
    if updates.rule.flushes or not len(adds):
        return
    update = columns.microbatch[adds] // (schedule.slices * updates.every)
    rank = np.searchsorted(columns.offsets, adds, side="right")
    early = np.flatnonzero((np.diff(update) < 0) & (np.diff(rank) == 0))
    if len(early):
        first, second = (columns.at(int(adds[early[0] + n])) for n in (0, 1))
        raise ScheduleError(
            f"rank {rank[early[0]] - 1} runs {first} in front of {second}, whose gradient belongs to the "
            "update before, and it updates all its stages at once",
            hint="use --weights flush, or a schedule such as 1f1b or interleaved_1f1b",
        )


@dataclass
class _Weights:
    """The versions of one stage's weights along a row. Micro-batches are whole ones, not slices."""

    schedule: Schedule
    rank: int
    stage: int
    updates: Updates
    trial: bool = False
    newest: int = 0
    needed: int = 1
    oldest: int = 0
    """The oldest version that a micro-batch in flight uses; the newest if there is none."""
    users: dict[int, int] = field(default_factory=dict)
    """Version -> micro-batches in flight that use it."""
    used: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    """Micro-batch -> slices whose gradients are not made yet."""
    group: dict[int, int] = field(default_factory=dict)
    """Update -> micro-batches of it that are done."""
    staleness: list[int] = field(default_factory=list)

    def run(self, action: Action) -> None:
        if action.kind not in (F, B, I, W):
            return
        microbatch = action.microbatch // self.schedule.slices
        if action.kind == F and microbatch not in self.used:
            version = self.used[microbatch] = self._version(action, microbatch)
            self.users[version] = self.users.get(version, 0) + 1
            self.oldest = min(self.oldest, version)
            self.left[microbatch] = self.schedule.slices
            self._count()
        self._refuse_lost(action, microbatch)
        if action.kind in (B, W):
            self.left[microbatch] -= 1
            if not self.left[microbatch]:
                del self.left[microbatch]
                self.users[self.used[microbatch]] -= 1
                self._done(microbatch)
                self._count()

    def _version(self, action: Action, microbatch: int) -> int:
        version = self.updates.rule.version(microbatch, self.updates.every, self.newest)
        if version > self.newest:
            raise ScheduleError(
                f"rank {self.rank} runs {action} with weight version {version}, but the newest there is "
                f"{self.newest}: version {version} needs {self._late(version)}, which comes later",
                hint=None if self.trial else self._larger(),
            )
        return version

    def _late(self, version: int) -> str:
        """The first backward that an unmade version lacks."""
        first = self.newest * self.updates.every
        group = range(first, version * self.updates.every)
        lacking = next(m for m in group if m in self.left or m not in self.used)
        last = lacking * self.schedule.slices
        whole = Action(self.stage, B, last)
        return str(whole if whole in self.schedule.rows[self.rank] else Action(self.stage, W, last))

    def _larger(self) -> str:
        count = self.schedule.microbatches // self.schedule.slices
        for every in range(self.updates.every + 1, count + 1):
            if count % every == 0 and self._runs_with(every):
                return f"update every {every} micro-batches, or run fewer forwards ahead on this rank"
        return f"run fewer forwards ahead of the backwards on rank {self.rank}"

    def _runs_with(self, every: int) -> bool:
        updates = replace(self.updates, every=every)
        try:
            _followed(self.schedule, updates, trial=True)
            _one_update_at_a_time(self.schedule, updates)
        except ScheduleError:
            return False
        return use_made_weights(self.schedule, updates)

    def _refuse_lost(self, action: Action, microbatch: int) -> None:
        limit, version = self.updates.limit, self.used[microbatch]
        if limit is None or version > self.newest - limit:
            return
        why = "" if action.kind == F else ", that of its forward"
        raise ScheduleError(
            f"rank {self.rank} runs {action} with weight version {version}{why}, but keeps only {limit}: the "
            f"newest is {self.newest}",
            hint=f"update less often, or run {action} earlier",
        )

    def _done(self, microbatch: int) -> None:
        update = microbatch // self.updates.every
        self.group[update] = self.group.get(update, 0) + 1
        # Updates are made in order: one whose gradients are complete early waits for those before it.
        while self.group.get(self.newest) == self.updates.every:
            del self.group[self.newest]
            first = self.newest * self.updates.every
            made = range(first, first + self.updates.every)
            self.staleness.append(self.newest - min(self.used[m] for m in made))
            self.newest += 1

    def _count(self) -> None:
        """Versions from the oldest that a micro-batch in flight uses, or a next one will, to the newest."""
        coming = self.updates.rule.version(len(self.used), self.updates.every, self.newest)
        while self.oldest < self.newest and not self.users.get(self.oldest):
            self.oldest += 1
        self.needed = max(self.needed, self.newest - min(coming, self.oldest) + 1)

    def result(self) -> StageVersions:
        used = tuple(self.used[m] for m in sorted(self.used))
        return StageVersions(
            stage=self.stage, rank=self.rank, used=used, needed=self.needed, staleness=tuple(self.staleness)
        )

"""The critical path in a few lines: a micro-batch's way through stages is one leg, and repeats are folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..ir.explanation import PathStep
from .labels import label

PERIOD = 24
"""Longest pattern, in legs, whose repetition is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Actions of one kind on one micro-batch, through neighbouring stages; or one other piece of the path.
    first, last: texts of its first and last action."""

    group: str
    microbatch: int | None
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    first: str
    last: str
    start_s: float
    end_s: float

    def __str__(self) -> str:
        if len(self.stages) < 2:
            return self.first
        where = "" if self.stages == self.ranks else f" on ranks {_turns(self.ranks)}"
        return f"{self.group}{self.microbatch} through stages {_turns(self.stages)}{where}"


def _turns(line: Sequence[int]) -> str:
    """
    >>> _turns((0, 1, 2, 3, 3, 2, 1)), _turns((4, 5))
    ('0…3…1', '4, 5')
    """
    plain = [n for i, n in enumerate(line) if i == 0 or n != line[i - 1]]
    if len(plain) < 3:
        return ", ".join(map(str, plain))
    inner = [b for a, b, c in zip(plain, plain[1:], plain[2:], strict=False) if b - a != c - b]
    return "…".join(map(str, (plain[0], *inner, plain[-1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Legs that follow each other `times` times, with other micro-batches each time."""

    legs: tuple[Leg, ...]
    times: int
    last: tuple[Leg, ...]

    @property
    def start_s(self) -> float:
        return self.legs[0].start_s

    @property
    def end_s(self) -> float:
        return self.last[-1].end_s

    @property
    def rank(self) -> int | None:
        """The rank it stays on, if it does."""
        ranks = {rank for leg in self.legs for rank in leg.ranks}
        return ranks.pop() if len(ranks) == 1 else None

    def __str__(self) -> str:
        """
        >>> step = dict(kind="compute", rank=3)
        >>> path = [PathStep(action=f"3{k}{m}", start_s=0, end_s=1, **step) for m in range(5) for k in "FB"]
        >>> print(*fold(path))
        3F0 3B0, 5 times, to 3F4 3B4
        """
        phrases = any(len(leg.stages) > 1 or leg.group == "link" for leg in self.legs)
        text = (", " if phrases else " ").join(map(str, self.legs))
        if self.times == 1:
            return text
        end = " ".join(leg.last for leg in self.last)
        return f"{text}, {self.times} times, to {end}"


def fold(path: Sequence[PathStep]) -> list[Fold]:
    legs = [part for leg in _legs(path) for part in _apart(leg)]
    shapes = [(leg.group, leg.stages, leg.ranks) for leg in legs]
    folds: list[Fold] = []
    at = 0
    while at < len(legs):
        period, times = _repeats(shapes, at)
        if times == 1 and folds and folds[-1].times == 1 and {folds[-1].rank} == set(legs[at].ranks):
            folds[-1] = Fold(legs=(*folds[-1].legs, legs[at]), times=1, last=(legs[at],))
        else:
            last = legs[at + period * (times - 1) : at + period * times]
            folds.append(Fold(legs=tuple(legs[at : at + period]), times=times, last=tuple(last)))
        at += period * times
    return folds


def _legs(path: Sequence[PathStep]) -> Iterator[Leg]:
    """Group the pieces of a path into legs. Messages belong to the leg before them."""
    now: Leg | None = None
    for step in path:
        what = label(step.action)
        if step.kind == "transfer" and now is not None and not (step.waiting or now.group == "link"):
            now = replace(now, end_s=step.end_s)
            continue
        group = "link" if step.waiting else what.group if step.kind == "compute" else step.kind
        if now is not None and step.kind == "compute" and _goes_on(now, group, what.stage, what.microbatch):
            assert what.stage is not None
            stages, ranks = (*now.stages, what.stage), (*now.ranks, step.rank)
            now = replace(now, stages=stages, ranks=ranks, last=step.action, end_s=step.end_s)
            continue
        if now is not None:
            yield now
        text = step.action if step.kind in ("compute", "transfer") else f"{step.kind} before {step.action}"
        if step.waiting:
            text = f"{step.action} on the link that {step.waiting} waits for"
        now = Leg(
            group=group,
            microbatch=what.microbatch,
            ranks=(step.rank,),
            first=text,
            last=text,
            stages=() if what.stage is None or step.kind != "compute" else (what.stage,),
            start_s=step.start_s,
            end_s=step.end_s,
        )
    if now is not None:
        yield now


def _apart(leg: Leg) -> Iterator[Leg]:
    """The actions of a leg that stays on one rank, each by itself; any other leg as it is."""
    if len(leg.stages) < 2 or len(set(leg.ranks)) > 1:
        yield leg
        return
    for i, stage in enumerate(leg.stages):
        text, start_s = f"{stage}{leg.group}{leg.microbatch}", leg.end_s if i else leg.start_s
        yield replace(leg, stages=(stage,), ranks=leg.ranks[:1], first=text, last=text, start_s=start_s)


def _goes_on(leg: Leg, group: str, stage: int | None, microbatch: int | None) -> bool:
    if not leg.stages or stage is None or (leg.group, leg.microbatch) != (group, microbatch):
        return False
    step = stage - leg.stages[-1]
    return abs(step) == 1 and (len(leg.stages) < 2 or step == leg.stages[-1] - leg.stages[-2])


def _repeats(shapes: Sequence[tuple[object, ...]], at: int) -> tuple[int, int]:
    """The pattern from `at` on that covers most by repeating: its length, and how often it stands there."""
    best = (1, 1)
    for period in range(1, min(PERIOD, (len(shapes) - at) // 2) + 1):
        pattern = shapes[at : at + period]
        times = 1
        while shapes[at + period * times : at + period * (times + 1)] == pattern:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best if best[0] * best[1] >= 4 else (1, 1)

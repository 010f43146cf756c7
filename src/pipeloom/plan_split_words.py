"""Whether a model's words are split, and in how many parts: it is planned both ways, and the faster one wins.

No stage is smaller than an op, so that a head above a rank's mean share of the work sets the pace of all. Its
parts (`tracer/split_words.py`) are ops like others, and any planner may plan with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from .ir.errors import InfeasibleError, PlanError, ScheduleError
from .ir.plan import Plan
from .ir.profile import Profile
from .plan_request import CapturedModel, PlanRequest, fastest, fitting
from .planner.planners import chooses
from .planner.refusals import refuse_nonsense

if TYPE_CHECKING:
    from .tracer.captured import Captured
    from .tracer.split_words import Head

T = TypeVar("T")

ModelOf = Callable[["Captured"], CapturedModel]
"""A captured model -> the same with its costs."""

WHOLE_STEP = "words.whole_step_s"
"""Note of a plan with split words: seconds of a step with whole ones; "none" if these have no plan."""

WAVE = "zb_v"

TIE = 0.01
"""By which plans for `WAVE` with other numbers of parts may be slower, for one of them to be planned, too."""

FEW = (2, 3, 4)
"""Numbers of parts that are tried with any number of ranks, as those of a few balance them better."""


def in_parts(captured: Captured, count: int) -> Captured:
    """A model with the words of all its heads in so many parts. Raises: PlanError if it has none to split."""
    from .tracer.split_words import heads, split_words

    if not (found := heads(captured)):
        raise PlanError(
            f"{captured.graph.name} has no head whose words can be split: a product that is only read "
            "element by element, and then by a loss over the words",
            hint="leave it whole: --split-words off",
        )
    return split_words(captured, _parts(found, count))


def best_words(
    request: PlanRequest, whole: CapturedModel, model_of: ModelOf
) -> tuple[Plan, CapturedModel] | None:
    """The fastest plan with words that are split or whole, and its model; None where no head is so large that
    splitting it could help, or nothing fits.

    Of the numbers of parts a quick planner chooses one, and the planner that was asked plans with that. Where
    schedules are tried, it is the number of the fastest plan for `WAVE`, unless it is said how many stages a
    rank has: steps of 1F1B hardly depend on it. Each of the three takes a third of a time limit.

    Raises: PlanError if there are more stages than ops of the whole model, or more ranks than devices.
    """
    options = request.options
    if options.granularity == "module" or not (large := _large_heads(request, whole)):
        return None
    if not request.chooses_width:
        refuse_nonsense(whole.graph, request.cluster, options.ranks, options.named_schedule)
    quick, limit_s = request.for_advice, options.time_limit
    if limit_s is not None:
        request = request.changed(time_limit=max(1, limit_s // 3))
    refused = InfeasibleError, ScheduleError, PlanError
    counts = [count for count in _counts(request.options.ranks) if all(head.rows >= count for head in large)]
    models = _models(whole, [_parts(large, count) for count in counts], model_of)

    def guessed(model: CapturedModel) -> Plan:
        if chooses(request.options) and request.options.chunks is None:
            with suppress(*refused):
                return replace(request, watch=None).changed(schedule=WAVE).plan(model, explained=False)
        return quick.plan(model, explained=False)

    guesses = list(_in_time(fitting(models, guessed, passed=refused), limit_s and limit_s / 3))
    guesses.sort(key=lambda guess: guess[0].predicted_step_s)
    near = [g for g in guesses if g[0].predicted_step_s <= guesses[0][0].predicted_step_s * (1 + TIE)]
    near = near[: 2 if limit_s is None else 1]
    plans = list(fitting([whole, *(model for _, model in near)], partial(request.plan, explained=False)))
    plans += [guess for guess in near if guess[0].planner == options.planner]
    if (best := fastest(plans)) is None or best[1] is whole:
        return best
    whole_s = next((repr(plan.predicted_step_s) for plan, model in plans if model is whole), "none")
    return replace(best[0], notes={**best[0].notes, WHOLE_STEP: whole_s}), best[1]


def words_sentence(plan: Plan) -> str | None:
    """In how many parts words are cut, and what that gained.

    >>> from pipeloom.ir.plan import StagePlan
    >>> whole = Plan(graph="", planner="", stages=(StagePlan(ops=("a",)),), placement=(0,), schedule="",
    ...              schedule_rows=(), microbatches=1, predicted_step_s=0.2)
    >>> words_sentence(replace(whole, split_words={"lm_head.weight": 4}, notes={WHOLE_STEP: "0.39"}))
    'words of lm_head.weight in 4 parts: 1.95 times as fast as whole, 390.0 ms'
    """
    if not plan.split_words:
        return None
    counts: dict[int, list[str]] = {}
    for name, count in plan.split_words.items():
        counts.setdefault(count, []).append(name)
    each = [f"{', '.join(names)} in {count} parts" for count, names in counts.items()]
    whole = plan.notes.get(WHOLE_STEP)
    gain = ""
    if whole == "none":
        gain = ": whole, nothing fits"
    elif whole is not None and plan.predicted_step_s:
        times = float(whole) / plan.predicted_step_s
        gain = f": {times:.2f} times as fast as whole, {1e3 * float(whole):.1f} ms"
    return f"words of {' and '.join(each)}{gain}"


def _in_time(each: Iterator[T], limit_s: float | None) -> Iterator[T]:
    """Those that are there before so many seconds are over, and the first one after.

    >>> [*_in_time(iter("abc"), None)], [*_in_time(iter("abc"), -1.0)]
    (['a', 'b', 'c'], ['a'])
    """
    begin = time.monotonic()
    for one in each:
        yield one
        if limit_s is not None and time.monotonic() > begin + limit_s:
            return


def _models(
    whole: CapturedModel, splits: Sequence[Mapping[str, int]], model_of: ModelOf
) -> Iterator[CapturedModel]:
    """The model split in each of these ways, as far as the job's optimizer can train parts."""
    from .tracer.split_words import split_words

    for split in splits:
        try:
            yield model_of(split_words(whole.captured, split))
        except PlanError:
            return  # the optimizer looks at whole matrices


def _large_heads(request: PlanRequest, model: CapturedModel) -> list[Head]:
    """Heads that take longer than a rank's mean share of the work, on any kind of device."""
    from .tracer.split_words import heads

    def share(head: Head, profile: Profile) -> float:
        seconds = {
            name: cost.forward_s + cost.input_grad_s + cost.weight_grad_s
            for name, cost in profile.costs.items()
        }
        return sum(seconds[name] for name in head.ops) / (sum(seconds.values()) or 1.0)

    mean = 1 / request.options.ranks
    profiles = model.profiles.values()
    return [h for h in heads(model.captured) if any(share(h, profile) > mean for profile in profiles)]


def _parts(heads: Sequence[Head], count: int) -> dict[str, int]:
    return {name: count for head in heads for name in head.names}


def _counts(ranks: int) -> list[int]:
    """
    >>> _counts(2), _counts(12)
    ([2, 3, 4], [2, 3, 4, 6, 12])
    """
    halves = (ranks >> shift for shift in range(ranks.bit_length() - 1))
    return sorted({*FEW, *(count for count in halves if count > 1)})

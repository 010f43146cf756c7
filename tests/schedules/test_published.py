"""Every measured figure of the published generators for uneven times, as a bar for ours at the same memory.

Bubbles are the idle share of the step until the last rank ends; where `span`, of the longest time from a
rank's first action to its last. The figures and the peaks that belong to them were measured with the released
generators of arXiv 2401.10241, 2405.15362 and 2503.01328: each stage takes the times below, also where a rank
has several stages, and a transfer takes `TRANSFER_S` whatever the stage.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from timed import half, made_for, one, shape, third

from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.engine import ScheduledRecipe
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, SimulatedSchedule, simulate_schedule

LONG_CONTEXT = (1.0, 1.4, 0.6)
"""F, I, W: attention has no weights, so W takes less and I more."""

PROFILE = (10.419, 10.207, 7.715)
"""F, I, W of the 28.3B model of arXiv 2401.10241, in ms."""

TRANSFER_S = 0.408

ROUNDED = 0.0005
"""The published figures have three digits."""


def idle(made: ScheduledRecipe, s: Shape, *, span: bool = False) -> float:
    took = made.span_s if span else made.step_s
    return 1 - s.microbatches * s.period_s / took


def cells(*lines: tuple[str, int, Callable[[int], float], dict[int, float]]) -> list[object]:
    return [
        pytest.param(name, v, peak(p), p, bar, id=f"{name}-v{v}-p{p}", marks=[pytest.mark.slow] * (p > 8))
        for name, v, peak, bars in lines
        for p, bar in bars.items()
    ]


def by_ranks(*bars: float) -> dict[int, float]:
    """Of 4, 8, 16 and 32 ranks, or of the last of them."""
    return dict(zip((4, 8, 16, 32)[-len(bars) :], bars, strict=True))


def keeps(name: str, p: int, m: int, chunks: int, peak, bar, span=inf, **times) -> None:
    s = shape(name, p, m, chunks, **times)
    made = made_for(name, s)
    assert idle(made, s) <= bar and idle(made, s, span=True) <= span
    assert max(made.peak) <= peak


@pytest.mark.parametrize(
    ("name", "chunks", "peak", "p", "published"),
    cells(
        ("async_1f1b", 1, one, by_ranks(0.158, 0.180, 0.190, 0.195)),
        ("zb_1p", 1, one, by_ranks(0.101, 0.116, 0.123, 0.127)),
        ("zb_2p", 1, lambda p: 2 * p, by_ranks(0.063, 0.075, 0.083, 0.087)),
        ("zb_v", 2, one, by_ranks(0.042, 0.052, 0.057, 0.060)),
        ("v_half", 2, half, by_ranks(0.118, 0.150, 0.167, 0.176)),
        ("v_min", 2, third, by_ranks(0.342, 0.356, 0.367, 0.370)),
        ("interleaved_1f1b", 4, lambda p: p + (p - 1) / 4, by_ranks(0.045, 0.052, 0.055, 0.057)),
        ("gis", 4, one, by_ranks(0.036, 0.042, 0.045, 0.046)),
        ("gis_h", 4, lambda p: p * 5 / 8, by_ranks(0.086, 0.091, 0.094, 0.095)),
        ("po", 4, lambda p: p * 5 / 8 + min(p - 3, 3) / 4, by_ranks(0.118, 0.132, 0.144, 0.151)),
    ),
)
def test_long_contexts_are_timed_anew(name: str, chunks: int, peak: float, p: int, published: float) -> None:
    """The published V-Half and V-Min assume equal times and lose up to 17 points of bubble."""
    keeps(name, p, 4 * p, chunks, peak, published + ROUNDED, times=LONG_CONTEXT)


@pytest.mark.parametrize(
    ("name", "chunks", "peak", "p", "published"),
    cells(
        ("async_1f1b", 1, one, by_ranks(0.245, 0.258, 0.265)),
        ("zb_1p", 1, one, by_ranks(0.130, 0.138, 0.142)),
        ("v_half", 2, half, by_ranks(0.139, 0.158, 0.167)),
        ("v_min", 2, third, by_ranks(0.257, 0.271, 0.277)),
        ("gis", 4, one, by_ranks(0.056, 0.059, 0.061)),
    ),
)
def test_the_profile_of_a_real_model(name: str, chunks: int, peak: float, p: int, published: float) -> None:
    keeps(name, p, 3 * p, chunks, peak, published + ROUNDED, times=PROFILE, transfer_s=TRANSFER_S)


@pytest.mark.parametrize(
    ("p", "step", "span"),
    [
        # The released generator has 0.0602, 0.0643 and 0.0326, 0.0378, 0.041; the same is the least there is
        # for 8 and 16 that was found.
        (8, 0.0603, 0.0326),
        pytest.param(16, 0.0643, 0.0378, marks=pytest.mark.slow),
        pytest.param(32, 0.0663, 0.0405, marks=pytest.mark.slow),
    ],
)
def test_zb_v_with_the_profile_of_a_real_model(p: int, step: float, span: float) -> None:
    keeps("zb_v", p, 3 * p, 2, p, step, span + ROUNDED / 10, times=PROFILE, transfer_s=TRANSFER_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "step", "span"),
    [
        # Published: limit -> until the last rank ends, span: 1 -> .150, .1421; 1.25 -> .134, .0867;
        # 1.5 -> .132, .0604; 2 -> .110, .0038; 3 -> .110, 0.
        (1.0, 0.1421, 0.1421),
        (1.25, 0.1105, 0.0867),
        (1.5, 0.1105, 0.0604),
        (2.0, 0.1098, 0.0038),
        (3.0, 0.1098, 0.0),
    ],
)
def test_limits_in_bytes_of_a_real_model(limit: float, step: float, span: float) -> None:
    """Table 5 of arXiv 2401.10241: I lets go of 34h + 5as - 32h bytes per token, W of 32h."""
    p, hidden, heads, tokens = 32, 6144, 48, 1024
    s = shape("zb_2p", p, 3 * p, 1, times=PROFILE, transfer_s=TRANSFER_S)
    held = 34 * hidden + 5 * heads * tokens
    cost = replace(s.costs[0], residual_bytes=held, carried_bytes=32 * hidden)
    s = replace(s, costs=(cost,) * p, limit_bytes=limit * p * held)
    made = made_for("zb_2p", s)
    assert max(made.peak) <= limit * p * held
    assert idle(made, s) <= step + ROUNDED / 10
    assert idle(made, s, span=True) <= span + ROUNDED / 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("zb_v", 8),
        ("zb_1p", 8),
        ("gis", 8),
        ("v_half", 5),
        ("v_min", 4),
        ("1f1b_v", 6),
        ("gis_h", 6),
        ("po", 6.5),
    ],
)
def test_never_worse_than_1f1b_with_as_much_memory(name: str, peak: float) -> None:
    """Where W takes more. With room for `peak` micro-batches 1F1B does at best `peak` per round trip of one,
    as each residual of rank 0 lives from its F to the end of its B; with p of them it fills and drains."""
    p, m, times = 8, 32, (1.0, 0.6, 1.4)
    s = shape(name, p, m, times=times)
    made = made_for(name, s)
    assert max(made.peak) <= peak
    assert made.step_s <= max(m * p / peak, m + p - 1) * sum(times) * s.chunks


# Orders of a public zero-bubble scheduler, timed here again, as bars: short actions, long messages. F, I and
# W are of a rank, shared by its stages; a message takes its time whatever it carries.

Profile = tuple[float, float, float, float]


def shown(name: str, ranks: int, m: int, times: Profile, shortest="step") -> SimulatedSchedule:
    forward, back, weight, transfer = times
    each = MicrobatchTimes(forward_s=forward, input_grad_s=back, weight_grad_s=weight)
    where = Scenario(ranks=ranks, microbatches=m, times=each, transfer_s=transfer, shortest=shortest)
    return simulate_schedule(name, where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "times", "peak", "step_s"),
    [
        ("po:v=4", 4, 16, (1.0, 1.2, 0.9, 0.5), 2.75, 110.9),
        ("po:v=4", 4, 16, (1.0, 0.8, 1.2, 0.2), 2.75, 64.5),
        ("po:v=4", 4, 16, (1.0, 0.6, 1.4, 0.05), 2.75, 52.9),
        pytest.param("po:v=4", 16, 64, (1.0, 0.8, 1.2, 0.2), 10.75, 266.9, marks=pytest.mark.slow),
        pytest.param("gis:v=4", 16, 32, (1.0, 1.2, 0.9, 0.5), 16.0, 217.0, marks=pytest.mark.slow),
        pytest.param("po:v=4", 16, 64, (1.0, 1.4, 0.6, 0.1), 10.75, 252.4, marks=pytest.mark.slow),
        pytest.param("v_half", 16, 32, (1.0, 1.4, 0.6, 0.1), 9.0, 144.7, marks=pytest.mark.slow),
    ],
)
def test_no_longer_at_the_same_peak(name, ranks, microbatches, times, peak, step_s) -> None:
    made = shown(name, ranks, microbatches, times)
    assert made.summary.step_s <= step_s and made.peak <= peak


def test_the_shortest_span_instead_of_the_shortest_step() -> None:
    by_step, by_span = (
        shown("zb_1p", 4, 12, (1.0, 0.6, 1.4, 0.05), shortest=what).summary for what in ("step", "span")
    )
    assert by_span.span_s < by_step.span_s and by_span.step_s >= by_step.step_s

"""A search problem as arrays, and the plain timing of an order: what all engines share.

An order lists everything once: entry e stands for unit e // m and micro-batch e % m. Each entry begins as
soon as its ranks are free and what it waits for is there; so an order in which nothing stands before what it
needs can never block, and gives the times that the simulator gives for its rows.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ir.columns import Bools, Floats, Longs
from ...ir.kernels import kernel

EPS = 1e-9


class Units(NamedTuple):
    """Per unit its seconds, what it adds to its ranks' residuals, its kind (0 F, 1 B or I, 2 W), its stage;
    its ranks, those of unit u from `on_at[u]` on; what it needs and how long that takes to arrive.  meet:
    whether two units share a rank.  tail: what must follow.  span: whether the longest time from a rank's
    first action to its last is to be short, and not the step."""

    microbatches: int
    seconds: Floats
    memory: Floats
    kind: Longs
    on_at: Longs
    on: Longs
    need_at: Longs
    need: Longs
    delay: Floats
    meet: Bools
    tail: Floats
    cap: Floats
    span: bool


class TimingArrays(NamedTuple):
    """What timing writes. Per entry its end; per rank when it is free, what it holds and has held at most,
    and when its time began: negative before its first action where spans count, else 0."""

    end: Floats
    free: Floats
    used: Floats
    peak: Floats
    began: Floats


@kernel
def reset(t: Units, c: TimingArrays) -> None:
    for rank in range(len(c.free)):
        c.free[rank] = 0.0
        c.used[rank] = 0.0
        c.peak[rank] = 0.0
        c.began[rank] = -1.0 if t.span else 0.0


@kernel
def run_entry(t: Units, c: TimingArrays, u: int, b: int, m: int) -> float:
    """Run unit u of micro-batch b after all that came before. Returns: when it ends; or how long its ranks
    have then been at it, where spans count."""
    begin = 0.0
    for at in range(t.on_at[u], t.on_at[u + 1]):
        begin = max(begin, c.free[t.on[at]])
    for at in range(t.need_at[u], t.need_at[u + 1]):
        begin = max(begin, c.end[t.need[at] * m + b] + t.delay[at])
    end = begin + t.seconds[u]
    taken = 0.0
    c.end[u * m + b] = end
    for at in range(t.on_at[u], t.on_at[u + 1]):
        rank = t.on[at]
        c.free[rank] = end
        c.used[rank] += t.memory[u]
        c.peak[rank] = max(c.peak[rank], c.used[rank])
        if c.began[rank] < 0.0:
            c.began[rank] = begin
        taken = max(taken, end - c.began[rank])
    return taken


@kernel
def run_order(t: Units, c: TimingArrays, order: Longs) -> float:
    """Run an order. Returns: the seconds that are to be few, of the step or of the longest span."""
    reset(t, c)
    m, cost = t.microbatches, 0.0
    for entry in order:
        cost = max(cost, run_entry(t, c, entry // m, entry % m, m))
    return cost


@kernel
def excess(t: Units, c: TimingArrays) -> float:
    """By which share of their limits the ranks hold too much, all together."""
    over = 0.0
    for rank in range(len(t.cap)):
        if c.peak[rank] > t.cap[rank]:
            over += (c.peak[rank] - t.cap[rank]) / max(t.cap[rank], EPS)
    return over


@kernel
def rest(c: TimingArrays) -> float:
    """When ranks end on average: of orders with the same step the one that leaves more room is nearer a
    better one."""
    total = 0.0
    for rank in range(len(c.free)):
        total += c.free[rank]
    return total / len(c.free)


@kernel
def draw(seed: Longs) -> float:
    """A number from 0 to 1, the same sequence compiled or not. Source: MINSTD, Park and Miller, 1988."""
    seed[0] = seed[0] * 48271 % 2147483647
    drawn: float = seed[0] / 2147483647
    return drawn

"""Realistic timelines, made by hand: 1F1B on a chain of stages, with transfers, memory and a bit of noise."""

import random
from collections.abc import Callable

import pytest

from pipeloom.ir.timeline import Event, MemoryCurve, Timeline

MiB = 1024**2
Make = Callable[..., Timeline]


def one_f_one_b(rank: int, ranks: int, mbs: int) -> list[str]:
    ahead = min(ranks - rank - 1, mbs)
    row = [f"F{m}" for m in range(ahead)]
    for m in range(ahead, mbs):
        row += [f"F{m}", f"B{m - ahead}"]
    return row + [f"B{m}" for m in range(mbs - ahead, mbs)]


class Clock:
    """Runs 1F1B rows with a clock; a small copy of what the simulator does, since views never import it."""

    def __init__(self, ranks: int, mbs: int, forward_s: float, noise: float) -> None:
        self.ranks, self.mbs, self.forward_s = ranks, mbs, forward_s
        self.random = random.Random(ranks * 1000 + mbs)
        self.noise = noise
        self.free = [0.0] * ranks
        self.done: dict[str, float] = {}
        self.events: list[Event] = []

    def run(self) -> None:
        rows = [one_f_one_b(r, self.ranks, self.mbs) for r in range(self.ranks)]
        while any(rows):
            for rank, row in enumerate(rows):
                while row and self.ready(rank, row[0]):
                    self.act(rank, row.pop(0))
        for rank in range(self.ranks):
            self.add(rank, "compute", f"{rank}STEP", self.free[rank], self.forward_s * 0.4)

    def needs(self, rank: int, word: str) -> str | None:
        kind, mb = word[0], word[1:]
        if kind == "F":
            return f"{rank - 1}F{mb}" if rank else None
        return f"{rank + 1}B{mb}" if rank < self.ranks - 1 else None

    def ready(self, rank: int, word: str) -> bool:
        need = self.needs(rank, word)
        return need is None or need in self.done

    def act(self, rank: int, word: str) -> None:
        kind, mb = word[0], word[1:]
        start = self.free[rank]
        if need := self.needs(rank, word):
            peer = int(need.split(kind)[0])
            arrival = self.done[need] + 0.04 * self.forward_s
            sent = self.done[need]
            self.add(peer, "send", f"{peer}SEND_{kind}{mb}>{rank}", sent, arrival - sent)
            if arrival > start:
                self.add(rank, "recv", f"{rank}RECV_{kind}{mb}<{peer}", start, arrival - start)
                start = arrival
        cost = self.forward_s * (1.0 if kind == "F" else 2.0) * (1 + 0.08 * rank)
        cost *= 1 + self.noise * self.random.random()
        self.add(rank, "compute", f"{rank}{word}", start, cost)
        self.free[rank] = self.done[f"{rank}{word}"] = start + cost

    def add(self, rank: int, stream: str, action: str, start: float, size: float) -> None:
        self.events.append(Event(rank=rank, stream=stream, action=action, start_s=start, end_s=start + size))


def memory(events: list[Event], rank: int) -> tuple[MemoryCurve, dict[str, int]]:
    static = {"parameters": 48 * MiB, "gradients": 48 * MiB, "optimizer": 96 * MiB}
    held, times, sizes = sum(static.values()), [0.0], [sum(static.values())]
    for e in sorted((e for e in events if e.rank == rank and e.stream == "compute"), key=lambda e: e.start_s):
        kind = e.action.lstrip("0123456789")[0]
        if kind == "F":
            held += 21 * MiB
            times, sizes = [*times, e.start_s], [*sizes, held]
        elif kind == "B":
            held -= 21 * MiB
            times, sizes = [*times, e.start_s, e.end_s], [*sizes, held + 33 * MiB, held]
    peak = dict(static, residuals=max(sizes) - held - 12 * MiB, transient=12 * MiB)
    return MemoryCurve(rank=rank, times_s=tuple(times), sizes=tuple(sizes)), peak


@pytest.fixture(scope="session")
def make_timeline() -> Make:
    def make(*, ranks: int, mbs: int, source: str = "predicted", forward_s: float = 0.01) -> Timeline:
        clock = Clock(ranks, mbs, forward_s, noise=0.15 if source == "measured" else 0.0)
        clock.run()
        curves, peaks = zip(*(memory(clock.events, r) for r in range(ranks)), strict=True)
        return Timeline(source=source, ranks=ranks, events=tuple(clock.events), memory=curves, peaks=peaks)

    return make


@pytest.fixture
def two_ranks() -> Timeline:
    """Rank 0: F F B B; rank 1: F B F B; forward 1 s, backward 2 s, then a step of 0.5 s on rank 0."""
    rows = (
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 4, 6),
        (0, "0B1", 7, 9),
        (0, "0STEP", 9, 9.5),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
    )
    compute = [Event(rank=r, stream="compute", action=a, start_s=s, end_s=e) for r, a, s, e in rows]
    wait = Event(rank=0, stream="recv", action="0RECV_B0<1", start_s=2, end_s=4)
    return Timeline(
        source="predicted",
        ranks=2,
        events=(*compute, wait),
        memory=(MemoryCurve(rank=0, times_s=(0.0, 1.0, 9.0), sizes=(10 * MiB, 30 * MiB, 10 * MiB)),),
        peaks=({"parameters": 10 * MiB, "residuals": 20 * MiB}, {"parameters": 10 * MiB}),
    )

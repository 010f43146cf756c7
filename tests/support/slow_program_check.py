"""The rules for programs once more, slow and plain; see `slow_check` for those of schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from slow_check import (
    BACKWARD,
    COMPUTE,
    PROGRAM_RULES,
    TREATED,
    bad_pairs,
    bad_shards,
    badly_added,
    badly_treated,
    incomplete,
    met,
    misplaced,
    out_of_order,
    stuck,
    unknown,
    wants,
)

from pipeloom.ir.action import Action, StageAction, Transfer
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.stages import StageGraph


def broken_program_rule(p: Program, g: StageGraph) -> str | None:
    """The first rule that a program breaks; None if it is valid."""
    compute = Schedule(
        name="",
        microbatches=p.microbatches,
        placement=p.placement,
        pairs=p.pairs,
        rows=tuple(tuple(step for step in row if isinstance(step, Action)) for row in p.rows),
    )
    if misplaced(compute, g):
        return "placement"
    rows = tuple(tuple(a for a in row if a.kind not in TREATED) for row in compute.rows)
    untreated = replace(compute, rows=rows)
    tests: dict[str, Callable[[], bool]] = {
        "kinds": lambda: unknown(compute, g, (*COMPUTE, *TREATED)),
        "completeness": lambda: incomplete(compute, g),
        "shards": lambda: bad_shards(compute, g),
        "order": lambda: out_of_order(untreated, g),
        "residuals": lambda: badly_treated(compute),
        "pairs": lambda: bad_pairs(compute, g),
        "operations": lambda: badly_added(compute),
        "ends": lambda: _stray(p, g),
        "pairing": lambda: _unpaired(p),
        "data": lambda: _missing_data(p, g),
        "optimizer": lambda: _bad_optimizer(p, g),
        "deadlock": lambda: bool(program_stuck(p, g)),
    }
    waits = g.shards or p.pairs or any(met(a, g) for row in compute.rows for a in row)
    early = PROGRAM_RULES[1 : PROGRAM_RULES.index("ends")]
    if waits and not any(tests[rule]() for rule in early) and stuck(compute, g):
        return "deadlock"
    return next((rule for rule in PROGRAM_RULES[1:] if tests[rule]()), None)


def _edge(t: Transfer) -> tuple[int, int]:
    """The edge of the stage graph, from the stage that makes the value."""
    return (t.stage, t.peer) if t.kind in ("SEND_F", "RECV_B") else (t.peer, t.stage)


def _stray(p: Program, g: StageGraph) -> bool:
    for rank, row in enumerate(p.rows):
        for t in row:
            if isinstance(t, Action):
                continue
            if not 0 <= t.stage < len(p.placement) or p.placement[t.stage] != rank:
                return True
            if isinstance(t, Transfer):
                values = g.between.get(_edge(t), ())
                if not any(v.needs_grad or t.kind in ("SEND_F", "RECV_F") for v in values):
                    return True
                if p.placement[t.peer] == rank or not 0 <= t.microbatch < p.microbatches:
                    return True
    return False


def _unpaired(p: Program) -> bool:
    count = Counter(t for row in p.rows for t in row if isinstance(t, Transfer))
    return any(n > 1 for n in count.values()) or any(t.other_end not in count for t in count)


def _missing_data(p: Program, g: StageGraph) -> bool:
    for row in p.rows:
        for at, step in enumerate(row):
            before = set(row[:at])
            if isinstance(step, Transfer) and step.sends:
                kinds = ("F",) if step.kind == "SEND_F" else ("B", "I")
                if not before & {Action(step.stage, k, step.microbatch) for k in kinds}:  # type: ignore[arg-type]
                    return True
            if isinstance(step, Action):
                for peer, kind, b in wants(step, g):
                    if p.placement[peer] != p.placement[step.stage]:
                        recv = Transfer(step.stage, "RECV_F" if kind == "F" else "RECV_B", b, peer)  # type: ignore[arg-type]
                        if recv not in before:
                            return True
    return False


def _tied_on(p: Program, g: StageGraph, rank: int) -> list[int]:
    return sorted({s for readers in g.tied.values() for s in readers if p.placement[s] == rank})


def _bad_optimizer(p: Program, g: StageGraph) -> bool:
    training = any(isinstance(a, Action) and a.kind in BACKWARD for row in p.rows for a in row)
    for rank, row in enumerate(p.rows):
        wanted = Counter(str(StageAction(s, "STEP")) for s, r in enumerate(p.placement) if r == rank)  # type: ignore[arg-type]
        if tied := _tied_on(p, g, rank):
            wanted[f"{tied[0]}REDUCE"] = 1
        kinds = ["c" if isinstance(a, Action) else a.kind for a in row if not isinstance(a, Transfer)]
        found = Counter(str(a) for a in row if isinstance(a, StageAction))
        if found != (wanted if training else Counter()):
            return True
        if kinds != sorted(kinds, key=lambda k: {"c": 0, "REDUCE": 1}.get(k, 2)):
            return True
    return False


def program_stuck(p: Program, g: StageGraph) -> dict[int, object]:
    """Run a program with sends that never wait: rank -> the step at which it stays for ever.

    A REDUCE comes to all its sums at once, and waits for all their ranks. What meets others begins when they
    can.
    """
    begun: set[Action] = set()
    homes = {name: {p.placement[s] for s in g.tied[name]} for name in sorted(g.tied)}
    sums = [[(name, ranks) for name, ranks in homes.items() if r in ranks] for r in range(len(p.rows))]
    done: set[Hashable] = set()
    at = [0] * len(p.rows)

    def ready(rank: int, step: object) -> bool:
        if isinstance(step, Transfer) and not step.sends:
            return step.other_end in done
        if isinstance(step, Action):
            begun.add(step)
            return all(other in begun for other in met(step, g))
        if isinstance(step, StageAction) and step.kind == "REDUCE":
            done.update((name, rank) for name, _ in sums[rank])
            return all((name, other) in done for name, ranks in sums[rank] for other in ranks)
        return True

    before: Sequence[int] = []
    while before != (now := [*at, len(done), len(begun)]):
        before = now
        for rank, row in enumerate(p.rows):
            while at[rank] < len(row) and ready(rank, row[at[rank]]):
                done.add(row[at[rank]])
                at[rank] += 1
    return {rank: row[at[rank]] for rank, row in enumerate(p.rows) if at[rank] < len(row)}

"""The rules for schedules and programs once more, slow and plain: counting, searching, running everything.

Nothing here uses `pipeloom.checks.schedules` or what it is built from; only the nouns are shared.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import takewhile

from pipeloom.ir.action import Action
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.operation import OPERATIONS
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.stages import StageGraph

ADDED = "NOTE", "PACK", "WARM", "SWAP"
"""The operations of `edits`."""
COPIES = ("OFFLOAD", "AWAIT", "RELOAD")
COMPUTE = ("F", "B", "I", "W", *COPIES, *ADDED)
TREATED = (*COPIES, "RECOMPUTE")
"""What a program may do with residuals; a schedule only copies."""
BACKWARD = ("B", "I", "W")

MESSAGES = {
    "placement": r"the placement names|is placed on rank|but the stages are 0 to",
    "ranks": r"no stage: the stages are on",
    "kinds": r"whose kind is not a compute action|runs \d+[A-Z]+\d+, but the micro-batches are 0 to",
    "completeness": r"runs (\d+(F|B|I|W|OFFLOAD|AWAIT|RELOAD|RECOMPUTE|NOTE|PACK|WARM|SWAP)\d+) twice"
    r"|never runs \d+[FBIW]\d+|runs both",
    "order": r"runs \S+ before \S+, which it needs$",
    "shards": r"which are one stage on several ranks$|which has the same stage, runs",
    "slices": r"another slice of the same micro-batch",
    "residuals": r"no backward reads its residuals|and never \d+RELOAD|nothing of it was offloaded"
    r"|which comes first of the two$",
    "pairs": r"of the pair|is in two pairs|is a pair$|as a pair, but",
    "operations": r"never runs \d+(NOTE|PACK|WARM|SWAP)\d+$|is not declared for it"
    r"|runs \d+(NOTE|PACK|WARM|SWAP)\d+ (before|after) \d+[FBIW]\d+$|no rank runs or which does not meet",
    "ends": r"does not hold stage|pass that way from stage to stage|but holds both stages"
    r"|runs \d+(SEND|RECV)_\S+, but the micro-batches are 0 to",
    "pairing": r"\d(SEND|RECV)_\S+ twice|never runs \d+(SEND|RECV)",
    "data": r"runs \S+ without \S+ before it",
    "optimizer": r"which has nothing to do there|never runs \d+(STEP|REDUCE)$|(STEP|REDUCE) twice"
    r"|runs \d+(STEP|REDUCE) (after|before)",
    "deadlock": r"no rank can move",
}
"""Rule -> what its messages look like."""


def computes(action: Action) -> bool:
    return not (action.is_transfer or action.is_stage_wide)


def rule_of(error: ScheduleError) -> str:
    """Which rule an error comes from. Exactly one pattern matches."""
    found = [rule for rule, pattern in MESSAGES.items() if re.search(pattern, error.message)]
    assert len(found) == 1, f"{error.message!r} looks like {found or 'no known rule'}"
    assert isinstance(error, DeadlockError) == (found[0] == "deadlock")
    assert error.hint
    return found[0]


def broken_rule(schedule: Schedule, stages: StageGraph) -> str | None:
    """The first rule that a schedule breaks; None if it is valid."""
    tests: dict[str, Callable[[Schedule, StageGraph], bool]] = {  # in the order in which they are proved
        "placement": misplaced,
        "ranks": _idle,
        "kinds": unknown,
        "completeness": incomplete,
        "shards": bad_shards,
        "order": out_of_order,
        "slices": _slices_mixed,
        "deadlock": lambda s, g: bool(stuck(s, g, together=False)),
        "residuals": lambda s, g: badly_treated(s),
        "pairs": lambda s, g: bool(bad_pairs(s, g)),
        "operations": badly_added,
    }
    for rule, broken in tests.items():
        if broken(schedule, stages):
            return rule
    return "deadlock" if stuck(schedule, stages) else None


def misplaced(s: Schedule, g: StageGraph) -> bool:
    if len(s.placement) != len(g.stages) or any(not 0 <= rank < len(s.rows) for rank in s.placement):
        return True
    home = dict(enumerate(s.placement))
    return any(home.get(a.stage) != rank for rank, row in enumerate(s.rows) for a in row)


def _idle(s: Schedule, g: StageGraph) -> bool:
    return set(s.placement) != set(range(len(s.rows)))


def unknown(s: Schedule, g: StageGraph, kinds: Sequence[str] = COMPUTE) -> bool:
    return any(a.kind not in kinds or not 0 <= a.microbatch < s.microbatches for row in s.rows for a in row)


def incomplete(s: Schedule, g: StageGraph) -> bool:
    count = Counter(a for row in s.rows for a in row)
    if any(n > 1 for n in count.values()):
        return True
    training = any(a.kind in BACKWARD for a in count)
    for stage in range(len(s.placement)):
        for b in range(s.microbatches):
            kinds = {k for k in ("F", "B", "I", "W") if Action(stage, k, b) in count}  # type: ignore[arg-type]
            if kinds not in ([{"F", "B"}, {"F", "I", "W"}] if training else [{"F"}]):
                return True
    return False


def wants(action: Action, g: StageGraph) -> set[tuple[int, str, int]]:
    """(stage, F or G, micro-batch): outputs and gradients that must be there before an action."""
    stage, b = action.stage, action.microbatch
    if action.kind == "F":
        return {(source, "F", b) for source, target in g.between if target == stage}
    if action.kind in ("B", "I"):
        readers = {t for s, t in g.between if s == stage and any(v.needs_grad for v in g.between[s, t])}
        return {(stage, "F", b)} | {(reader, "G", b) for reader in readers}
    if action.kind in TREATED:
        return set()
    if action.kind in ADDED:
        after = OPERATIONS[action.kind].after
        return set() if after is None else {(stage, "F" if after == "F" else "G", b)}
    return {(stage, "G" if action.kind == "W" else "F", b)}


def makes(action: Action) -> set[tuple[int, str, int]]:
    kind = {"F": "F", "B": "G", "I": "G"}.get(action.kind)
    return {(action.stage, kind, action.microbatch)} if kind else set()


def out_of_order(s: Schedule, g: StageGraph) -> bool:
    for rank, row in enumerate(s.rows):
        for at, action in enumerate(row):
            before = set().union(*(makes(a) for a in row[:at]))
            if any(want not in before for want in wants(action, g) if s.placement[want[0]] == rank):
                return True
    return False


def _slices_mixed(s: Schedule, g: StageGraph) -> bool:
    for row in s.rows:
        place = {a: at for at, a in enumerate(row)}
        for a, at in place.items():
            if a.kind in ("F", "B", "I"):
                other = Action(a.stage, a.kind, a.microbatch + 1)
                together = a.microbatch // s.slices == other.microbatch // s.slices
                wrong = place.get(other, at) < at if a.kind == "F" else place.get(other, at) > at
                if together and wrong:
                    return True
    return False


def badly_treated(s: Schedule) -> bool:
    """The actions of each micro-batch of a stage as a word that must fit a pattern."""
    words: dict[tuple[int, int], str] = {}
    for row in s.rows:
        for a in row:
            letter = {"B": "b", "I": "b", "OFFLOAD": "o", "AWAIT": "a", "RELOAD": "r", "RECOMPUTE": "c"}
            at = a.stage, a.microbatch
            words[at] = words.get(at, "") + letter.get(a.kind, "f" if a.kind == "F" else "")
    for word in words.values():
        if set("oarc") & set(word) and not re.fullmatch("f(oa?r)?c?b", word):
            return True
    return False


def bad_pairs(s: Schedule, g: StageGraph) -> bool:
    members = [a for pair in s.pairs for a in pair]
    if len(set(members)) < len(members):
        return True
    neighbours = {pair for row in s.rows for pair in zip(row, row[1:], strict=False)}

    def needs(action: Action) -> set[tuple[int, str, int]]:
        treats = action.kind in TREATED  # what the forward of its micro-batch has made
        return {(action.stage, "F", action.microbatch)} if treats else wants(action, g)

    return any(pair not in neighbours or makes(pair[0]) & needs(pair[1]) for pair in s.pairs)


def badly_added(s: Schedule, g: StageGraph) -> bool:
    """An operation that a schedule has somewhere stands on its side of every anchor, and nowhere else; and
    what it meets is there."""
    added = {a for row in s.rows for a in row if a.kind in ADDED}
    there = {a.kind for a in added}
    if any(other not in added for a in added for other in met(a, g)):
        return True
    for rank, row in enumerate(s.rows):
        place = {a: at for at, a in enumerate(row)}
        for operation in (OPERATIONS[kind] for kind in there):
            stands_at = {"F": "F", "B": "BI", "I": "BI", "W": "WB"}[operation.anchor]
            for anchor, at in place.items():
                mine = Action(anchor.stage, operation.kind, anchor.microbatch)
                if anchor.kind in stands_at and operation.runs(anchor.stage, rank, anchor.microbatch):
                    if mine not in place or (place[mine] > at) != (operation.after is not None):
                        return True
        if any(a.kind in ADDED and not OPERATIONS[a.kind].runs(a.stage, rank, a.microbatch) for a in row):
            return True
    return False


def met(action: Action, g: StageGraph) -> list[Action]:
    """What begins together with an action on other ranks."""
    others: Sequence[int] = ()
    if action.kind in ("F", "B", "I"):
        others = next((group for group in g.shards if action.stage in group), ())
    elif action.kind in ADDED and (meets := OPERATIONS[action.kind].meets) is not None:
        others = meets(action.stage)
    return [Action(other, action.kind, action.microbatch) for other in others]


def bad_shards(s: Schedule, g: StageGraph) -> bool:
    split = {(a.stage, a.microbatch) for row in s.rows for a in row if a.kind == "I"}
    return any(
        len({s.placement[stage] for stage in group}) < len(group)
        or len({frozenset(b for stage, b in split if stage == one) for one in group}) > 1
        for group in g.shards
    )


def stuck(s: Schedule, g: StageGraph, *, together: bool = True) -> dict[int, Action]:
    """Run every rank as far as it goes: rank -> the action at which it stays for ever.

    together: two that are a pair begin together, and so do shards of a stage and operations that meet.
    """
    second = dict(s.pairs) if together else {}
    begun: set[Action] = set()
    done: set[Hashable] = set()
    at = [0] * len(s.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(s.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                unit = (action, *([second[action]] if action in second else []))
                if not all(wants(a, g) <= done for a in unit):
                    break
                moved = moved or action not in begun
                begun.add(action)
                if together and not all(other in begun for other in met(action, g)):
                    break
                done |= makes(action)
                at[rank] += 1
                moved = True
    return {rank: row[at[rank]] for rank, row in enumerate(s.rows) if at[rank] < len(row)}


# The same for programs.


def broken_program_rule(p: Program, g: StageGraph) -> str | None:
    """The first rule that a program breaks; None if it is valid."""
    compute = replace(p, rows=tuple(tuple(filter(computes, row)) for row in p.rows))
    rows = tuple(tuple(a for a in row if a.kind not in TREATED) for row in compute.rows)
    untreated = replace(compute, rows=rows)
    tests: dict[str, Callable[[], bool]] = {
        "placement": lambda: misplaced(compute, g),
        "kinds": lambda: unknown(compute, g, (*COMPUTE, *TREATED)),
        "completeness": lambda: incomplete(compute, g),
        "shards": lambda: bad_shards(compute, g),
        "order": lambda: out_of_order(untreated, g),
        "residuals": lambda: badly_treated(compute),
        "pairs": lambda: bad_pairs(compute, g),
        "operations": lambda: badly_added(compute, g),
        "ends": lambda: _stray(p, g),
        "pairing": lambda: _unpaired(p),
        "data": lambda: _missing_data(p, g),
        "optimizer": lambda: _bad_optimizer(p, g),
        "deadlock": lambda: bool(program_stuck(p, g)),
    }
    waits = g.shards or p.pairs or any(met(a, g) for row in compute.rows for a in row)
    early = takewhile(lambda rule: rule != "ends", tests)
    if waits and not any(tests[rule]() for rule in early) and stuck(compute, g):
        return "deadlock"
    return next((rule for rule, broken in tests.items() if broken()), None)


def _edge(t: Action) -> tuple[int, int]:
    """The edge of the stage graph, from the stage that makes the value."""
    return (t.stage, t.peer) if t.kind in ("SEND_F", "RECV_B") else (t.peer, t.stage)


def _stray(p: Program, g: StageGraph) -> bool:
    for rank, row in enumerate(p.rows):
        for t in row:
            if computes(t):
                continue
            if not 0 <= t.stage < len(p.placement) or p.placement[t.stage] != rank:
                return True
            if t.is_transfer:
                values = g.between.get(_edge(t), ())
                if not any(v.needs_grad or t.kind in ("SEND_F", "RECV_F") for v in values):
                    return True
                if p.placement[t.peer] == rank or not 0 <= t.microbatch < p.microbatches:
                    return True
    return False


def _unpaired(p: Program) -> bool:
    count = Counter(t for row in p.rows for t in row if t.is_transfer)
    return any(n > 1 for n in count.values()) or any(t.other_end not in count for t in count)


def _missing_data(p: Program, g: StageGraph) -> bool:
    for row in p.rows:
        for at, step in enumerate(row):
            before = set(row[:at])
            if step.sends:
                kinds = ("F",) if step.kind == "SEND_F" else ("B", "I")
                if not before & {Action(step.stage, k, step.microbatch) for k in kinds}:  # type: ignore[arg-type]
                    return True
            if computes(step):
                for peer, kind, b in wants(step, g):
                    if p.placement[peer] != p.placement[step.stage]:
                        recv = Action(step.stage, "RECV_F" if kind == "F" else "RECV_B", b, peer)  # type: ignore[arg-type]
                        if recv not in before:
                            return True
    return False


def _tied_on(p: Program, g: StageGraph, rank: int) -> list[int]:
    return sorted({s for readers in g.tied.values() for s in readers if p.placement[s] == rank})


def _bad_optimizer(p: Program, g: StageGraph) -> bool:
    training = any(a.kind in BACKWARD for row in p.rows for a in row)
    for rank, row in enumerate(p.rows):
        wanted = Counter(str(Action(s, "STEP")) for s, r in enumerate(p.placement) if r == rank)  # type: ignore[arg-type]
        if tied := _tied_on(p, g, rank):
            wanted[f"{tied[0]}REDUCE"] = 1
        kinds = ["c" if computes(a) else a.kind for a in row if not a.is_transfer]
        found = Counter(str(a) for a in row if a.is_stage_wide)
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
        if step.receives:
            return step.other_end in done
        if computes(step):
            begun.add(step)
            return all(other in begun for other in met(step, g))
        if step.kind == "REDUCE":
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

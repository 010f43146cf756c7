"""The terms (see intervals.py) from which the bytes of an interval of ops are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .intervals import Term, first_use_terms
from .wiring import Wiring

Columns = Mapping[str, int]


def interval_terms(
    wiring: Wiring, saves: Mapping[str, Sequence[str]], columns: Columns,
    clones: Sequence[Mapping[str, float]],
) -> Iterable[Term]:  # fmt: skip
    """All terms of a graph.

    saves: op -> values it keeps for its backward.  columns: name of a sum -> its column.
    clones: per distinct profile the seconds of each op; what cheap ops take in each stage goes into
        columns of their own after the named ones.
    """
    yield from _state(wiring, columns)
    yield from _crossings(wiring, columns)
    yield from _residuals(wiring, saves, columns["residuals"])
    for name, users in wiring.cheap_users.items():
        for kind, seconds in enumerate(clones):
            yield from first_use_terms(users, len(columns) + kind, seconds[name])


def _state(wiring: Wiring, columns: Columns) -> Iterable[Term]:
    """Parameters and buffers; what no op reads is held by the stage that starts at 0, without gradient."""
    graph = wiring.graph
    readers: dict[tuple[str, str], set[int]] = {
        **{("parameters", p.name): set() for p in graph.parameters},
        **{("buffers", b.name): set() for b in graph.buffers},
    }
    for op in graph.ops:
        where = wiring.cheap_users[op.name] if op.cheap else (wiring.position[op.name],)
        for kind, names in (("parameters", op.params), ("buffers", op.buffers)):
            for name in names:
                readers[kind, name].update(where)
    for (kind, name), positions in readers.items():
        noun = graph.parameter[name] if kind == "parameters" else graph.buffer[name]
        yield from first_use_terms(sorted(positions) or [0], columns[kind], noun.bytes)
        if kind == "parameters" and graph.parameter[name].trainable:
            yield from first_use_terms(sorted(positions), columns["trainable"], noun.bytes)


def _crossings(wiring: Wiring, columns: Columns) -> Iterable[Term]:
    """Values that cross in (at the first reader inside), and out (from the maker to the last reader)."""
    for name, value in wiring.graph.value.items():
        made, readers = wiring.made_at(name), wiring.readers(name)
        if made < 0 or not readers:
            continue
        for into, out in [("received", "sent")] + [("received_grads", "sent_grads")] * value.needs_grad:
            yield from first_use_terms(readers, columns[into], value.bytes, after=made)
            yield -1, made, made, columns[out], value.bytes
            yield -1, made, readers[-1], columns[out], -value.bytes


def _residuals(wiring: Wiring, saves: Mapping[str, Sequence[str]], column: int) -> Iterable[Term]:
    """Saved values: whole where their maker is inside, else as the view that crosses in.

    On its way to the op that saves it, a view is read at some position by the next view; the interval
    holds it as a tensor of its own if it was made before the start and that reader is inside.
    """
    held: dict[str, dict[int, int]] = {}  # value -> position of the next reader -> first saver beyond it
    whole: dict[str, int] = {}
    for name, saved in saves.items():
        saver = wiring.position[name]
        for value in saved:
            for chain in wiring.chains(wiring.graph.op[name], value):
                reader = made = saver
                for view in chain:
                    beyond = held.setdefault(view, {})
                    beyond[reader] = min(saver, beyond.get(reader, saver))
                    made = wiring.made_at(view)
                    reader = made if made >= 0 else reader
                if made >= 0:
                    whole[chain[-1]] = min(saver, whole.get(chain[-1], saver))
    value_of = wiring.graph.value
    for name, saver in whole.items():
        yield -1, wiring.made_at(name), saver, column, value_of[name].bytes
    for name, beyond in held.items():
        if wiring.made_at(name) >= 0 or wiring.parent(name) is None:  # a cheap view never crosses
            yield from _held(wiring.made_at(name), beyond, column, value_of[name].bytes)


def _held(after: int, beyond: Mapping[int, int], column: int, size: int) -> Iterable[Term]:
    """Terms of one value made at `after`: from each reader on, the first saver behind it counts."""
    saver = max(beyond.values())
    readers = sorted(n for n in beyond if n > after)
    for previous, reader in reversed(list(zip([after, *readers], readers, strict=False))):
        saver = min(saver, beyond[reader])
        yield previous, reader, saver, column, size

"""The terms (see intervals.py) from which the bytes of an interval of ops are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .interval_sums import Term, first_use_terms
from .readers import Wiring

Columns = Mapping[str, int]


def interval_terms(
    wiring: Wiring,
    saves: Mapping[str, Sequence[str]],
    columns: Columns,
    clones: Sequence[Mapping[str, float]],
) -> Iterable[Term]:
    """All terms of a graph.

    saves: op -> values it keeps for its backward.  columns: name of a sum -> its column.
    clones: per distinct profile the seconds of each op; what cheap ops take in each stage goes into
        columns of their own after the named ones.
    """
    yield from _state(wiring, columns)
    yield from _crossings(wiring, columns)
    yield from _residuals(wiring, saves, columns)
    for name, users in wiring.cheap_users.items():
        for kind, seconds in enumerate(clones):
            yield from first_use_terms(users, len(columns) + kind, seconds[name])


def _state(wiring: Wiring, columns: Columns) -> Iterable[Term]:
    """Parameters and buffers; what no op reads is held by the stage that starts at 0."""
    for parameter in wiring.graph.parameters:
        users = wiring.users[parameter.name] or (0,)
        yield from first_use_terms(users, columns["parameters"], parameter.bytes)
        if parameter.trainable:
            yield from first_use_terms(users, columns["trainable"], parameter.bytes)
    for buffer in wiring.graph.buffers:
        yield from first_use_terms(wiring.users[buffer.name] or (0,), columns["buffers"], buffer.bytes)


def _crossings(wiring: Wiring, columns: Columns) -> Iterable[Term]:
    """Values that cross in (at the first reader inside), and out (from the maker to the last reader)."""
    for name, value in wiring.graph.value.items():
        made, readers = wiring.made_at(name), wiring.readers(name)
        if made < 0 or not readers:
            continue
        back = wiring.grad_readers(name)
        for into, out, where in (("received", "sent", readers), ("received_grads", "sent_grads", back)):
            if where:
                yield from first_use_terms(where, columns[into], value.bytes, after=made)
                yield -1, made, made, columns[out], value.bytes
                yield -1, made, where[-1], columns[out], -value.bytes
        if wiring.is_whole(value):
            yield -1, made, made, columns["whole"], value.bytes
            yield -1, made, readers[-1], columns["whole"], -value.bytes


def _residuals(wiring: Wiring, saves: Mapping[str, Sequence[str]], columns: Columns) -> Iterable[Term]:
    """Saved values that are made inside; and how many are not, but received.

    What cheap ops make is made in every stage, and the batch is held anyway.
    """
    savers: dict[str, list[int]] = {}
    for name, values in saves.items():
        for value in values:
            savers.setdefault(value, []).append(wiring.position[name])
    for value, positions in savers.items():
        if value not in wiring.graph.producer:
            continue
        made, size = wiring.made_at(value), wiring.graph.value[value].bytes
        if made < 0:
            yield from first_use_terms(sorted(positions), columns["residuals"], size)
        else:
            yield -1, made, min(positions), columns["residuals"], size
            yield from first_use_terms(sorted(positions), columns["kept"], 1, after=made)

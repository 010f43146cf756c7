"""Sums over an interval of ops in which every thing counts once, however many ops use it.

The bytes of the parameters that ops i..j-1 read, of the values that they save, of the values that cross
into them: each is a sum over distinct things. It is written as terms that hold for some starts: a term
adds its weight to every interval [i, j) with `after` < i <= `until` and j > `at`. For a parameter used at
positions 3 and 8 that is one term (-1, 3, 3) and one term (3, 8, 8): an interval that starts at or before 3
finds it at 3, one that starts at 4 to 8 finds it at 8. A row, all intervals with one start, is then one
cumulative sum.

    end j      1  2  3  4  5  6  7  8  9 10
    start 0    .  .  .  A  A  A  A  A  A  A      A: term (-1, 3, 3).  B: term (3, 8, 8).
          3             A  A  A  A  A  A  A
          4                .  .  .  .  B  B      An interval is in one of these rectangles at most: the
          8                            B  B      parameter counts once.

A term is the rectangle of all intervals in which the thing counts, with its left edge at `at` + 1. A negative
weight takes away again: a value leaves an interval as soon as that also holds its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .tensors import Array, Readers

# The terms from which the bytes of an interval of ops are summed.

Term = tuple[int, int, int, int, float]
"""(after, until, at, column, weight)"""


def first_use_terms(
    positions: Sequence[int], column: int, weight: float, *, after: int = -1
) -> Iterable[Term]:
    """Terms of a thing that counts once where any of `positions` (ascending) is in an interval.

    after: it counts only in intervals that start later than this.
    """
    previous = -1
    for position in positions:
        if position > after:
            yield max(previous, after), position, position, column, weight
        previous = position


class IntervalSums:
    """Several such sums, one per column.

    >>> sums = IntervalSums(3, 1, first_use_terms([0, 2], column=0, weight=5.0))
    >>> sums.row(0, 3).tolist(), sums.row(1, 3).tolist()
    ([[5.0, 5.0, 5.0]], [[0.0, 5.0]])
    """

    def __init__(self, positions: int, columns: int, terms: Iterable[Term]) -> None:
        self.columns = columns
        table = np.array(sorted(terms, key=lambda t: t[2]), dtype=np.float64).reshape(-1, 5)
        self.after = table[:, 0].astype(np.int64)
        self.until = table[:, 1].astype(np.int64)
        self.at = table[:, 2].astype(np.int64)
        self.column = table[:, 3].astype(np.int64)
        self.weight = table[:, 4]
        self.begin = np.searchsorted(self.at, np.arange(positions + 1))

    def row(self, start: int, stop: int) -> Array:
        """Sums of [start, start+1), [start, start+2), ... [start, stop): columns x (stop - start)."""
        window = slice(self.begin[start], self.begin[stop])
        valid = (self.after[window] < start) & (start <= self.until[window])
        width = stop - start
        # Write each weight where it begins to count, and let the sum along the ends do the rest.
        cell = self.column[window][valid] * width + self.at[window][valid] - start
        sums = np.bincount(cell, self.weight[window][valid], minlength=self.columns * width)
        return np.cumsum(sums.reshape(self.columns, width), axis=1, dtype=np.float64)


Columns = Mapping[str, int]


def interval_terms(
    readers: Readers,
    saves: Mapping[str, Sequence[str]],
    columns: Columns,
    clones: Sequence[Mapping[str, float]],
) -> Iterable[Term]:
    """All terms of a graph.

    saves: op -> values it keeps for its backward.  columns: name of a sum -> its column.
    clones: per distinct profile the seconds of each op; what cheap ops take in each stage goes into
        columns of their own after the named ones.
    """
    yield from _state(readers, columns)
    yield from _crossings(readers, columns)
    yield from _residuals(readers, saves, columns)
    for name, users in readers.cheap_readers.items():
        for kind, seconds in enumerate(clones):
            yield from first_use_terms(users, len(columns) + kind, seconds[name])


def _state(readers: Readers, columns: Columns) -> Iterable[Term]:
    """Parameters and buffers; what no op reads is held by the stage that starts at 0."""
    for parameter in readers.graph.parameters:
        users = readers.state_readers[parameter.name] or (0,)
        yield from first_use_terms(users, columns["parameters"], parameter.kept_bytes)
        if parameter.trainable:
            update = parameter.update
            yield from first_use_terms(users, columns["gradients"], parameter.gradient_bytes)
            yield from first_use_terms(users, columns["state"], update.state)
            yield from first_use_terms(users, columns["together"], update.step if update.together else 0)
    for buffer in readers.graph.buffers:
        yield from first_use_terms(
            readers.state_readers[buffer.name] or (0,), columns["buffers"], buffer.bytes
        )


def _crossings(readers: Readers, columns: Columns) -> Iterable[Term]:
    """Values that cross in (at the first reader inside), and out (from the producer to the last reader)."""
    for name, value in readers.graph.value.items():
        producer, readings = readers.produced_at(name), readers.value_readers(name)
        if producer < 0 or not readings:
            continue
        back = readers.grad_readers(name)
        for into, out, where in (("received", "sent", readings), ("received_grads", "sent_grads", back)):
            if where:
                yield from first_use_terms(where, columns[into], value.bytes, after=producer)
                yield -1, producer, producer, columns[out], value.bytes
                yield -1, producer, where[-1], columns[out], -value.bytes
        if readers.is_whole(value):
            yield -1, producer, producer, columns["whole"], value.bytes
            yield -1, producer, readings[-1], columns["whole"], -value.bytes


def _residuals(readers: Readers, saves: Mapping[str, Sequence[str]], columns: Columns) -> Iterable[Term]:
    """Saved values that are made inside; and how many are not, but received.

    What cheap ops make is made in every stage, and the batch is held anyway.
    """
    savers: dict[str, list[int]] = {}
    for name, values in saves.items():
        for value in values:
            savers.setdefault(value, []).append(readers.position[name])
    for value, positions in savers.items():
        if value not in readers.graph.producer:
            continue
        producer, size = readers.produced_at(value), readers.graph.value[value].bytes
        if producer < 0:
            yield from first_use_terms(sorted(positions), columns["residuals"], size)
        else:
            yield -1, producer, min(positions), columns["residuals"], size
            yield from first_use_terms(sorted(positions), columns["saved_inputs"], 1, after=producer)

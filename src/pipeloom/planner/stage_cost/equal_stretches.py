"""Equal stretches of the op order: blocks that a model repeats are weighed once.

Each op gets a token, which stands for its seconds and all that its row in the tables of sums and of liveness
says, told from where the op is: how far back a value was made, how far ahead it is read last. What is further
away than the stretch is long is outside of it, however far. So two stretches with the same row of tokens
weigh the same.

A row of tokens is known by a hash, made of those of its two ends:

    hash(start, end) = h[end] - h[start] x base^(end - start)      modulo a prime

    h[end] = t[0] x base^(end - 1) + ... + t[end - 1]: what stands in front of `start` is in it with the power
    that h[start] lacks, which is what the product takes away. So any of n^2 stretches is hashed in two steps.

Two different stretches with one hash would be weighed as one, and nobody would notice: hence 61 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from .interval_sums import IntervalSums
from .tensors import RaggedArray, Tensors

REACHES = (128, 1024)
"""Longest stretches that are told apart by tokens; each longer one is itself."""

PRIME, BASE = (1 << 61) - 1, 1_000_003


class EqualStretches:
    def __init__(self, tensors: Tensors, sums: IntervalSums, seconds: Sequence[Hashable]) -> None:
        """seconds: of each op."""
        self.tensors, self.sums, self.seconds = tensors, sums, seconds
        self.count = len(tensors.fixed)
        self._hashes: dict[int, list[int]] = {}
        self._powers = list(accumulate(range(self.count), lambda power, _: power * BASE % PRIME, initial=1))

    def key(self, start: int, end: int) -> Hashable:
        """The same for stretches [start, end) that weigh the same."""
        length = end - start
        reach = next((reach for reach in REACHES if length <= reach), None)
        if reach is None or self.count <= REACHES[0]:
            return start, end
        if reach not in self._hashes:
            number: dict[Hashable, int] = {}
            numbers = (number.setdefault(token, len(number) + 1) for token in self._tokens(reach))
            self._hashes[reach] = list(accumulate(numbers, lambda h, n: (h * BASE + n) % PRIME, initial=0))
        hashes = self._hashes[reach]
        return length, (hashes[end] - hashes[start] * self._powers[length]) % PRIME

    def _tokens(self, reach: int) -> Iterator[Hashable]:
        """Of each op. reach: distances from which on it does not matter how large they are."""
        f, b, sums = self.tensors.forward, self.tensors.backward, self.sums
        storages = _first_places((f.makes, f.reads, f.saves), len(f.size))
        gradients = _first_places((b.outs, b.gives), len(b.grad_size))
        last, grad_last = f.last, b.grad_last
        made, grad_made = f.made, b.grad_made

        # A token has distances to the op, and no positions: a block must look the same wherever it stands.
        # Distances beyond the reach lead out of every stretch that is compared, so all count as one.
        def near(distance: int) -> int:
            return max(-reach, min(int(distance), reach))

        def names(op: int, things: RaggedArray, first: Mapping[int, tuple[int, int]]) -> Iterator[Hashable]:
            """What each thing is called, seen from the op."""
            for thing in things[op].tolist():
                place, number = first[thing]
                far = op - place >= reach
                size = f.size[thing] if first is storages else b.grad_size[thing]
                origin, end = (made, last) if first is storages else (grad_made, grad_last)
                known = near(op - origin[thing]) if origin[thing] >= 0 else int(origin[thing])
                called = (-1, thing) if far else (op - place, number)
                yield float(size), known, near(end[thing] - op), called

        for op in range(self.count):
            low, high = sums.begin[op], sums.begin[op + 1]
            terms = zip(
                sums.column[low:high].tolist(),
                sums.weight[low:high].tolist(),
                [near(op - after) if after >= 0 else reach for after in sums.after[low:high].tolist()],
                [near(op - until) for until in sums.until[low:high].tolist()],
                strict=True,
            )
            lets_go = int(b.lets_go[op])
            yield (
                self.seconds[op],
                tuple(sorted(terms)),
                *(tuple(names(op, things, storages)) for things in (f.makes, f.reads, f.saves)),
                *(tuple(names(op, things, gradients)) for things in (b.outs, b.gives)),
                tuple(b.passes[b.gives.first[op] : b.gives.first[op + 1]].tolist()),
                *(float(row[op]) for row in (f.extra, f.scratch, b.grad_scratch, b.begun)),
                op - storages[lets_go][0] if lets_go >= 0 else None,
                bool(b.one_kernel[op]),
            )


def _first_places(rows: tuple[RaggedArray, ...], count: int) -> dict[int, tuple[int, int]]:
    """Of each thing the first op that has it, and its number there."""
    first: dict[int, tuple[int, int]] = {}
    for op in range(len(rows[0].first) - 1):
        here = [thing for things in rows for thing in things[op].tolist()]
        for number, thing in enumerate(dict.fromkeys(here)):
            first.setdefault(thing, (op, number))
    missing = np.setdiff1d(np.arange(count), np.array(sorted(first), dtype=np.int64))
    return first | {int(thing): (0, -1) for thing in missing}

"""Columns: the rows of a schedule or a program as arrays, one entry per action, rank after rank.

All passes work on columns; actions as objects are made from them only where somebody looks at one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from .action import (
    ARROWS,
    COPYING,
    KINDS,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STAGE_WIDE,
    STEP,
    TRANSFERS,
    TREATMENTS,
    Action,
    B,
    F,
    I,
    Kind,
    W,
)


def starts_of(counts: Sequence[int] | Ints) -> Ints:
    """Where the part of each begins, if they have so many each; and the end of the last.

    >>> starts_of([2, 0, 1]).tolist()
    [0, 2, 2, 3]
    """
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


CODED = (F, B, I, W, *(kind for kind, row in KINDS.items() if not row.in_schedule or kind in COPYING))
"""Kinds with the same code in all columns, their index here, so that kernels can name them. Any others follow
in `Columns.kinds`."""

CODE = {kind: code for code, kind in enumerate(CODED)}
F_, B_, I_, W_ = (CODE[kind] for kind in (F, B, I, W))
SEND_F_, RECV_F_, SEND_B_, RECV_B_ = (CODE[kind] for kind in (SEND_F, RECV_F, SEND_B, RECV_B))
REDUCE_, STEP_ = CODE[REDUCE], CODE[STEP]
OFFLOAD_, AWAIT_, RELOAD_, RECOMPUTE_ = (CODE[kind] for kind in TREATMENTS)

_TRANSFER = tuple(CODE[kind] for kind in TRANSFERS)
_STAGE_WIDE = tuple(CODE[kind] for kind in STAGE_WIDE)
TREATING = tuple(CODE[kind] for kind in TREATMENTS)
"""Codes of what a memory policy asks for."""

Codes: TypeAlias = NDArray[np.int16]
Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """One entry per action; those of rank r are entries `offsets[r]` up to `offsets[r + 1]`.

    kind: index into `kinds`.  microbatch: of REDUCE and STEP the update, -1 for the only one.
    peer: stage at the other end of a transfer, -1 for anything else.
    """

    kind: Codes
    stage: Ints
    microbatch: Ints
    peer: Ints
    offsets: Longs
    kinds: tuple[Kind, ...] = CODED

    @property
    def ranks(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def is_transfer(self) -> Bools:
        return self.among(_TRANSFER)

    @cached_property
    def is_compute(self) -> Bools:
        """Neither a transfer nor REDUCE nor STEP."""
        return ~self.among((*_TRANSFER, *_STAGE_WIDE))

    @cached_property
    def trains(self) -> bool:
        return bool(self.among((B_, I_, W_)).any())

    @cached_property
    def splits(self) -> bool:
        return bool((self.kind == W_).any())

    @cached_property
    def copies(self) -> bool:
        return bool(self.among((OFFLOAD_, AWAIT_, RELOAD_)).any())

    @cached_property
    def treats_residuals(self) -> bool:
        return bool(self.among(TREATING).any())

    def among(self, codes: Iterable[int]) -> Bools:
        """Which entries have one of some codes. Neighbouring codes are compared as a range: looking each one
        up in a table takes three times as long."""
        has: Bools = np.zeros(len(self.kind), np.bool_)
        for _, run in groupby(enumerate(sorted(codes)), key=lambda pair: pair[1] - pair[0]):
            low, *_, high = [code for _, code in run] * 2
            has |= (self.kind >= low) & (self.kind <= high) if high > low else self.kind == low
        return has

    def rank_of(self, entry: int) -> int:
        return int(np.searchsorted(self.offsets, entry, side="right")) - 1

    def at(self, entry: int) -> Action:
        return next(self._objects(entry, entry + 1))

    def row(self, rank: int) -> tuple[Action, ...]:
        return tuple(self._objects(int(self.offsets[rank]), int(self.offsets[rank + 1])))

    def _objects(self, low: int, high: int) -> Iterator[Action]:
        columns = (self.kind, self.stage, self.microbatch, self.peer)
        for code, stage, microbatch, peer in zip(*(c[low:high].tolist() for c in columns), strict=True):
            yield Action(stage, self.kinds[code], microbatch, peer)

    def texts(self, entries: Longs | None = None) -> list[str]:
        """Some entries, or all of them, as text: many at a time, without an object for each."""
        columns = (self.kind, self.stage, self.microbatch, self.peer)
        chosen = columns if entries is None else tuple(column[entries] for column in columns)
        # Kind -> what stands around the micro-batch, and whether a peer follows.
        arrows = [ARROWS.get(kind) for kind in self.kinds]
        kind, stage, microbatch, _ = chosen
        if (microbatch >= 0).all() and not any(arrows[code] for code in np.unique(kind).tolist()):
            # Schedules have millions of these: a stage with its kind, and a number, that many share.
            keys, front = np.unique(stage.astype(np.int64) * len(self.kinds) + kind, return_inverse=True)
            numbers, number = np.unique(microbatch, return_inverse=True)
            fronts = [f"{key // len(self.kinds)}{self.kinds[key % len(self.kinds)]}" for key in keys.tolist()]
            ends = list(map(str, numbers.tolist()))
            return [fronts[i] + ends[j] for i, j in zip(front.tolist(), number.tolist(), strict=True)]
        return [
            f"{stage}{self.kinds[code]}{microbatch}{arrows[code]}{peer}"
            if arrows[code]
            else f"{stage}{self.kinds[code]}"
            if code in _STAGE_WIDE and microbatch < 0
            else f"{stage}{self.kinds[code]}{microbatch}"
            for code, stage, microbatch, peer in zip(*(c.tolist() for c in chosen), strict=True)
        ]

    def row_texts(self, rank: int) -> list[str]:
        """The entries of one rank as text.

        >>> columns_of([[Action(0, F, 0), Action(1, B, 12)]]).row_texts(0)
        ['0F0', '1B12']
        """
        return self.texts(np.arange(self.offsets[rank], self.offsets[rank + 1]))

    def _taken(self, entries: Bools | Longs, offsets: Longs) -> Columns:
        return Columns(
            kind=self.kind[entries],
            stage=self.stage[entries],
            microbatch=self.microbatch[entries],
            peer=self.peer[entries],
            offsets=offsets,
            kinds=self.kinds,
        )

    def where(self, keep: Bools) -> Columns:
        low, high = self.offsets[:-1].tolist(), self.offsets[1:].tolist()
        counts = [np.count_nonzero(keep[a:b]) for a, b in zip(low, high, strict=True)]
        return self._taken(keep, np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))

    def insert(self, at: Longs, kind: Longs, stage: Longs, microbatch: Longs) -> Columns:
        """With further entries, none of them a transfer. at: each stands in front of that entry, in the same
        row as the entry before it; several at one place keep their order.

        >>> columns = columns_of([[Action(0, F, 0), Action(0, B, 0)], [Action(1, F, 0)]])
        >>> one = np.array([1])
        >>> print(columns.insert(np.array([2]), CODE[W] * one, 0 * one, one).row(0)[-1])
        0W1
        """
        added = np.bincount(np.searchsorted(self.offsets, at), minlength=self.ranks + 1)
        return Columns(
            kind=np.insert(self.kind, at, kind.astype(np.int16)),
            stage=np.insert(self.stage, at, stage.astype(np.int32)),
            microbatch=np.insert(self.microbatch, at, microbatch.astype(np.int32)),
            peer=np.insert(self.peer, at, -1),
            offsets=self.offsets + np.cumsum(added)[: self.ranks + 1],
            kinds=self.kinds,
        )

    def split_backward(self) -> Columns:
        """Every B as I and, right after it, W: the gradient leaves earlier, and memory stays that of B."""
        whole = self.kind == B_
        source = np.repeat(np.arange(len(self)), 1 + whole)
        before = np.concatenate(([0], np.cumsum(1 + whole)))
        split = self._taken(source, before[self.offsets])
        split.kind[before[:-1][whole]] = I_
        split.kind[before[:-1][whole] + 1] = W_
        return split

    def same(self, other: Columns) -> bool:
        if not np.array_equal(self.offsets, other.offsets):
            return False
        names = ("kind", "stage", "microbatch", "peer")
        if self.kinds == other.kinds:
            return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)
        return all(self.row(rank) == other.row(rank) for rank in range(self.ranks))


def compute_columns(
    kind: NDArray[Any], stage: NDArray[Any], microbatch: NDArray[Any], offsets: NDArray[Any]
) -> Columns:
    """Columns of compute actions of built-in kinds."""
    return Columns(
        kind=kind.astype(np.int16, copy=False),
        stage=stage.astype(np.int32, copy=False),
        microbatch=microbatch.astype(np.int32, copy=False),
        peer=np.full(len(kind), -1, np.int32),
        offsets=offsets.astype(np.int64, copy=False),
    )


def columns_of(rows: Iterable[Iterable[Action]]) -> Columns:
    """The columns of rows of objects.

    A number that no column holds becomes the nearest one that it does: the checks refuse either.
    """
    if isinstance(rows, Rows):
        return rows.columns
    kinds = list(CODED)
    codes = dict(CODE)
    table: list[tuple[int, int, int, int]] = []
    offsets = [0]
    for row in rows:
        for step in row:
            if step.kind not in codes:
                codes[step.kind] = len(kinds)
                kinds.append(step.kind)
            table.append((codes[step.kind], _held(step.stage), _held(step.microbatch), _held(step.peer)))
        offsets.append(len(table))
    kind, stage, microbatches, peers = np.array(table, np.int64).reshape(-1, 4).T
    made = compute_columns(kind, stage, microbatches, np.array(offsets))
    return replace(made, peer=peers.astype(np.int32), kinds=tuple(kinds))


def _held(number: int) -> int:
    return max(-_MOST, min(number, _MOST))


class Rows(Sequence[tuple[Action, ...]]):
    """Columns that look like a tuple of tuples of actions; each row is made when it is first asked for.

    >>> rows = Rows(columns_of([[Action(0, F, 0), Action(0, B, 0)]]))
    >>> rows == ((Action(0, F, 0), Action(0, B, 0)),)
    True
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._made: dict[int, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return self.columns.ranks

    @overload
    def __getitem__(self, rank: int) -> tuple[Action, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Action, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        place = range(len(self))[rank]
        if isinstance(place, range):
            return tuple(self[r] for r in place)
        if place not in self._made:
            self._made[place] = self.columns.row(place)
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            return self.columns is other.columns or self.columns.same(other.columns)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self)) if len(self.columns) <= 1000 else f"<{len(self.columns)} actions>"

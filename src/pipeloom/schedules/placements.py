"""Placements: which rank runs which stage of a chain."""

from __future__ import annotations


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod p.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def wave(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """There and back, `chunks` times in all; two are a V. Neighbours at a turn share a rank.

    >>> wave(3)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(ranks))
    return tuple(r for c in range(chunks) for r in (there if c % 2 == 0 else there[::-1]))


def both_ways(ranks: int) -> tuple[int, ...]:
    """Two replicas of a chain in opposite directions, for `replicate(chain, 2)`.

    >>> both_ways(2)
    (0, 1, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))

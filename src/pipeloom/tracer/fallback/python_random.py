"""Python's and NumPy's global random numbers, which torch's seeds do not reach.

A forward that draws from them, as for leaving out layers at random, must draw the same on every stage.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def seed_python(seed: int, place: str) -> None:
    """Make what is drawn next depend on the seed and the place only."""
    value = zlib.crc32(place.encode(), seed)
    random.seed(value)
    np.random.seed(value)


def python_state() -> tuple[object, ...]:
    """What changes with every draw."""
    kind, keys, position, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, *rest


@contextmanager
def python_random_kept() -> Iterator[None]:
    """The generators are afterwards where they were before."""
    own, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)

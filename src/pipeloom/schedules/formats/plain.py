"""Files of nothing but F, B, I and W, as large schedules are: read as columns, without an object per action.

Whatever is not as plain as that, or not a schedule, is left to the reader that looks at every cell.
"""

from __future__ import annotations

import re

import numpy as np

from ...ir.action import B, F, I, W
from ...ir.columns import CODE, Columns, Rows, compute_columns
from ...ir.schedule import Schedule

_KINDS = (F, B, I, W)
_ROW = re.compile("[0-9]{1,9}[FBIW][0-9]{1,9}(?:,[0-9]{1,9}[FBIW][0-9]{1,9})*")
_TO_BLANKS = str.maketrans(dict.fromkeys("FBIW,", " "))

_CODES = np.zeros(256, np.int16)
for _kind in _KINDS:
    _CODES[ord(_kind)] = CODE[_kind]


def parse_plain(text: str, *, name: str) -> Schedule | None:
    """The schedule of a text of plain rows, cells separated by commas; None if it is another text.

    >>> str(parse_plain("0F0,0B0\\n1F0,1B0\\n", name=""))
    '0F0 0B0\\n1F0 1B0'
    >>> parse_plain("0F0,,0B0", name=""), parse_plain("1F0,1B0", name="")
    (None, None)
    """
    lines = text.removesuffix("\n").split("\n")
    if not all(map(_ROW.fullmatch, lines)):
        return None
    numbers = [np.fromstring(line.translate(_TO_BLANKS), np.int32, sep=" ").reshape(-1, 2) for line in lines]
    letters = np.frombuffer(text.encode("ascii"), np.uint8)
    stage, microbatch = np.concatenate(numbers).T
    counts = [len(row) for row in numbers]
    columns = compute_columns(
        _CODES[letters[letters >= ord("A")]],
        np.ascontiguousarray(stage),
        np.ascontiguousarray(microbatch),
        np.concatenate(([0], np.cumsum(counts))),
    )
    placement = _placement(columns, counts)
    if placement is None:
        return None
    return Schedule(
        name=name,
        microbatches=1 + int(columns.microbatch.max()),
        placement=placement,
        rows=Rows(columns),
    )


def _placement(columns: Columns, counts: list[int]) -> tuple[int, ...] | None:
    """The rank of each stage; None unless each of them, from 0 without gaps, is in one row."""
    ranks = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    pairs = np.unique(columns.stage * np.int64(len(counts)) + ranks)
    stages, homes = pairs // len(counts), pairs % len(counts)
    if not np.array_equal(stages, np.arange(len(stages))):
        return None
    return tuple(homes.tolist())

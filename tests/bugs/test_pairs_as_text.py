"""An action that stood more than once, and once in a pair, printed as `0F0&0F0&`, which cannot be read."""

import pytest

from pipeloom.ir.schedule import Schedule, parse_pairs, parse_rows


@pytest.mark.parametrize("line", ["0F0&0F0", "0F0 0F0&0B0", "0F0&0B0 0F0", "0F0&0F0 0F0&0F0"])
def test_what_prints_also_parses(line: str) -> None:
    pairs = parse_pairs((line,))
    made = Schedule(name="text", microbatches=1, placement=(0,), rows=parse_rows((line,)), pairs=pairs)
    assert str(made) == line

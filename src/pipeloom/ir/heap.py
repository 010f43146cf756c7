"""A heap in arrays, for kernels: numbers by time, and of equal times the lowest first.

`heapq` would need lists, whose references numba would count in every kernel (docs/decisions.md, 9).
"""

from __future__ import annotations

from .columns import Floats, Longs
from .kernels import kernel


@kernel
def push(times: Floats, numbers: Longs, size: Longs, time: float, number: int) -> None:
    """Add a number. size: its first entry is how many the heap has."""
    at = size[0]
    size[0] += 1
    while at > 0:
        up = (at - 1) >> 1
        if times[up] < time or (times[up] == time and numbers[up] <= number):
            break
        times[at], numbers[at] = times[up], numbers[up]
        at = up
    times[at], numbers[at] = time, number


@kernel
def pop(times: Floats, numbers: Longs, size: Longs) -> int:
    """Take the first number."""
    first: int = numbers[0]
    size[0] -= 1
    count = size[0]
    time, number = times[count], numbers[count]
    at, down = 0, 1
    while down < count:
        if down + 1 < count and (
            times[down + 1] < times[down]
            or (times[down + 1] == times[down] and numbers[down + 1] < numbers[down])
        ):
            down += 1
        if time < times[down] or (time == times[down] and number <= numbers[down]):
            break
        times[at], numbers[at] = times[down], numbers[down]
        at, down = down, 2 * down + 1
    times[at], numbers[at] = time, number
    return first

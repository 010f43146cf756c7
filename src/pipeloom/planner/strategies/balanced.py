"""balanced: stages of about equal compute time, memory and transfers ignored."""

from __future__ import annotations

import numpy as np

from ..search.cut_search import Search
from ..search.problem import Cuts


def balanced(search: Search) -> Cuts:
    """Cut after the op at which the running time is nearest to 1/S, 2/S, ... of the whole."""
    prefix, points = search.model.prefix_s[0], search.model.cut_points
    stages = len(search.caps)
    chosen = [0]
    for stage in range(1, stages):
        target = prefix[-1] * stage / stages
        first, last = chosen[-1] + 1, len(points) - 1 - (stages - stage)
        chosen.append(first + int(np.argmin(np.abs(prefix[points[first : last + 1]] - target))))
    return (*(int(points[index]) for index in chosen), int(points[-1]))

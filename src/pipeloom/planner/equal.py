"""equal: stages of about equal compute time, memory and transfers ignored; the simple baseline."""

from __future__ import annotations

import numpy as np

from .search import Search


def equal(search: Search) -> tuple[int, ...]:
    """Cut after the op at which the running time is nearest to 1/S, 2/S, ... of the whole."""
    prefix = search.model.prefix_s[0]
    ops, stages = len(search.model), len(search.caps)
    cuts = [0]
    for stage in range(1, stages):
        target = prefix[-1] * stage / stages
        first, last = cuts[-1] + 1, ops - (stages - stage)
        cuts.append(first + int(np.argmin(np.abs(prefix[first : last + 1] - target))))
    return (*cuts, ops)

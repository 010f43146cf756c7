"""The CPU cores of this machine, as far as this process may use them."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

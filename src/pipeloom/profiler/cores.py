"""The CPU cores of this machine, as far as this process may use them."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux says how much of a period, both in microseconds, a container may compute."""


def usable_cores() -> int:
    """CPU cores that this process may run on; in a container no more than its quota is worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # no cgroups, or "max": no quota
        return cores
    return max(1, min(cores, quota_us // period_us))

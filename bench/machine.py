"""What machine a figure was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions and date, to stand beside every figure."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }

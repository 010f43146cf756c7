"""What torch.distributed has recorded of its transfers and collectives, in a file per rank.

PyTorch keeps the last ones (2,000, or `TORCH_FR_BUFFER_SIZE`) with their shapes, states and the lines of code
that asked for them: NCCL's of all, gloo's of collectives. `pickle.load` reads a file.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path
from torch._C import _distributed_c10d

PLACE = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment: what the files' names begin with; PyTorch uses it too."""


def write_recorded(rank: int) -> Path | None:
    """The file; None if nothing was recorded, or it cannot be written."""
    names = ("_dump_nccl_trace", "_dump_fr_trace")  # the first is there where NCCL is
    dump: Callable[[], bytes] = next(
        getattr(_distributed_c10d, n) for n in names if hasattr(_distributed_c10d, n)
    )
    record = dump()
    if not pickle.loads(record)["entries"]:
        return None
    run = os.environ.get("MASTER_PORT", "0")
    place = os.environ.get(PLACE, str(user_cache_path("pipeloom") / "hangs" / run / "rank_"))
    file = Path(f"{place}{rank}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(record)
    except OSError:
        return None
    return file

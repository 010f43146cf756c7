"""Op times that were measured on this machine today: planning a model again needs not measure again."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .ir import json_codec
from .ir.errors import ConfigError
from .ir.profile import Profile, batch_text
from .kept import age_s, cache_folder, forget_old, keep, machine_name

if TYPE_CHECKING:
    from .tracer.captured import Captured

VARIABLE = "PIPELOOM_KEEP_PROFILES"
"""Environment: 0 measures each time, and keeps nothing."""

OLD_S = 3600.0
"""Times that are older than this are mentioned: the machine may have had other work then."""

SPEED_VARIABLES = ("ATEN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
"""What names of environment variables begin with that choose kernels or how they run."""

_log = logging.getLogger("pipeloom")


def kept_profile(captured: Captured, measure: Callable[[Captured], Profile]) -> Profile:
    """The times of a captured model's ops on this machine's CPU: those of the last day, or measured now.

    They are those of the same ops, with the same arguments and layouts, on the same machine, with the same
    version and settings of PyTorch. Measured each time is a model that is cut between its modules, and one
    with ops that are not PyTorch's own: what these compute may change under the same name.

    measure: measures them, with one thread.
    """
    if not may_keep(captured):
        return measure(captured)
    path = cache_folder("profiles") / f"{times_key(captured)}.json"
    if (known := _read(path, captured)) is not None:
        return known
    found = measure(captured)
    forget_old(path.parent)
    keep(path, json_codec.to_json(found, indent=0) + "\n", what="a profile")
    return found


def may_keep(captured: Captured) -> bool:
    """Whether what was measured of a model's ops holds when it is planned again."""
    own = not captured.graph.fallback and all(op.target.startswith("aten.") for op in captured.graph.ops)
    return own and os.environ.get(VARIABLE) != "0"


def times_key(captured: Captured, *more: str) -> str:
    """What the times hold for. more: that they depend on, besides."""
    import torch

    from .profiler.measure_ops import op_signatures

    set_there = sorted(item for item in os.environ.items() if item[0].startswith(SPEED_VARIABLES))
    parts = [
        machine_name(),
        __version__,
        str(captured.autocast),
        torch.get_float32_matmul_precision(),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.backends.mkldnn.enabled),
        repr(set_there),
        captured.graph.fingerprint,
        *(repr(signature) for signature in op_signatures(captured).items()),
        *more,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(path: Path, captured: Captured) -> Profile | None:
    """None where nothing was measured, it is too old, or the file is damaged: then it is measured again."""
    age = age_s(path)
    if age is None:
        return None
    try:
        known = json_codec.from_json(path.read_bytes(), Profile, what=str(path))
    except (OSError, ConfigError):
        return None
    times = [t for c in known.costs.values() for t in (c.forward_s, c.input_grad_s, c.weight_grad_s)]
    whole = known.costs.keys() == {op.name for op in captured.graph.ops} and min(times, default=0.0) >= 0.0
    expected = ("measured", captured.graph.fingerprint, batch_text(captured.graph.inputs))
    if not whole or (known.source, known.graph, known.batch) != expected:
        return None
    if age > OLD_S:
        _log.warning(
            "%s is planned with op times that were measured %.0f h ago; %s=0 measures them again",
            captured.graph.name,
            age / 3600,
            VARIABLE,
        )
    return known

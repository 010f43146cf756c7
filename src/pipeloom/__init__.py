"""pipeloom: trains an unmodified PyTorch model across devices that are each too small for it.

The public names below are loaded on first use (PEP 562): `import pipeloom` imports no torch, so planning,
simulating and drawing start fast and run where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.verify import verify
    from .api.options import Options
    from .api.passes import capture, plan, profile, simulate
    from .api.pipeline import Pipeline
    from .ir.cluster import Cluster, Device, Link
    from .ir.errors import PipeloomError
    from .ir.plan import Plan, load_plan
    from .tracer.job import Job

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Device",
    "Job",
    "Link",
    "Options",
    "Pipeline",
    "PipeloomError",
    "Plan",
    "__version__",
    "capture",
    "load_plan",
    "plan",
    "profile",
    "simulate",
    "verify",
]

_HOME = {
    "Cluster": "ir.cluster",
    "Device": "ir.cluster",
    "Job": "tracer.job",
    "Link": "ir.cluster",
    "Options": "api.options",
    "Pipeline": "api.pipeline",
    "PipeloomError": "ir.errors",
    "Plan": "ir.plan",
    "capture": "api.passes",
    "load_plan": "ir.plan",
    "plan": "api.passes",
    "profile": "api.passes",
    "simulate": "api.passes",
    "verify": "api.compare",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Planners: OpGraph x Profile x Cluster -> Plan. One strategy per file, one cost and memory model."""

from ..clusters.files import load_cluster, save_cluster
from ..clusters.names import cpu_cluster, find_cluster
from .plan_table import explain, limits
from .make_plan import make_plan
from .registry import names
from .request import PlanOptions

__all__ = [
    "PlanOptions",
    "cpu_cluster",
    "explain",
    "find_cluster",
    "limits",
    "load_cluster",
    "make_plan",
    "names",
    "save_cluster",
]

"""Planners: OpGraph x Profile x Cluster -> Plan. One strategy per file, one cost and memory model."""

from .clusters import cpu_cluster, load_cluster
from .make import PlanOptions, explain, make_plan
from .registry import names

__all__ = ["PlanOptions", "cpu_cluster", "explain", "load_cluster", "make_plan", "names"]

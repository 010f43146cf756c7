"""Schedules: (stage graph, placement, micro-batches) -> the order in which each rank computes."""

from .registry import build, in_flight, names, register

__all__ = ["build", "in_flight", "names", "register"]

"""Simulator: Program x costs x Cluster -> the Timeline that the runtime should measure."""

from .simulate import simulate
from .idle_time.explain import explain
from .summary import RankSummary, Summary, describe, summarise

__all__ = ["RankSummary", "Summary", "describe", "explain", "simulate", "summarise"]

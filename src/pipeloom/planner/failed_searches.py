"""Searches that need not be made, as others that had more found nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import ge, le

from .search.cut_search import Search


@dataclass
class FailedSearches:
    """The searches of one planner, in one model, that found no cut: one with no more memory, no fewer
    micro-batches in flight and no other ways to free memory need not be made."""

    searches: list[Search] = field(default_factory=list)

    def covers(self, search: Search) -> bool:
        """Whether another that failed had at least what this one has."""
        return any(
            set(search.treatments) <= set(other.treatments)
            and all(map(le, search.caps, other.caps))
            and all(map(ge, search.in_flight, other.in_flight))
            for other in self.searches
        )

"""Who is told of a search while it goes on."""

from __future__ import annotations

from typing import Protocol


class SearchWatch(Protocol):
    """Both are called often, in the thread that searches."""

    def weighed(self, count: int) -> None:
        """So many stages were weighed so far."""
        ...

    def tried(self, schedule: str, number: int, of: int, best: tuple[str, float] | None) -> None:
        """A schedule is going to be planned with, the `number`th of `of` ways. best: the schedule of the best
        plan so far, and its step in seconds."""
        ...

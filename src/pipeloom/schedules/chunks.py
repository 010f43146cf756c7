"""How many stages each rank has, as an option of a schedule's name."""

from __future__ import annotations

from ..ir.errors import ScheduleError
from .aliases import CHUNKS
from .language.user_files import split_options
from .registry import entry, named_chunks


def with_chunks(name: str, chunks: int | None) -> str:
    """The name of a schedule with so many stages on each rank; None leaves it as it is.

    Raises: ScheduleError if the name gives another number, or the schedule has no choice.

    >>> with_chunks("gis", 4), with_chunks("gis_g:group=3", 4), with_chunks("1f1b", 1)
    ('gis:v=4', 'gis_g:group=3,v=4', '1f1b')
    """
    if chunks is None:
        return name
    place = entry(name).place
    if chunks < 1:
        raise ScheduleError(f"chunks is {chunks}", hint="give each rank 1 stage or more")
    named = named_chunks(name, place)
    if named not in (0, chunks):
        raise ScheduleError(
            f"{name} is to have {chunks} stages per rank", hint="leave out one of the two numbers"
        )
    if named == chunks or (chunks == 1 and place in ("line", "both ways")):
        return name
    longer = f"{name}{',' if split_options(name)[1] else ':'}{CHUNKS}={chunks}"
    named_chunks(longer, place)
    return longer

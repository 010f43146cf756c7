"""Names of schedules: what is built, under whatever name, and with which options.

Interleaved:v=4                 a schedule of the library, or a user's, and behind a colon its options
mine.py:zigzag:group=2          a function in a user's file, which takes a `Shape` and returns a `Recipe` or
                                several; or an `Entry`, which also says where the stages go
found.csv                       a file that lists every action; or .txt, with a row of actions per rank
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from math import isfinite, nan
from pathlib import Path
from types import ModuleType
from typing import Any

from ...ir.errors import ConfigError, ScheduleError
from ...ir.operation import Operation
from ...ir.user_code import load_user_file

ALIASES: dict[str, tuple[str, ...]] = {
    "gpipe": ("ScheduleGPipe", "fill_drain", "f_then_b"),
    "1f1b": ("Schedule1F1B", "pipedream_flush", "dapple", "one_f_one_b", "non_interleaved"),
    "eager_1f1b": ("eager1f1b",),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "interleaved", "1f1b_interleaved", "vpp"),
    "looped_bfs": ("ScheduleLoopedBFS", "breadth_first", "interleaved_gpipe"),
    "async_1f1b": ("pipedream",),
    "zb_h1": ("zbh1", "zero_bubble_h1"),
    "zb_h2": ("zbh2", "zero_bubble_h2"),
    "zb_1p": ("zb1p",),
    "zb_2p": ("zb2p",),
    "zb_v": ("ScheduleZBVZeroBubble", "zbv", "v_zb", "zero_bubble_v"),
    "1f1b_v": ("one_f_one_b_v",),
    "dualpipe": ("dual_pipe",),
    "dualpipev": ("ScheduleDualPipeV", "dual_pipe_v"),
    "seq1f1b": ("seq_1f1b",),
}
"""Schedule -> its other names. Capitals, `-`, `_` and a "Schedule" in front make no difference."""

CHUNKS = "v"
"""The option that says how many stages a rank has, as in "interleaved:v=4"."""

OFFLOAD, LIMIT, FIT = "offload", "limit", "fit"
COPY_OPTIONS = (OFFLOAD, LIMIT, FIT)

LISTED = (".csv", ".txt")
"""How the names of files end that list every action."""


@dataclass(frozen=True, kw_only=True)
class ScheduleName:
    """A schedule's name, read. given: as written, without options.  family: the library's own name of it;
    of a file as given.  listed: the options as written."""

    given: str
    family: str
    listed: str = ""

    def __str__(self) -> str:
        options = self.listed if self.in_python else self.listed.lower()
        return f"{self.family}:{options}" if options else self.family

    @property
    def written(self) -> str:
        return f"{self.given}:{self.listed}" if self.listed else self.given

    @property
    def lists_actions(self) -> bool:
        return self.given.endswith(LISTED)

    @property
    def in_python(self) -> bool:
        return self.given.partition(":")[0].endswith(".py")

    @property
    def in_file(self) -> bool:
        return self.lists_actions or self.in_python

    @cached_property
    def options(self) -> Mapping[str, float]:
        """Raises: ScheduleError if one is no number."""
        options: dict[str, float] = {}
        for part in filter(None, self.listed.split(",")):
            key, _, value = part.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = nan
            if not isfinite(number):
                raise ScheduleError(
                    f"cannot read option {part!r} of {self.written!r}",
                    hint="write name:option=number, as in gis_g:group=3",
                )
            options[key.strip()] = number
        return options

    @property
    def family_options(self) -> dict[str, float]:
        """Those that the family reads by itself."""
        return {key: value for key, value in self.options.items() if key not in (CHUNKS, *COPY_OPTIONS)}

    @property
    def fits_caps(self) -> bool:
        """Whether it copies until residuals fit under the caps.

        >>> parse_name("po:v=4,fit=1").fits_caps, parse_name("po:v=4").fits_caps
        (True, False)
        """
        return bool(self.options.get(FIT))

    @property
    def copies(self) -> bool:
        return OFFLOAD in self.options or LIMIT in self.options or self.fits_caps

    def chunks_in(self, place: str) -> int:
        """The stages per rank that the options give to a schedule with such a place; 0 without that option.

        Raises: ScheduleError if there is no choice, or it is no whole number.
        """
        count = self.options.get(CHUNKS)
        if count is None:
            return 0
        if place not in ("loop", "wave"):
            raise ScheduleError(
                f"{self.given} has one stage on each rank, {self.written!r} gives it another number",
                hint="leave the option out, or use interleaved_1f1b, which has as many as `-v` or `:v=` says",
            )
        if count < 1 or count != int(count):
            raise ScheduleError(
                f"{self.written}: {count:g} stages per rank", hint="give a whole number from 1 on"
            )
        return int(count)

    def plain(self, ranks: int) -> str:
        """The schedule without copies that has this one's order, or one that holds less. Groups as large as
        there are ranks are those of `gis`, smaller ones of `gis_h`.

        >>> parse_name("po:v=4,offload=2").plain(4), parse_name("1f1b:limit=3").plain(4)
        ('po:v=4', '1f1b')
        >>> parse_name("gis_g:group=2,v=2,offload=1").plain(4)
        'gis_h'
        >>> parse_name("gis_g:group=4,v=2,offload=1").plain(4)
        'gis:v=2'
        """
        family, chunks = self.family, self.options.get(CHUNKS)
        if family == "gis_g":
            family = "gis" if self.options["group"] >= ranks else "gis_h"
        if chunks is None or (family, chunks) == ("gis_h", 2):
            return family
        return f"{family}:{CHUNKS}={chunks:g}"


@cache
def parse_name(name: str) -> ScheduleName:
    """Read a schedule's name; whether there is such a schedule is for the registry to say.

    >>> str(parse_name("ScheduleInterleaved1F1B:v=4")), str(parse_name("mine.py:Zigzag:group=2"))
    ('interleaved_1f1b:v=4', 'mine.py:Zigzag:group=2')
    """
    if name.endswith(LISTED):
        return ScheduleName(given=name, family=name)
    first, _, rest = name.partition(":")
    if first.endswith(".py"):
        function, _, options = rest.partition(":")
        given = f"{first}:{function}"
        return ScheduleName(given=given, family=given, listed=options)
    return ScheduleName(given=first, family=canonical(first), listed=rest)


def canonical(name: str) -> str:
    """The library's own name of a schedule; a name that is none of the aliases in small letters, with `_`.

    >>> canonical("Interleaved"), canonical("ScheduleZBVZeroBubble"), canonical("gis-g")
    ('interleaved_1f1b', 'zb_v', 'gis_g')
    """
    return _BY_ALIAS.get(_bare(name), name.lower().replace("-", "_"))


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")


_BY_ALIAS = {_bare(alias): name for name, others in ALIASES.items() for alias in (name, *others)}


_HINT = "name a function that takes a Shape and returns a Recipe, as file.py:function"


def load_user_schedule(name: ScheduleName) -> Any:
    """What `file.py:function` names: a recipe's function, or an Entry."""
    file, _, function = name.family.partition(":")
    if not function:
        raise ScheduleError(
            f"{file} is a file and not a schedule",
            hint=f"name the schedule in it, as {file}:found if a search has written it",
        )
    module = load_file(Path(file))
    schedule = getattr(module, function, None)
    if schedule is None:
        near = get_close_matches(function, [n for n in vars(module) if not n.startswith("_")], n=1)
        raise ScheduleError(
            f"{file} has no {function}", hint=f"did you mean {file}:{near[0]}?" if near else _HINT
        )
    try:
        wrong = inspect.isclass(schedule)
        if callable(schedule) and not wrong:
            inspect.signature(schedule).bind(None)
    except TypeError:
        wrong = True
    if wrong:
        raise ScheduleError(f"{name.written} is not a function of one Shape", hint=_HINT)
    return schedule


def load_file(path: Path) -> ModuleType:
    """Import a file with a schedule or an operation, once. Raises: ConfigError if there is none."""
    return load_user_file(path, hint=_HINT)


def load_operations(path: Path) -> tuple[Operation, ...]:
    """What a Python file declares. Raises: ConfigError if that is nothing."""
    declared = tuple(value for value in vars(load_file(path)).values() if isinstance(value, Operation))
    if not declared:
        raise ConfigError(f"{path} declares no operation", hint="write NAME = declare(Operation(...)) in it")
    return declared

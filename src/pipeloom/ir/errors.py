"""Everything pipeloom raises on purpose. Each message names who, what and how much; `hint` says what to do
next.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from difflib import get_close_matches
from reprlib import Repr


class PipeloomError(Exception):
    """Base of all errors meant for the user.

    message: who, what and how much.  hint: what to do next; None if there is nothing to advise.

    >>> print(PlanError("3 stages for 2 ops", hint="use at most 2 stages"))
    3 stages for 2 ops
    hint: use at most 2 stages
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PipeloomError], message: str, hint: str | None) -> PipeloomError:
    return kind(message, hint=hint)


class ConfigError(PipeloomError):
    """A file, flag or key is missing, misspelt or of the wrong type."""


class CaptureError(PipeloomError):
    """The model cannot be turned into an OpGraph."""


class CutError(PipeloomError):
    """An assignment of ops to stages is not a valid cut."""


class PlanError(PipeloomError):
    """No plan, or a plan that does not belong to this model or cluster."""


class InfeasibleError(PlanError):
    """Nothing fits under the memory cap."""


class ScheduleError(PipeloomError):
    """A schedule breaks a rule."""


class DeadlockError(ScheduleError):
    """No rank can move."""


class MemoryCapError(PipeloomError):
    """A run passed its device's memory cap, or needs more memory than the device has."""


class OffloadError(PipeloomError):
    """Residuals could not be moved off the device or back."""


class BatchError(PipeloomError):
    """A batch does not have the shape the pipeline was built for."""


class NumbersError(PipeloomError):
    """A number that is not finite was found where a pipeline was asked to look for one."""


class CommunicationError(PipeloomError):
    """A transfer failed or waited too long."""


class PeerError(PipeloomError):
    """Another rank failed; the message carries that rank's traceback."""


class CheckpointError(PipeloomError):
    """A checkpoint is missing, incomplete or does not match."""


class VerifyError(PipeloomError):
    """The pipeline's numbers differ from those of one process."""


LONG_BITS = 100
"""Whole numbers of more bits are shown rounded: a message has no room for hundreds of digits."""


class _Shown(Repr):
    """As `repr`, with only the ends of what is long, and whole numbers of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxdict = self.maxlist = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= LONG_BITS else f"{Decimal(x):.2e}"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value as messages show it.

    >>> shown("left"), shown(10**9), shown(10**400), shown({"float32": 10**400})
    ("'left'", '1000000000', '1.00e+400', "{'float32': 1.00e+400}")
    """
    return str(float(value)) if isinstance(value, float) else _SHOWN.repr(value)


def of_type(value: object) -> str:
    """What a value is, with its article.

    >>> of_type(3), of_type([]), of_type(None)
    ('an int', 'a list', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name.startswith(tuple('aeiouAEIOU')) else 'a'} {name}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names the known word that is nearest; if none is near, what to say instead.

    >>> did_you_mean("widht", ("width", "depth"), "see the page"), did_you_mean("x", (), "see the page")
    ('did you mean width?', 'see the page')
    """
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def as_sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as users of a command see it: what it says, without the line of ours that gave it.

    >>> as_sentence("the disk is slow", UserWarning, "run.py", 7)
    'warning: the disk is slow\\n'
    """
    return f"warning: {message}\n"

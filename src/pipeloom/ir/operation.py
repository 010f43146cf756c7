"""Operations: kinds of action that a user adds, declared once and then known to every room.

    COMPRESS = declare(Operation(letters="COMPRESS", meaning="gradient compression", after=W, seconds=1e-3))

The schedule language places them, the checks prove them, the simulator times them, the viewer names them,
and the runtime calls their handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .action import KINDS, ActionKind, B, F, Handler, I, Kind, Stream, W, register_kind
from .errors import ScheduleError
from .text import odd_figure

STREAMS: tuple[Stream, ...] = ("compute", "send", "host")
"""Those that an operation may be on."""

ANCHORS: dict[Kind, tuple[Kind, ...]] = {F: (F,), B: (B, I), I: (I, B), W: (W, B)}
"""Anchor -> the kinds that it stands for: a stage runs B, or I and W."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one added kind of action is.

    letters: capitals and `_`, as in the text `2COMPRESS5`.  meaning: a few words for drawings.
    after, before: exactly one, the kind of the same stage and micro-batch that it follows or precedes:
        F, B (or I, where B is split) or W (or B, where it is not).
    ahead: with `before`, how many of the stage's anchors earlier it already begins: a prefetch.
    stages, ranks: which have it; all unless given.
    every: only at each k-th micro-batch: with `after` at the last of k, with `before` at the first.
    stream: "compute" keeps the rank busy. "send" (communication) and "host" (copies to and from the host)
        run beside it, one operation at a time on each; only a `before` anchor and the optimizer wait.
    seconds: how long it takes, for all stages or by stage.  share: further seconds, per second of its anchor.
    acquires_bytes, releases_bytes: device memory that it holds from its start and gives back at its end,
        for all stages or by stage. A buffer of its own does both; an offload only releases.
    meets: stage -> the stages whose same operation on the same micro-batch it exchanges data with: all of
        them start together.
    handler: what the runtime calls, see `runtime.operations.OperationContext`. None: nothing to do.
    """

    letters: str
    meaning: str
    after: Kind | None = None
    before: Kind | None = None
    ahead: int = 0
    stages: Callable[[int], bool] | None = None
    ranks: Callable[[int], bool] | None = None
    every: int = 1
    stream: Stream = "compute"
    seconds: float | Callable[[int], float] = 0.0
    share: float = 0.0
    acquires_bytes: int | Callable[[int], int] = 0
    releases_bytes: int | Callable[[int], int] = 0
    meets: Callable[[int], Sequence[int]] | None = None
    handler: Handler | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in (self.after, self.before) if kind is not None]
        if len(given) != 1 or given[0] not in ANCHORS:
            raise ScheduleError(
                f"operation {self.letters} is anchored {self._anchored()}",
                hint="give exactly one of after= and before=, as F, B, I or W",
            )
        if self.stream not in STREAMS:
            raise ScheduleError(
                f"operation {self.letters} is on stream {self.stream!r}",
                hint=f"the streams are {', '.join(STREAMS)}",
            )
        if self.every < 1 or self.ahead < 0 or (self.ahead and self.after is not None):
            raise ScheduleError(
                f"operation {self.letters} runs every {self.every}, {self.ahead} ahead",
                hint="every= is at least 1; ahead= is at least 0, and goes only with before=",
            )
        self._refuse_odd(vars(self))

    def _anchored(self) -> str:
        sides = (("after", self.after), ("before", self.before))
        return " and ".join(f"{word} {kind}" for word, kind in sides if kind is not None) or "nowhere"

    @property
    def kind(self) -> Kind:
        return Kind(self.letters)

    @property
    def anchor(self) -> Kind:
        anchor = self.after if self.after is not None else self.before
        assert anchor is not None
        return anchor

    def stands_at(self, kind: Kind) -> bool:
        """Whether actions of a kind are its anchors. Of each micro-batch exactly one is: B, or I with W."""
        return kind in ANCHORS[self.anchor]

    def runs(self, stage: int, rank: int, microbatch: int) -> bool:
        """Whether it belongs to this micro-batch of this stage.

        >>> op = Operation(letters="SYNC", meaning="sync", after=B, every=4)
        >>> [b for b in range(9) if op.runs(0, 0, b)]
        [3, 7]
        """
        if (self.stages and not self.stages(stage)) or (self.ranks and not self.ranks(rank)):
            return False
        return (microbatch + (self.after is not None)) % self.every == 0

    def seconds_of(self, stage: int) -> float:
        return float(self._amount("seconds", stage))

    def acquired(self, stage: int) -> int:
        return int(self._amount("acquires_bytes", stage))

    def released(self, stage: int) -> int:
        return int(self._amount("releases_bytes", stage))

    def _amount(self, name: str, stage: int) -> float:
        amount: float | Callable[[int], float] = getattr(self, name)
        if not callable(amount):
            return amount
        found = amount(stage)
        self._refuse_odd({f"{name} of stage {stage}": found})
        return found

    def _refuse_odd(self, figures: Mapping[str, object]) -> None:
        if (odd := odd_figure(figures)) is not None:
            raise ScheduleError(
                f"operation {self.letters} has {odd[0]} = {odd[1]}", hint="use a number from 0 on, below 1e30"
            )


OPERATIONS: dict[Kind, Operation] = {}
"""What has been declared; `declare` adds to it."""


def follows_anchor(kind: Kind) -> bool:
    """Whether actions of a kind are operations behind their anchor."""
    return kind in OPERATIONS and OPERATIONS[kind].after is not None


def writes_gradients(kind: Kind) -> bool:
    """Whether actions of a kind add to a stage's gradients, or are operations that may still change these."""
    return kind in (B, W) or (follows_anchor(kind) and OPERATIONS[kind].anchor != F)


def declare(operation: Operation) -> Operation:
    """Make an operation known. Declaring it again, as a file loaded twice does, replaces it.

    >>> declare(Operation(letters="EXAMPLE", meaning="an example", after=B)).kind in OPERATIONS
    True
    """
    kind = operation.kind
    row = ActionKind(
        label=operation.meaning,
        after=I if operation.after == W else operation.after,  # W itself is seen to by the rules
        stream=operation.stream,
        handler=operation.handler,
    )
    known = OPERATIONS.get(kind)
    if known is not None and (known.meaning, known.anchor) == (operation.meaning, operation.anchor):
        KINDS[kind] = row
    else:
        register_kind(operation.letters, row)
    OPERATIONS[kind] = operation
    return operation

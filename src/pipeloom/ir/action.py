"""Actions: what a rank does, with one strict text form for reading and printing.

2F5          stage 2 runs the forward of micro-batch 5
2B5 2I5 2W5  full backward; input-gradient part; weight-gradient part (papers often write "B" for I)
2SEND_F5>3   stage 2 sends its outputs of micro-batch 5 to stage 3
3RECV_F5<2   stage 3 waits for them
3SEND_B5>2   stage 3 sends gradients back to stage 2;  2RECV_B5<3 waits for them
0OFFLOAD3    stage 0 begins to copy the residuals of micro-batch 3 to the host;  0RELOAD3 brings them back
0AWAIT3      stage 0 waits until that OFFLOAD has ended: from here on the device has their room
2REDUCE      stage 2 sums the gradients of parameters that it shares with other stages
2STEP        stage 2 applies the optimizer
2STEP1       the same, in a program of several updates: number 1, counted from 0
2F5&1B3      in a schedule: a pair, run as one unit: both begin when both can, and end together
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NewType, TypeAlias

from .errors import ScheduleError, shown

Kind = NewType("Kind", str)

F = Kind("F")
B = Kind("B")
I = Kind("I")  # noqa: E741  the field's letter for the input gradient
W = Kind("W")
SEND_F = Kind("SEND_F")
RECV_F = Kind("RECV_F")
SEND_B = Kind("SEND_B")
RECV_B = Kind("RECV_B")
REDUCE = Kind("REDUCE")
STEP = Kind("STEP")
OFFLOAD = Kind("OFFLOAD")
AWAIT = Kind("AWAIT")
RELOAD = Kind("RELOAD")
RECOMPUTE = Kind("RECOMPUTE")

Category: TypeAlias = Literal["compute", "memory", "transfer", "stage"]
Stream: TypeAlias = Literal["compute", "send", "recv", "host", "d2h", "h2d"]
Handler: TypeAlias = Callable[[Any], Callable[[], None] | None]
"""Takes the runtime's `OperationContext`; may return a function that waits for what it has begun."""


@dataclass(frozen=True, kw_only=True)
class ActionKind:
    """What all rooms know of a kind of action: one entry of the table `KINDS`.

    label: a few words for drawings.
    category: "compute" and "memory" are work of a stage on one micro-batch; "memory" moves residuals or makes
        them again. "transfer" is one end of a message. "stage" is done once per update.
    in_schedule: a schedule may contain it. Other kinds stand only in programs, where lowering puts them.
    after: for work on a micro-batch, the kind whose results for the same stage and micro-batch it needs: F,
        B or I (which stands for B and I).
    stream: what it keeps busy: "compute" and "recv" (waiting) the rank itself; the others run beside it.
    seconds: the field of `StageCost` with its time; "" for `StageCost.other_s`, by its letters.
    takes, frees: the fields of `StageCost` with the bytes of residuals that are on the device from its start
        on, and that leave it at its end; "" for none.
    handler: what the runtime calls for it; None where the worker does it, or there is nothing to do.
    """

    label: str
    category: Category = "compute"
    in_schedule: bool = True
    after: Kind | None = None
    stream: Stream = "compute"
    seconds: str = ""
    takes: str = ""
    frees: str = ""
    handler: Handler | None = None

    @property
    def on_microbatch(self) -> bool:
        return self.category in ("compute", "memory")


_transfer = partial(ActionKind, category="transfer", in_schedule=False)
_stage_wide = partial(ActionKind, category="stage", in_schedule=False)
_treatment = partial(ActionKind, category="memory", after=F)

KINDS: dict[Kind, ActionKind] = {
    F: ActionKind(label="forward", seconds="forward_s"),
    B: ActionKind(label="backward", after=F, seconds="backward_s"),
    I: ActionKind(label="input gradient", after=F, seconds="input_grad_s"),
    W: ActionKind(label="weight gradient", after=I, seconds="weight_grad_s"),
    SEND_F: _transfer(label="send", stream="send"),
    RECV_F: _transfer(label="wait for a message", stream="recv"),
    SEND_B: _transfer(label="send", stream="send"),
    RECV_B: _transfer(label="wait for a message", stream="recv"),
    REDUCE: _stage_wide(label="sum gradients over ranks", stream="recv"),
    STEP: _stage_wide(label="optimizer step", seconds="step_s"),
    OFFLOAD: _treatment(label="offload", stream="d2h", seconds="offload_s", frees="offloaded_bytes"),
    AWAIT: _treatment(label="wait for an offload"),
    RELOAD: _treatment(label="reload", stream="h2d", seconds="reload_s", takes="offloaded_bytes"),
    RECOMPUTE: _treatment(
        label="recompute", seconds="recompute_s", takes="recomputed_bytes", in_schedule=False
    ),
}
"""The one table of kinds, in the order in which messages list them; `register_kind` adds to it."""

TRANSFERS = tuple(kind for kind, row in KINDS.items() if row.category == "transfer")
STAGE_WIDE = tuple(kind for kind, row in KINDS.items() if row.category == "stage")
ARROWS = {SEND_F: ">", RECV_F: "<", SEND_B: ">", RECV_B: "<"}
OTHER_END = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}
COPYING = (OFFLOAD, AWAIT, RELOAD)
"""What a schedule may say of copies to the host, for single micro-batches."""
TREATMENTS = (*COPYING, RECOMPUTE)
"""What a memory policy asks for."""


def schedule_kinds() -> tuple[Kind, ...]:
    return tuple(kind for kind, row in KINDS.items() if row.in_schedule)


_NUMBER = "(0|[1-9][0-9]{0,8})"  # as it is printed: no leading zeros, no digits of other scripts
_ACTION = re.compile(rf"{_NUMBER}([A-Z][A-Z_]*){_NUMBER}?(?:([<>]){_NUMBER})?")
_LOOSE = re.compile(r"[+-]?(?P<stage>\d*)(?P<kind>[A-Za-z_]*)(?P<microbatch>\d*)(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that a rank does: a stage's work on one micro-batch, its end of one message, or what it does
    once per update. `KINDS[kind]` says which of them.

    microbatch: of REDUCE and STEP the number of the update, from 0, in a program of several; -1 in a program
        that ends with its only one.
    peer: of a transfer the stage at the other end; else -1.
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        if arrow := ARROWS.get(self.kind):
            return f"{self.stage}{self.kind}{self.microbatch}{arrow}{self.peer}"
        number = "" if self.microbatch < 0 and self.is_stage_wide else self.microbatch
        return f"{self.stage}{self.kind}{number}"

    @property
    def sends(self) -> bool:
        return self.kind in (SEND_F, SEND_B)

    @property
    def receives(self) -> bool:
        return self.kind in (RECV_F, RECV_B)

    @property
    def is_transfer(self) -> bool:
        return self.kind in TRANSFERS

    @property
    def is_stage_wide(self) -> bool:
        return self.kind in STAGE_WIDE

    @property
    def other_end(self) -> Action:
        """Of a transfer the matching action on the peer's side.

        >>> print(Action(2, SEND_F, 5, 3).other_end)
        3RECV_F5<2
        """
        return Action(self.peer, OTHER_END[self.kind], self.microbatch, self.stage)


def register_kind(letters: str, row: ActionKind) -> Kind:
    """Add a kind of work on one micro-batch to the table.

    row: after F, B, I or nothing; no transfer, nor done once per step, which every pass would have to know.
    Raises: ScheduleError if the letters are not capitals or are taken.

    >>> from unittest.mock import patch
    >>> with patch.dict(KINDS):
    ...     kind = register_kind("NAP", ActionKind(label="nap", after=F))
    ...     parse_action("2NAP5").kind == kind
    True
    """
    kind = Kind(letters)
    assert row.on_microbatch and row.after in (None, F, B, I)
    if not re.fullmatch(r"[A-Z][A-Z_]*", letters):
        raise ScheduleError(f"kind {letters!r} is not written in capitals", hint="use letters A-Z and _")
    if kind in KINDS:
        raise ScheduleError(f"kind {letters} is already taken", hint="choose other letters")
    KINDS[kind] = row
    return kind


def parse_action(text: str, *, in_program: bool = False) -> Action:
    """Read a compute action such as `2F5`; in_program: or anything that may stand in a program, such as
    `2SEND_F5>3`, `3RECV_F5<2` or `2STEP`.

    >>> parse_action("2F5") == Action(2, F, 5)
    True
    """
    if match := _ACTION.fullmatch(text):
        stage, letters, number, arrow, peer = match.groups()
        kind = Kind(letters)
        row = KINDS.get(kind)
        if row is not None and (in_program or row.on_microbatch) and arrow == ARROWS.get(kind):
            if number is not None:
                return Action(int(stage), kind, int(number), -1 if peer is None else int(peer))
            if row.category == "stage":
                return Action(int(stage), kind)
    if in_program:
        raise ScheduleError(
            f"cannot read instruction {shown(text)}",
            hint="write 2F5, 2SEND_F5>3, 3RECV_F5<2, 2REDUCE or 2STEP",
        )
    raise ScheduleError(f"cannot read action {shown(text)}", hint=_advice(text))


def parse_actions(word: str) -> tuple[Action, ...]:
    """Read one word of a row: an action, or two that run as a pair.

    >>> [str(action) for action in parse_actions("2F5&1B3")]
    ['2F5', '1B3']
    """
    parts = word.split("&")
    if len(parts) > 2:
        raise ScheduleError(f"cannot read {shown(word)}", hint="a pair joins two actions: write 2F5&1B3")
    return tuple(map(parse_action, parts))


LONG = 40
"""Letters of a text beyond which it is no slip of writing, to be told how it was meant."""


def _advice(text: str) -> str:
    in_schedules = schedule_kinds()
    kinds = ", ".join(in_schedules)
    usual = f"write stage, kind, micro-batch, as in 2F5; the kinds are {kinds}"
    if not text:
        return f"the action is empty: {usual}"
    if len(text) > LONG:
        return usual
    match = _LOOSE.fullmatch(text)
    assert match is not None, "every part of it may be empty"
    stage, kind, microbatch, rest = match.group("stage", "kind", "microbatch", "rest")
    if text[0] == "-":
        return f"stages are numbered from 0: {usual}"
    if not text.isascii():
        return f"use the digits 0-9 and the letters A-Z: {usual}"
    if stage and kind and microbatch and not rest and len(stage) < 10 > len(microbatch):
        meant = f"{int(stage)}{kind.upper()}{int(microbatch)}"
        if kind.upper() in in_schedules:
            return f"write {meant}; the kinds are {kinds}"
        return f"{usual}; any other is to be declared first, as an Operation"
    elif kind and microbatch and not stage and kind in in_schedules:
        return f"the stage is missing: write 0{kind}{microbatch} for stage 0"
    elif stage and kind and not microbatch and not rest:
        known = kind if kind in in_schedules else kind.rstrip("O")
        if known in in_schedules:
            return f"the micro-batch is missing: write {stage}{known}0 for micro-batch 0"
    elif rest and stage and microbatch and kind in in_schedules:
        return f"write {stage}{kind}{microbatch} and nothing behind it; blanks separate actions"
    return usual

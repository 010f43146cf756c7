"""What an event's action says in words, and the colour of its kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ir.action import KINDS, RECV_F, SEND_F, TREATMENTS, Kind, parse_action
from ..ir.errors import ScheduleError
from ..ir.timeline import Timeline

STREAMS = ("compute", "recv", "send", "d2h", "h2d", "host")
"""Of a rank, in the order in which they are shown; see `ir.timeline.Event`."""

# F, B, I, W and their first lighter shade differ by 12 or more in CIELAB for every kind of colour blindness.
COLOURS: dict[str, str] = {
    "F": "#4f83e0",
    "B": "#f0a23a",
    "I": "#e8734a",
    "W": "#35b3a2",
    "RECOMPUTE": "#8fb1ee",
    "SEND": "#8794a8",
    "wait": "#a9b4c4",
    "OFFLOAD": "#a1887f",
    "AWAIT": "#a9b4c4",
    "RELOAD": "#c5a48c",
    "REDUCE": "#8a6fd1",
    "STEP": "#c05fa5",
}
OTHER = "#b5b356"

WAITS = {
    "CLIP": "sum the gradients' norm over ranks",
    "SUMS": "wait for sums over ranks",
    "ROOM": "wait for room under the cap",
    "END": "wait at the step's end",
}
"""What measured timelines have beside actions."""


@dataclass(frozen=True)
class Label:
    """group: what shares a colour and a legend entry: the kind, or "SEND" and "wait" for the transfers."""

    action: str
    group: str
    stage: int | None
    microbatch: int | None
    meaning: str

    @property
    def short(self) -> str:
        return "" if self.microbatch is None else str(self.microbatch)


@lru_cache(maxsize=65536)
def label(action: str) -> Label:
    """Text that is no instruction is its own group.

    >>> label("0F3").meaning
    'stage 0: forward of micro-batch 3'
    >>> label("1RECV_F2<0").meaning
    'stage 1 waits for the outputs of micro-batch 2 from stage 0'
    """
    try:
        step = parse_action(action, in_program=True)
    except ScheduleError:
        return Label(action, group=action, stage=None, microbatch=None, meaning=group_name(action))
    stage, group, microbatch = step.stage, str(step.kind), None
    meaning = f"stage {stage}: {group_name(group)}"
    if not step.is_stage_wide:
        microbatch = step.microbatch
        meaning += f" of micro-batch {microbatch}"
    if step.is_transfer:
        values = "outputs" if step.kind.endswith("_F") else "gradients"
        group = "SEND" if step.sends else "wait"
        verb, towards = ("sends", "to") if step.sends else ("waits for", "from")
        meaning = f"stage {stage} {verb} the {values} of micro-batch {microbatch} {towards} stage {step.peer}"
    return Label(action, group=group, stage=stage, microbatch=microbatch, meaning=meaning)


def chunks(timeline: Timeline) -> dict[int, int]:
    """Stage -> which of its rank's stages it is, from 0; where a rank has replicas, which direction.

    >>> from ..ir.timeline import Event
    >>> at = [Event(rank=0, stream="compute", action=a, start_s=0, end_s=1) for a in ("0F0", "7F0")]
    >>> chunks(Timeline(source="predicted", ranks=1, events=tuple(at)))
    {0: 0, 7: 1}
    """
    found: dict[int, int] = {}
    for lane in timeline.lanes:
        stages = {label(lane.actions[i]).stage for i in lane.firsts}
        found |= {stage: i for i, stage in enumerate(sorted(s for s in stages if s is not None))}
    return found


def group_name(group: str) -> str:
    """
    >>> group_name("I"), group_name("STEP"), group_name("ROOM"), group_name("mine")
    ('input gradient', 'optimizer step', 'wait for room under the cap', 'mine')
    """
    row = KINDS.get({"SEND": SEND_F, "wait": RECV_F}.get(group, Kind(group)))
    return WAITS.get(group, group) if row is None else row.label


def computes(group: str) -> bool:
    row = KINDS.get(Kind(group))
    return row is not None and row.in_schedule and Kind(group) not in TREATMENTS


def colour(group: str, shade: int = 0) -> str:
    """Hex colour of a group; each `shade` is a step lighter, for the further stages of a rank.

    >>> colour("F"), colour("F", 1)
    ('#4f83e0', '#9ebbee')
    """
    base = COLOURS.get(group, OTHER)
    mix = 1 - 0.55 ** min(shade, 3)
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * mix):02x}" for c in channels)

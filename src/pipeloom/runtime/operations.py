"""Runs the handlers of a user's operations at their places in a rank's row.

def compress(context: OperationContext) -> None:
    for name, gradient in context.gradients.items():
        gradient.copy_(decompressed(compressed(gradient)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..ir.action import KINDS, Kind
from ..ir.errors import ScheduleError, of_type
from ..ir.operation import ANCHORS, OPERATIONS, Operation
from ..ir.schedule import Program
from ..tracer.stage.functions import Tensors
from .channel import Channel, meeting
from .transport import SumGroup

if TYPE_CHECKING:
    from .rank import Rank, RankWork


@dataclass(frozen=True, kw_only=True, eq=False)
class OperationContext:
    """What a handler may see and do. It runs inside the step, without autograd. Rehearsals, which time a
    rank's actions before the first step and now and then between steps, call it too, with a state of their
    own and a channel to nowhere: what a handler keeps anywhere else mixes with theirs.

    rank, ranks: of this process, and how many there are.  stage, microbatch: what the action names.
    microbatches: of a step.  last: whether this is the operation's last micro-batch of the step.
    gradients: sums so far of the stage's parameters, by name; a handler may write into them.
    residuals: what the forward left for the backward of this micro-batch. A handler that takes a tensor out
        puts it back before the backward. What the plan's memory policy treats is in it only at times: what it
        offloads until OFFLOAD, and again from the RECOMPUTE or backward on that waits for its RELOAD; what it
        recomputes from RECOMPUTE on, or never, as a stage that recomputes inside its backward makes it there.
        So a handler takes out what it finds, and no name for granted.
    residual_bytes: what the device holds of them; in the ledger a copy's bytes count until it has ended.
    state: empty at first; what a handler puts here it finds again at the next call on this stage.
    partners: the ranks of the stages that it meets, its own included.
    """

    rank: int
    ranks: int
    stage: int
    microbatch: int
    microbatches: int
    last: bool
    gradients: Mapping[str, Tensor]
    residuals: Tensors
    residual_bytes: int
    state: dict[str, Any]
    partners: tuple[int, ...]
    channel: Channel

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor in place over `partners`; each of them calls it once.

        Raises: ScheduleError if the operation was declared without `meets`.
        """
        self._require_partners()
        self.channel.all_reduce(tensor, self.partners)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give one part, all of one shape and dtype, to each of `partners`; return what they give.

        Made of one sum over all parts of all partners, so for n of them n times as many bytes move as needed.
        Raises: ScheduleError if the operation was declared without `meets`, or the parts are not one each.
        """
        self._require_partners()
        count, mine = len(self.partners), self.partners.index(self.rank)
        if len(parts) != count or any(p.shape != parts[0].shape or p.dtype != parts[0].dtype for p in parts):
            raise ScheduleError(
                f"{len(parts)} parts for {count} partners of stage {self.stage}",
                hint="give one part per partner, all of one shape and dtype",
            )
        table = torch.zeros((count, count, *parts[0].shape), dtype=parts[0].dtype, device=parts[0].device)
        table[mine] = torch.stack(list(parts))
        self.channel.all_reduce(table, self.partners)
        return list(table[:, mine])

    def _require_partners(self) -> None:
        if len(self.partners) < 2:
            raise ScheduleError(
                f"the operation on stage {self.stage} exchanges data, but meets no other rank",
                hint="declare it with meets=, so that the schedule is proved not to block",
            )


def partners(operation: Operation | None, stage: int, rank: int, placement: Sequence[int]) -> tuple[int, ...]:
    """The ranks of the stages that an operation meets, its own included."""
    meets = operation.meets(stage) if operation is not None and operation.meets is not None else ()
    return tuple(sorted({rank, *(placement[s] for s in meets)}))


def meetings(program: Program) -> list[SumGroup]:
    """The groups of ranks that meet in operations of a program, where these are not all."""
    met = {
        partners(OPERATIONS[step.kind], step.stage, rank, program.placement)
        for rank, row in enumerate(program.rows if OPERATIONS else ())
        for step in row
        if step.kind in OPERATIONS
    }
    return [meeting(ranks) for ranks in sorted(met) if 1 < len(ranks) < len(program.rows)]


class Operations:
    """Calls handlers, and waits for what they have begun where its result is needed.

    begun: what has not ended yet.
    """

    def __init__(self, rank: Rank) -> None:
        self.begun: list[_Begun] = []
        self._rank = rank
        self._state: dict[tuple[int, Kind], dict[str, Any]] = {}

    def begin(self, work: RankWork) -> None:
        """Run the handler of a kind; without one only the bytes of an operation are counted.

        Raises: ScheduleError if the handler returns neither None nor a function.
        """
        row, operation = KINDS[work.kind], OPERATIONS.get(work.kind)
        if operation is not None:
            self._count(work, operation.acquired(work.key[0]))
        wait = None
        with self._rank.recorder.record(row.stream, work.text):
            if row.handler is not None:
                wait = row.handler(self._context(operation, work))
        if wait is None:
            self._release(work)
            return
        if not callable(wait):
            raise ScheduleError(
                f"the handler of {work.text} returned {of_type(wait)}",
                hint="return None, or a function that waits for what the handler has begun",
            )
        self.begun.append(_Begun(work, wait))

    def wait_before(self, work: RankWork) -> None:
        """Wait for what an instruction needs: an anchor for its own, the end of the row for everything."""
        needed = [begun for begun in self.begun if _waits_for(work, begun.work)]
        for begun in needed:
            with self._rank.recorder.record("recv", begun.work.text):
                begun.wait()
            self._release(begun.work)
        self.begun = [begun for begun in self.begun if begun not in needed]

    def wait_for_all(self) -> None:
        """Wait for what handlers have begun; nobody needs its result."""
        while self.begun:
            self.begun.pop().wait()

    def _context(self, operation: Operation | None, work: RankWork) -> OperationContext:
        rank, (stage, microbatch), variant = self._rank, work.key, work.wiring.variant
        placement, count = rank.running.placement, rank.running.microbatches
        kept = rank.kept[work.key]
        sums, names = rank.weights.grads, variant.stages.params[stage]
        later = range(microbatch + 1, count)
        return OperationContext(
            rank=rank.rank,
            ranks=rank.channel.ranks,
            stage=stage,
            microbatch=microbatch,
            microbatches=count,
            last=not any(operation is None or operation.runs(stage, rank.rank, m) for m in later),
            gradients={name: sums.sums[name] for name in names if name in sums.touched},
            residuals=kept.residuals,
            residual_bytes=kept.residual_bytes,
            state=self._state.setdefault((stage, work.kind), {}),
            partners=partners(operation, stage, rank.rank, placement),
            channel=rank.channel,
        )

    def _release(self, work: RankWork) -> None:
        if (operation := OPERATIONS.get(work.kind)) is not None:
            self._count(work, -operation.released(work.key[0]))

    def _count(self, work: RankWork, change: int) -> None:
        if change:
            self._rank.ledger.add("residuals", change, work.text)


class _Begun(NamedTuple):
    """An operation under way. wait: returns once it has ended."""

    work: RankWork
    wait: Callable[[], None]


def _waits_for(work: RankWork, begun: RankWork) -> bool:
    if work.instruction.is_stage_wide:
        return True
    operation = OPERATIONS.get(begun.kind)
    before = None if operation is None else operation.before
    return before is not None and work.kind in ANCHORS[before] and work.key == begun.key

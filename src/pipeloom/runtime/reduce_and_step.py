"""What ends a step: REDUCE, the sums of gradients over ranks; clipping; and STEP, the optimizer.

Where the pipeline does not drain between two steps, sums run beside the next one, and only STEP waits:

    REDUCE   gradients are complete: begin their sums, and from now on add into other buffers
    ...      once these are there, begin the sum of the norm          (looked at between two instructions)
    STEP     wait for both, clip, update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ir.shared_weights import OptimizerShares, Reduction, for_owners, reductions
from ..ir.stages import StageGraph
from .channel import Channel, PendingSum
from .operations import meetings
from .transport import SumGroup
from .weights import Gradients, clip_factor

if TYPE_CHECKING:
    from .rank import Rank, RankWork, Variant


def norm_group(ranks: int) -> SumGroup:
    return SumGroup("the gradients' norm", tuple(range(ranks)))


def gradient_group(ranks: tuple[int, ...]) -> SumGroup:
    return SumGroup("shared gradients", ranks)


def parameter_group(ranks: tuple[int, ...]) -> SumGroup:
    """Replicas that share out the optimizer's state."""
    return SumGroup("updated parameters", ranks)


def shared_by(
    stages: StageGraph, placement: Sequence[int], rank: int, shares: Sequence[OptimizerShares]
) -> list[Reduction]:
    """What a rank sums with others.

    shares: how ranks share out the optimizer's state, if they do; what one owns is summed for it only.
    """
    rows = reductions(stages, placement)
    row = rows[rank] if rank < len(rows) else ()
    return [part for shared in row if len(shared.ranks) > 1 for part in for_owners(shared, shares)]


def begin_sums(gradients: Gradients, shared: Sequence[Reduction], channel: Channel) -> list[PendingSum]:
    """Begin the sums of a rank's gradients over others. All are begun before one is awaited: else ranks of
    several groups could wait in a circle, each in another group than the next."""
    begun = []
    for part in shared:
        for name in part.names:
            # Sums lie in one piece with others: what nothing was added to would else be of the last step.
            if name in gradients.sums:
                gradients.total(name)
        group = gradient_group(part.ranks)
        begun += [channel.begin_sum(flat, group, part.owner) for flat in gradients.flat[part.names]]
    return begun


@dataclass(eq=False)
class _PendingUpdate:
    """Sums that an update waits for.  squares: of this rank's gradients; None until their sum has begun."""

    gradients: list[PendingSum] = field(default_factory=list)
    squares: Tensor | None = None
    norm: PendingSum | None = None


class ReduceAndStep:
    """Does REDUCE and STEP for a rank.

    clip_norm: limit of the gradients' global norm; None for no limit.
    after_step: called after each update.
    update: whether the step that runs ends with the optimizer.
    grad_norm: the norm, last time, on the device: reading it waits for the device.
    updating: whether the optimizer may have updated some parameters and not others; whoever calls the rank
        sets it back once the call is over.
    pending: sums that run beside the step.
    variants: the stages of the micro-batches that run.
    """

    def __init__(self, rank: Rank, clip_norm: float | None, after_step: Callable[[], None]) -> None:
        self.clip_norm = clip_norm
        self.grad_norm: Tensor | None = None
        self.update = True
        self.updating = False
        self.pending: _PendingUpdate | None = None
        self.variants: Sequence[Variant] = ()
        self._rank = rank
        self._after_step = after_step
        self._shared: list[Reduction] = []
        self._last_stage = -1
        self._unused: set[str] = set()
        self._counts: list[tuple[list[str], Tensor]] = []

    def attend(self, stages: StageGraph, placement: Sequence[int]) -> None:
        """A program is going to run. What is summed does not depend on the size of micro-batches."""
        rank = self._rank
        self._shared = shared_by(stages, placement, rank.rank, rank.weights.shares)
        self._last_stage = max((s for s, home in enumerate(placement) if home == rank.rank), default=-1)

    def groups(self, stages: StageGraph, placement: Sequence[int]) -> list[SumGroup]:
        """What sums of gradients, updated parameters and operations need; the same on all ranks."""
        ties = [tie for row in reductions(stages, placement) for tie in row]
        shared = sorted({tie.ranks for tie in ties if len(tie.ranks) > 1})
        sent = sorted({share.ranks for share in self._rank.weights.shares if len(share.ranks) > 1})
        return [*map(gradient_group, shared), *map(parameter_group, sent), *meetings(self._rank.program)]

    def sum_shared_gradients(self, work: RankWork) -> None:
        """REDUCE: add gradients over the ranks that share their parameters.

        One sum for each set of ranks and dtype (`ir.weight_policies`), or for each owner of a part of them;
        all are begun before one is awaited. What another rank owns is then forgotten here.
        """
        if not self.update:
            return
        weights = self._rank.weights
        channel = self._rank.channel
        if work.instruction.microbatch >= 0:
            self.pending = _PendingUpdate(self._begin(weights.begin_sums(), channel))
            return self.progress()
        with self._rank.recorder.record("recv", work.text):
            self._wait(self._begin(weights.grads, channel))

    @property
    def _decides(self) -> bool:
        return any(variant.decides for variant in self.variants)

    def _begin(self, gradients: Gradients, channel: Channel) -> list[PendingSum]:
        """Begin the sums, and find which are of gradients that no rank has: the optimizer leaves those
        parameters as they are, which is not what it does for a gradient of zeros.

        Replicas of a stage have the same ones, unless data decide: then it is counted which ranks have them.
        """
        shared = {name for part in self._shared for name in part.names if name in gradients.sums}
        self._unused, self._counts, counting = set(), [], []
        if (missing := shared - gradients.touched) and len({id(each) for each in self.variants}) == 1:
            stages = self.variants[0].stages
            readers = {name: stages.tied.get(name, ()) for name in missing}
            self._unused = {name for name in missing if len(set(map(stages.origin, readers[name]))) == 1}
        for part in self._shared if self._decides else ():
            if names := [name for name in part.names if name in gradients.sums]:
                has = [float(name in gradients.touched) for name in names]
                self._counts.append((names, torch.tensor(has, device=self._rank.weights.device)))
                counting.append(
                    channel.begin_sum(self._counts[-1][1], gradient_group(part.ranks), part.owner)
                )
        return counting + begin_sums(gradients, self._shared, channel)

    def _wait(self, sums: Sequence[PendingSum]) -> None:
        for begun in sums:
            begun.wait()
        if self._decides:
            counted = (zip(names, counts.tolist(), strict=True) for names, counts in self._counts)
            self._unused = {name for pairs in counted for name, count in pairs if not count}
        self._rank.weights.summed.forget(self._unused)
        for shared in self._shared:
            if shared.owner not in (None, self._rank.rank):
                self._rank.weights.summed.forget(shared.names)

    def progress(self) -> None:
        """Begin the sum of the norm once the gradients are there; never blocks."""
        pending = self.pending
        if pending is None or self.clip_norm is None or pending.norm is not None:
            return
        if all(begun.done() for begun in pending.gradients):
            self._begin_norm(pending)

    def _begin_norm(self, pending: _PendingUpdate) -> None:
        # When depends on how fast messages are: ranks come to this at different instructions. So the norm has
        # a group of its own, in which its place among other sums does not matter.
        self._wait(pending.gradients)
        pending.gradients = []
        if self.clip_norm is not None:
            pending.squares = self._squares_here()
            group = norm_group(self._rank.channel.ranks)
            pending.norm = self._rank.channel.begin_sum(pending.squares, group)

    def step(self, work: RankWork) -> None:
        """STEP: clip, then update. The optimizer holds all stages of the rank: it runs at the last STEP of
        the row."""
        if not self._updates_at(work):
            return
        rank, weights = self._rank, self._rank.weights
        squares = None
        if pending := self.pending:
            with rank.recorder.record("recv", "SUMS"):
                if pending.norm is None:
                    self._begin_norm(pending)
                if pending.norm is not None:
                    pending.norm.wait()
            self.pending, squares = None, pending.squares
        elif self.clip_norm is not None:
            squares = self._squares_here()
            with rank.recorder.record("recv", "CLIP"):
                rank.channel.all_reduce(squares)
        weights.note_gradients()
        if squares is not None and self.clip_norm is not None:
            self.grad_norm = squares.sqrt()
            weights.scale_gradients(clip_factor(self.grad_norm, self.clip_norm))
        self.updating = True
        with rank.recorder.record("compute", work.text):
            weights.step()
        self._exchange_parameters(work.text)
        weights.cast_parameters()
        self._after_step()
        sizes = weights.sizes
        for kind in ("optimizer", "parameters"):
            rank.ledger.set(kind, sizes[kind], work.text)
        rank.ledger.during(work.text, weights.step_bytes, {})

    def needed_bytes(self, work: RankWork) -> int:
        return self._rank.weights.step_adds_bytes if self._updates_at(work) else 0

    def _updates_at(self, work: RankWork) -> bool:
        return self.update and work.key[0] == self._last_stage

    def _squares_here(self) -> Tensor:
        """Of the gradients that this rank counts in the norm. One that several ranks share counts once: at
        its owner if that alone has its sum, else on its lowest rank."""
        rank, weights = self._rank.rank, self._rank.weights
        elsewhere = {
            name
            for shared in self._shared
            if rank != (min(shared.ranks) if shared.owner is None else shared.owner)
            for name in shared.names
        }
        return weights.norm_squares(n for n in weights.grads.sums if n not in elsewhere).reshape(1)

    def _exchange_parameters(self, text: str) -> None:
        """Where replicas share out the optimizer's state, each gets what the others have updated."""
        rank, weights = self._rank, self._rank.weights
        shares = weights.shares[rank.rank] if weights.shares else None
        if shares is None or len(shares.ranks) == 1:
            return
        group = parameter_group(shares.ranks)
        with rank.recorder.record("recv", text):
            sent = []
            for name, owner in sorted(shares.owner.items()):
                param = weights.params[name].data
                dense = param.contiguous()
                sent.append((rank.channel.begin_broadcast(dense, group, owner), dense, param))
            for begun, dense, param in sent:
                begun.wait()
                if dense is not param:
                    param.copy_(dense)

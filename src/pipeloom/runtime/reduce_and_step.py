"""What ends a step: REDUCE, the sums of gradients over ranks; clipping; and STEP, the optimizer.

Where the pipeline does not drain between two steps, sums run beside the next one, and only STEP waits:

    REDUCE   gradients are complete: begin their sums, and from now on add into other buffers
    ...      once these are there, begin the sum of the norm          (looked at between two instructions)
    STEP     wait for both, clip, update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..ir.action import StageAction
from ..ir.stages import StageGraph
from ..ir.weights import OptimizerShares, Reduction, for_owners, reductions
from .posted import PendingSum
from .step_state import StepContext
from .transports.transport import SumGroup
from .weights import Gradients, Weights, clip_factor


def norm_group(ranks: int) -> SumGroup:
    """All ranks, which sum the squares of their gradients."""
    return SumGroup("the gradients' norm", tuple(range(ranks)))


def gradient_group(ranks: tuple[int, ...]) -> SumGroup:
    """Ranks that sum the gradients of what they share."""
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


@dataclass(eq=False)
class _PendingUpdate:
    """Sums that an update waits for.  squares: of this rank's gradients; None until their sum has begun."""

    gradients: list[PendingSum] = field(default_factory=list)
    squares: Tensor | None = None
    norm: PendingSum | None = None


class ReduceAndStep:
    """Handlers of REDUCE and STEP.

    clip_norm: limit of the gradients' global norm; None for no limit.
    grad_norm: that norm, last time, on the device: reading it waits for the device.
    after_step: called after each update.
    updating: whether the optimizer may have updated some parameters and not others; whoever calls the worker
        sets it back once the call is over.
    """

    def __init__(self, clip_norm: float | None, after_step: Callable[[], None]) -> None:
        self.clip_norm = clip_norm
        self.grad_norm: Tensor | None = None
        self.updating = False
        self._after_step = after_step
        self._pending: _PendingUpdate | None = None

    def groups(self, stages: StageGraph, placement: Sequence[int], weights: Weights) -> list[SumGroup]:
        """What its sums of gradients need, and what updated parameters are sent in; the same on all ranks."""
        ties = [tie for row in reductions(stages, placement) for tie in row]
        shared = sorted({tie.ranks for tie in ties if len(tie.ranks) > 1})
        sent = sorted({share.ranks for share in weights.shares if len(share.ranks) > 1})
        return [*map(gradient_group, shared), *map(parameter_group, sent)]

    def reduce_tied_gradients(self, step: StepContext, action: StageAction) -> None:
        """REDUCE: add gradients over the ranks that share their parameters.

        One sum for each set of ranks and dtype (`ir.weights`), or for each owner of a part of them;
        all are begun before one is awaited. What another rank owns is then forgotten here.
        """
        if not step.update:
            return
        if action.update >= 0:
            self._pending = _PendingUpdate(self._begin_sums(step, step.weights.begin_sums()))
            return self.progress(step)
        with step.recorder.record("recv", str(action)):
            self._wait(step, self._begin_sums(step, step.weights.grads))

    def _begin_sums(self, step: StepContext, gradients: Gradients) -> list[PendingSum]:
        begun = []
        for shared in _shared_by_rank(step):
            for name in shared.names:
                if name in gradients.sums:
                    gradients.total(name)
            group = gradient_group(shared.ranks)
            flats = gradients.flat[shared.names]
            begun += [step.channel.begin_sum(flat, group, shared.owner) for flat in flats]
        return begun

    def _wait(self, step: StepContext, sums: Sequence[PendingSum]) -> None:
        for begun in sums:
            begun.wait()
        for shared in _shared_by_rank(step):
            if shared.owner not in (None, step.rank):
                step.weights.summed.forget(shared.names)

    def progress(self, step: StepContext) -> None:
        """Begin the sum of the norm once the gradients are there; never blocks."""
        pending = self._pending
        if pending is None or self.clip_norm is None or pending.norm is not None:
            return
        if all(begun.done() for begun in pending.gradients):
            self._begin_norm(step, pending)

    def _begin_norm(self, step: StepContext, pending: _PendingUpdate) -> None:
        self._wait(step, pending.gradients)
        pending.gradients = []
        if self.clip_norm is not None:
            pending.squares = step.weights.norm_squares(self._counted_here(step)).reshape(1)
            pending.norm = step.channel.begin_sum(pending.squares, norm_group(len(step.program.rows)))

    def step(self, step: StepContext, action: StageAction) -> None:
        """STEP: clip, then update. The optimizer holds all stages of the rank: it runs at the last STEP of
        the row."""
        if not _updates_here(step, action):
            return
        squares = self._wait_for_sums(step, self._pending) if self._pending else self._sum_squares(step)
        step.weights.note_gradients()
        if squares is not None and self.clip_norm is not None:
            self._clip(step, squares, self.clip_norm)
        self.updating = True
        with step.recorder.record("compute", str(action)):
            step.weights.step()
        _exchange_parameters(step, str(action))
        self._after_step()
        sizes = step.weights.sizes
        for kind in ("optimizer", "parameters"):
            step.ledger.set(kind, sizes[kind], str(action))
        step.ledger.during(str(action), step.weights.step_bytes, {})

    def needed_bytes(self, step: StepContext, action: StageAction) -> int:
        """What STEP takes beyond what the rank holds."""
        return step.weights.step_adds_bytes if _updates_here(step, action) else 0

    def _wait_for_sums(self, step: StepContext, pending: _PendingUpdate) -> Tensor | None:
        """The gradients of all ranks, and the squares of all of them if they are to be clipped."""
        with step.recorder.record("recv", "SUMS"):
            if pending.norm is None:
                self._begin_norm(step, pending)
            if pending.norm is not None:
                pending.norm.wait()
        self._pending = None
        return pending.squares

    def forget(self) -> None:
        """Forget sums that a step that was broken off has begun."""
        self._pending = None

    def _sum_squares(self, step: StepContext) -> Tensor | None:
        """The sum over all ranks of the squares of their gradients, if these are to be clipped."""
        if self.clip_norm is None:
            return None
        squares = step.weights.norm_squares(self._counted_here(step)).reshape(1)
        with step.recorder.record("recv", "CLIP"):
            step.channel.all_reduce(squares)
        return squares

    def _clip(self, step: StepContext, squares: Tensor, limit: float) -> None:
        """Scale gradients by the norm over all ranks."""
        self.grad_norm = squares.sqrt()
        step.weights.scale_gradients(clip_factor(self.grad_norm, limit))

    def _counted_here(self, step: StepContext) -> list[str]:
        """The parameters that this rank counts in the norm: one that several ranks share counts once, at its
        owner if that alone has its sum, else on its lowest rank."""
        elsewhere = {
            name
            for shared in _shared_by_rank(step)
            if step.rank != (min(shared.ranks) if shared.owner is None else shared.owner)
            for name in shared.names
        }
        return [name for name in step.weights.grads.sums if name not in elsewhere]


def _updates_here(step: StepContext, action: StageAction) -> bool:
    """Whether the optimizer runs at this STEP: at the last one of the row, where the step has an update."""
    return step.update and action.stage == max(s for s, r in enumerate(step.placement) if r == step.rank)


def _shared_by_rank(step: StepContext) -> list[Reduction]:
    return shared_by(step.stages, step.placement, step.rank, step.weights.shares)


def _exchange_parameters(step: StepContext, action: str) -> None:
    """Where replicas share out the optimizer's state, each gets what the others have updated."""
    params = step.weights.params
    shares = step.weights.shares[step.rank] if step.weights.shares else None
    if shares is None or len(shares.ranks) == 1:
        return
    group = parameter_group(shares.ranks)
    with step.recorder.record("recv", action):
        sent = []
        for name, owner in sorted(shares.owner.items()):
            param = params[name].data
            dense = param.contiguous()
            sent.append((step.channel.begin_broadcast(dense, group, owner), dense, param))
        for begun, dense, param in sent:
            begun.wait()
            if dense is not param:
                param.copy_(dense)

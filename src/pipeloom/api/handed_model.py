"""One capture for all ranks: who starts them captures, and hands the graph over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..ir.plan import Plan

if TYPE_CHECKING:
    from torch import dtype

    from ..tracer.captured import Captured
    from ..tracer.job import Job


@dataclass(frozen=True, kw_only=True)
class HandedModel:
    """A captured model for the ranks of this user, see `tracer.hand_over`.

    evaluation: its graph of evaluation mode; None where a rank that evaluates captures that.
    """

    training: bytes
    evaluation: bytes | None = None

    @property
    def digest(self) -> bytes:
        """Tells training graphs apart."""
        return hashlib.sha256(self.training).digest()


def hand_over_model(
    job: Job,
    plan: Plan,
    *,
    captured: Captured | None = None,
    autocast: dtype | None = None,
    evaluates: bool = False,
    early: Callable[[HandedModel], None] | None = None,
) -> HandedModel | None:
    """A job's model, captured for the micro-batches of a plan.

    captured: the model, if planning has captured it.  evaluates: with the graph of evaluation mode.
    early: gets what is there before evaluation mode is captured, which takes seconds.
    Returns: None where each rank has to capture it: a model that is cut between its modules.
    Raises: CaptureError if the model cannot be captured, or not in evaluation mode.
    """
    from ..tracer.capture import capture
    from ..tracer.export.evaluation import capture_evaluation
    from ..tracer.handover import hand_over, hand_over_evaluation
    from ..tracer.job_calls import sample_batch

    if captured is None:
        captured = capture(job, plan.microbatch_size, autocast=autocast)
    training = hand_over(captured)
    handed = None if training is None else HandedModel(training=training)
    if not evaluates or captured.cut is not None:
        return handed
    if handed is not None and early is not None:
        early(handed)
    batch = sample_batch(job, 0, plan.microbatch_size)
    captured.evaluation = capture_evaluation(job, captured, batch, autocast=autocast)
    return None if handed is None else replace(handed, evaluation=hand_over_evaluation(captured))


_TAKEN_EARLY: dict[bytes, Captured] = {}
"""What this process has taken over before its work, by digest, until `take_over_model` asks for it."""


def take_over_early(data: HandedModel, job: Job, plan: Plan, *, rank: int, compiled: bool = False) -> None:
    """In a rank that waits for its work: take a model over, and trace the rank's stages for the CPU.

    Raises: CaptureError as `take_over_model`, which then raises it again.
    """
    from ..tracer.handover import take_over
    from .rank_stages import make_variant

    captured = take_over(data.training, job)
    own = [stage for stage, home in enumerate(plan.placement) if home == rank]
    make_variant(
        captured,
        plan,
        plan.stage_graph(captured.graph),
        own,
        device="cpu",
        compiled=compiled,
        policy=plan.memory,
    )  # `captured` keeps what tracing made
    _TAKEN_EARLY[data.digest] = captured


def take_over_model(data: HandedModel | None, job: Job) -> Captured | None:
    """What `hand_over_model` gave, in a rank. Raises: CaptureError if its job makes another model."""
    from ..tracer.handover import take_over, take_over_evaluation

    if data is None:
        return None
    captured = _TAKEN_EARLY.pop(data.digest, None) or take_over(data.training, job)
    if data.evaluation is not None:
        take_over_evaluation(data.evaluation, captured, job)
    return captured

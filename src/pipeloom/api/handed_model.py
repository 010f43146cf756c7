"""One capture for all ranks: who starts them captures, and hands the graph over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.plan import Plan

if TYPE_CHECKING:
    from torch import dtype

    from ..tracer import Captured, Job

__all__ = ["hand_over_model", "take_over_model"]


def hand_over_model(
    job: Job,
    plan: Plan,
    *,
    captured: Captured | None = None,
    autocast: dtype | None = None,
    evaluates: bool = False,
) -> bytes | None:
    """A job's model, captured for the micro-batches of a plan, for the ranks of this user; see
    `tracer.hand_over`.

    captured: the model, if planning has captured it.  evaluates: with the graph of evaluation mode.
    Returns: None where each rank has to capture it: a model that is cut between its modules.
    Raises: CaptureError if the model cannot be captured, or not in evaluation mode.
    """
    from ..tracer import capture, capture_evaluation, hand_over, sample_batch

    if captured is None:
        captured = capture(job, plan.microbatch_size, autocast=autocast)
    if evaluates and captured.cut is None:
        batch = sample_batch(job, 0, plan.microbatch_size)
        captured.evaluation = capture_evaluation(job, captured, batch, autocast=autocast)
    return hand_over(captured)


def take_over_model(data: bytes | None, job: Job) -> Captured | None:
    """What `hand_over_model` gave, in a rank. Raises: CaptureError if its job makes another model."""
    from ..tracer import take_over

    return None if data is None else take_over(data, job)

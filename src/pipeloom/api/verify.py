"""verify: the same micro-batches in one process and in the pipeline."""

from __future__ import annotations

from ..ir.plan import Plan
from ..tracer import Job
from .comparison import Verification, compare
from .options import Options
from .pipeline import Pipeline

__all__ = ["Verification", "verify"]


def verify(
    job: Job,
    plan: Plan,
    *,
    options: Options | None = None,
    tolerance: float | None = None,
    seed: int = 1,
) -> Verification:
    """Run one step of a plan, with ranks as threads of this process, and of a single process; compare.

    Updated parameters are compared with what the job's optimizer (plain SGD where it names none) makes of
    the pipeline's own gradients in one process: those are compared already, and Adam would turn the
    rounding of a zero gradient into a full-sized update. The one process runs the user's own module. Where
    the model draws random numbers it draws those of its captured graph, run uncut; if it cannot, that graph
    is what the pipeline is compared with, and `reference` says so.

    tolerance: relative; by default what the coarsest dtype of the parameters explains.
    """
    return compare(Pipeline, job, plan, options=options, tolerance=tolerance, seed=seed)

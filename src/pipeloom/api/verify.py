"""verify: the same micro-batches in one process and in the pipeline."""

from __future__ import annotations

from ..ir.plan import Plan
from ..tracer.job import Job
from .comparison import Verification, compare
from .options import Options
from .pipeline import Pipeline


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

    job, plan: as a `Pipeline` gets them.  options: of both runs; `keep_gradients` is on and `compare` off.
    tolerance: relative; by default what the coarsest dtype of the parameters explains.
    seed: for `Job.batch`, which gives the rows of one step.
    Returns: the largest relative differences. None is refused: `Verification.require` does that.
    Raises: PlanError if the plan was made for another model; ScheduleError if the runtime cannot run its
        schedule, or the schedule does not train; else as `Pipeline` and `Pipeline.step`, such as
        InfeasibleError, CaptureError and BatchError.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> plan = pipeloom.plan(job, stages=2, microbatches=2, microbatch_size=2, cluster="2 x a100-40")
    >>> found = pipeloom.verify(job, plan)
    >>> found.passed, found.reference
    (True, 'the module itself, eager')
    """
    return compare(Pipeline, job, plan, options=options, tolerance=tolerance, seed=seed)

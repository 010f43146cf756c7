"""What a forward raises where a stage runs it without the data of other stages: a sentence with its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

from ...ir.errors import CutError
from ..user_code import at, raised_at
from .absent_tensors import KEEP_TOGETHER
from .stage_run import StageRun
from .stage_task import StageTask

_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What code raises that was given something else than a tensor, or one without data."""


@contextmanager
def lack_of_data_explained(task: StageTask) -> Iterator[None]:
    """Errors of the code between modules are named with its line; those of modules that the stage runs pass,
    as do all of the first stage, in front of which nothing is missing.

    Raises: CutError
    """
    try:
        yield
    except CutError as error:
        if "(" not in error.message and (where := raised_at(error)):
            raise CutError(f"{error.message} ({where})", hint=error.hint) from error
        raise
    except _RAISED as error:
        if 0 in task.own_ops or _in_a_module(error):
            raise
        where = at(raised_at(error))
        clear_frames(error.__traceback__)  # they hold tensors
        text = (str(error).strip() or "no message").splitlines()[0]
        raise CutError(
            f"stage {task.stage} runs the code between modules without the data of other stages, and it "
            f"fails{where}: {type(error).__name__}: {text}",
            hint=KEEP_TOGETHER,
        ) from error


def _in_a_module(error: BaseException) -> bool:
    """Whether an error came out of one of the stage's own modules."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not StageRun._run.__code__:
        trace = trace.tb_next
    return trace is not None

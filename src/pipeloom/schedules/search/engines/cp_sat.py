"""The CP-SAT solver as the engines use it. OR-tools is an optional extra."""

from __future__ import annotations

from typing import Any


def new_solver(seed: int, effort: float) -> Any:
    """A solver that gives the same answer every time. effort: in CP-SAT's deterministic seconds.

    Raises: ImportError without OR-tools.
    """
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process at once ever after
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = effort
    return solver

"""The zoo of odd models: what the tests run, `bench/trust.py` tries and `docs/trust.md` lists.

A new odd model is one class and one row of `CASES`, in the file that is about its kind.
"""

from . import control_flow, gradients, state, values

CASES = [*control_flow.CASES, *state.CASES, *gradients.CASES, *values.CASES]

MODELS = {str(case): lambda case=case: case.job for case in CASES if not case.expect.startswith("random")}
"""As `bench/trust.py` reads them."""

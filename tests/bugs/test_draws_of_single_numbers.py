"""LayerDrop draws single numbers (`torch.rand([])`): comparing them with one process ended in a traceback."""

import odd_code
from odd_models import job
from runs import even_plan

from pipeloom import verify


def test_layers_that_are_left_out_are_compared() -> None:
    made = job(odd_code.LeavesOut)
    verify(made, even_plan(made, 2, microbatches=2)).require()

"""The memory that recomputing takes."""

import pytest
import zoo
from runs import capture_of, even

from pipeloom.ir.stages import cut
from pipeloom.tracer.stage.trace import stage_functions, stage_residuals


@pytest.mark.slow
def test_what_is_made_again_comes_on_top() -> None:
    """Recomputation reads residuals and leaves them: its memory was counted as if it freed them."""
    captured = capture_of(zoo.job("gpt"))
    graph = cut(captured.graph, even(captured.graph, 1))
    names = [name for place, name in enumerate(stage_residuals(captured, graph, 0)) if place % 2]
    functions = stage_functions(captured, graph, 0, treatments=dict.fromkeys(names, "recompute"), ahead=True)
    made = sum(functions.residual_bytes[name] for name in names)
    assert functions.peak_bytes["recompute"] >= made

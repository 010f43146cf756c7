"""Profiles without measuring, and compiling without a compiler: ratios that are known."""

from pipeloom.ir.profile import OpCost, Profile, batch_text
from pipeloom.ir.stages import StageGraph
from pipeloom.profiler.compiled_pieces import CompiledRatio
from pipeloom.profiler.measure_op import Timer
from pipeloom.tracer.captured import Captured


def profile_of(captured: Captured, **seconds: float) -> Profile:
    """Each op takes so long on this machine's CPU."""
    graph, cost = captured.graph, OpCost(**seconds)
    costs = {op.name: cost for op in graph.ops}
    batch = batch_text(graph.inputs)
    return Profile(device="cpu", source="measured", graph=graph.fingerprint, batch=batch, costs=costs)


class KnownRatios:
    """Measures nothing: forwards take half as long compiled, backwards three times as long.

    fails: a piece with this op cannot be compiled.
    """

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, captured: Captured, pieces: StageGraph, index: int, timer: Timer) -> CompiledRatio:
        ops = pieces.stages[index].ops
        self.asked.append(ops)
        if self.fails in ops:
            raise RuntimeError("no compiler was found\nand many more lines")
        return CompiledRatio(forward=0.5, backward=3.0)

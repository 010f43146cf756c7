"""Names of residuals: what a planner derives from graph and profile is what the stages have."""

from __future__ import annotations

from collections import Counter

import pytest
import zoo
from runs import capture_of, even

from pipeloom.ir.memory_policy import residual_names
from pipeloom.ir.profile import Profile
from pipeloom.ir.stages import Stage, cut
from pipeloom.profiler.measure_ops import measure
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.stage.trace import stage_functions

Sizes = dict[str, int]

QUICK = ("gpt", "convnet", "counting")
FAMILIES = [
    *QUICK,
    *(pytest.param(n, marks=pytest.mark.slow) for n in (*zoo.OWN, *zoo.FAMILIES) if n not in QUICK),
]

NOT_SAID = {"mixtral": ("aten.cumsum.default",)}
"""Ops whose results are kept though no profile says so: a custom autograd function's own choice."""


def derived(captured: Captured, profile: Profile, stage: Stage) -> tuple[Sizes, Sizes]:
    """Residuals that are values, and the bytes of all further tensors of each op."""
    names = residual_names(captured.graph)
    inside = {*stage.ops, *stage.clones}
    values, further = {}, {}
    for op in (captured.graph.op[name] for name in inside):
        cost = profile.costs[op.name]
        for saved in cost.saves:
            if captured.graph.producer.get(saved) in inside and saved in names:
                values[names[saved]] = captured.graph.value[saved].bytes
        if cost.extra_saved_bytes:
            further[op.name] = cost.extra_saved_bytes
    return values, further


def excused(captured: Captured, residual: str, more: tuple[str, ...]) -> bool:
    """Whether it depends on the cut how this is named, so that no planner does: it is always kept."""
    graph = captured.graph
    op = graph.op[residual]
    read_by = (graph.op[reader].target for v in op.outputs for reader in graph.consumers[v.name])
    return op.target in ("aten.reshape.default", *more) or "aten.broadcast_tensors.default" in read_by


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planner_names_what_the_stages_keep(name: str) -> None:
    captured = capture_of(zoo.job(name))
    profile = measure(captured, budget_s=0.0)
    for count in (1, 3):
        graph = cut(captured.graph, even(captured.graph, count))
        for index, stage in enumerate(graph.stages):
            kept = stage_functions(captured, graph, index).residual_bytes
            values, further = derived(captured, profile, stage)
            assert values.items() <= kept.items()
            found: Counter[str] = Counter()
            for residual in kept.keys() - values.keys():
                op, _, number = residual.partition(".")
                if number and int(number) >= len(captured.graph.op[op].outputs):
                    found[op] += kept[residual]
                else:
                    assert excused(captured, residual, NOT_SAID.get(name, ())), residual
            assert found == further

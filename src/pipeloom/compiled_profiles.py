"""Profiles of compiled functions: what planners see where the ranks will pass their stages to torch.compile.

The model is taken apart into its layers and what is between them. Each distinct piece is compiled once, and
its ops take their eager times by what the whole of it took compiled over eager; see
`profiler.compiled_pieces`. How much that is gets kept for a day, as op times are.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .caches import cache_folder, daily, may_keep, times_key
from .ir.errors import PlanError
from .ir.graph import OpGraph
from .ir.profile import Profile
from .ir.stages import StageGraph, cut
from .planner.search.layer_groups import borders, layer_names, layers
from .planner.stage_cost.tensors import Readers

if TYPE_CHECKING:
    from .profiler.compiled_pieces import CompiledRatio
    from .tracer.captured import Captured

MOST_OPS = 200
"""Ops of a piece; a longer one is taken apart further, since the time to compile it grows with them."""

BUDGET_S = 180.0
"""Seconds after which no further piece is compiled. Those that are left count as if they stayed eager."""

PIECE_S, FIRST_S = 8, 20
"""Seconds that compiling a layer and timing it takes about, and more for the first one: loading Inductor, and
what it compiles once. Measured on two shared cores, of the built-in GPT."""

COMPILER_VARIABLES = ("CC", "CXX", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_")
"""What names of environment variables begin with that change what is compiled, and how."""

_log = logging.getLogger("pipeloom")


def compiled_profile(captured: Captured, eager: Profile, *, device: str = "cpu") -> Profile:
    """The costs of a captured model's ops as parts of compiled functions.

    eager: their measured costs, each op alone.
    Compiling takes minutes at most (`BUDGET_S`), and is announced. What cannot be compiled keeps its eager
    times, which a line says, and so does `Profile.compiled`.
    """
    if eager.source != "measured" or eager.compiled:
        what = "costs of compiled functions" if eager.compiled else f"costs by {eager.source}"
        raise PlanError(f"{what} cannot be compared with compiled ones", hint="measure eager ops first")
    if captured.graph.fallback:
        why = "not measured, as this model is cut between its modules; eager ones stand for them"
        _log.warning("times of %s stay %s", captured.graph.name, why)
        return replace(eager, compiled=why)
    from .profiler.compiled_pieces import compiled_costs

    pieces = pieces_of(captured.graph)
    ratios = _ratios(captured, eager, pieces, device)
    costs = compiled_costs(eager, pieces, ratios)
    # How the costs of all pieces together compare with eager ones.
    ops = [name for piece in pieces.stages for name in piece.ops]

    def ratio(kind: str) -> float:
        before, after = (sum(getattr(p.costs[name], kind) for name in ops) for p in (eager, costs))
        return after / before if before else 1.0

    left = sum(1 for each in ratios if each.why_not)
    rest = f"; {left} of {len(pieces.stages)} pieces could not be compiled and count as eager" if left else ""
    forward, backward = ratio("forward_s"), ratio("backward_s")
    text = f"forwards {forward:.2f} and backwards {backward:.2f} times as long as eager{rest}"
    return replace(costs, compiled=text)


def pieces_of(graph: OpGraph) -> StageGraph:
    """A model as a chain of pieces: its layers and what is between them. One without layers is one piece. A
    piece of more than `MOST_OPS` ops is taken apart into equal ones."""
    readers = Readers(graph)
    allowed = [int(place) for place in readers.cut_points]
    within = [allowed[0], allowed[-1]]
    if any(layer_names(readers.ops).values()):
        within = borders(layers(readers.ops), allowed)
    places = [allowed[0]]
    for start, end in zip(within, within[1:], strict=False):
        parts = -(-(end - start) // MOST_OPS)
        wanted = [start + (end - start) * part // parts for part in range(1, parts)]
        places += [place for place in wanted if place in allowed] + [end]
    stage_of = {
        op.name: index
        for index, (start, end) in enumerate(zip(places, places[1:], strict=False))
        for op in readers.ops[start:end]
    }
    return cut(graph, stage_of)


def _ratios(captured: Captured, eager: Profile, pieces: StageGraph, device: str) -> list[CompiledRatio]:
    """One ratio per piece: those of the last day on this machine's CPU, and the others measured now. What
    could not be compiled, or not in time, is tried the next time."""
    import torch

    from .profiler.compiled_pieces import CompiledRatio, measure_ratios, piece_signatures
    from .profiler.measure_op import Timer

    signatures = piece_signatures(captured, pieces)
    keeps = device == "cpu" and may_keep(captured)

    def measure(kept: list[CompiledRatio] | None) -> list[CompiledRatio]:
        usable = kept if kept is not None and len(kept) == len(signatures) else []
        known = {s: ratio for s, ratio in zip(signatures, usable, strict=False) if not ratio.why_not}
        distinct = len(set(signatures) - known.keys())
        _log.warning(
            "compiling %d distinct pieces of %s to time them for the plan%s: about %d s, and after %.0f s no "
            "further one",
            distinct,
            captured.graph.name,
            ", once a day" if keeps else "",
            min(FIRST_S + PIECE_S * distinct, BUDGET_S),
            BUDGET_S,
        )
        ratios = measure_ratios(
            captured,
            pieces,
            {name: cost.forward_s + cost.backward_s for name, cost in eager.costs.items()},
            timer=Timer(torch.device(device), time.thread_time),
            budget_s=BUDGET_S,
            known=known,
        )
        layer_of = layer_names(captured.graph.ops)
        reasons: dict[str, list[str]] = {}  # why pieces could not be compiled -> their layers, or first ops
        for piece, ratio in zip(pieces.stages, ratios, strict=True):
            if ratio.why_not:
                first = captured.graph.op[piece.ops[0]]
                reasons.setdefault(ratio.why_not, []).append(layer_of[first.module] or first.name)
        for why_not, names in reasons.items():
            _log.warning("times of %s stay eager: %s", ", ".join(names), why_not)
        return ratios

    def is_whole(kept: list[CompiledRatio]) -> bool:
        return len(kept) == len(signatures) and not any(ratio.why_not for ratio in kept)

    if not keeps:
        return measure(None)
    chosen = sorted(item for item in os.environ.items() if item[0].startswith(COMPILER_VARIABLES))
    cuts = "".join(f"{piece.ops[0]} " for piece in pieces.stages)
    path = cache_folder("compiled") / f"{times_key(captured, 'compiled', cuts, chosen)}.json"
    return daily(path, list[CompiledRatio], measure, is_whole)

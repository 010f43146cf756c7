"""How long pieces of a model take compiled, against eager: what planners are told where ranks compile stages.

Inductor fuses ops, so that none has a time of its own. A piece is therefore a run of ops, such as a layer: it
is made as a stage would be, once eager and once through torch.compile, and both run in turns:

    eager      F B     F B     F B ...      medians of each
    compiled       F B     F B     F B

The ops of the piece then take their eager times by the ratio of the two, forward and backward apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from ..ir.profile import Profile
from ..ir.stages import StageGraph
from ..tracer.captured import Captured
from ..tracer.stage.functions import StageFunctions
from ..tracer.stage.trace import stage_functions
from ..tracer.tensors import copy_in_order
from .measure_op import LEAST_REPEATS, MOST_REPEATS, OpArguments, Timer, torch_threads
from .measure_ops import op_signatures

PIECE_S = 1.0
"""Seconds that each piece runs once it is compiled."""


@dataclass(frozen=True, kw_only=True)
class CompiledRatio:
    """Times of a compiled piece over its eager ones; no unit.

    why_not: why it could not be compiled, so that its times are the eager ones; else empty.
    Raises: ValueError for a ratio that no measurement gives.
    """

    forward: float = 1.0
    backward: float = 1.0
    why_not: str = ""

    def __post_init__(self) -> None:
        for ratio in (self.forward, self.backward):
            if not 0.0 < ratio < 1000.0:
                raise ValueError(f"compiled, a piece takes {ratio} times as long")


def piece_signatures(captured: Captured, pieces: StageGraph) -> list[Hashable]:
    """What the time of each piece depends on: its calls, how they are wired, and what leaves it. Pieces of
    equal signature, such as equal layers, take equally long."""
    calls = op_signatures(captured)
    graph = captured.graph
    place = {op.name: index for index, op in enumerate(graph.ops)}
    signatures: list[Hashable] = []
    for piece in pieces.stages:
        number: dict[str, int] = {}
        rows: list[Hashable] = []
        for name in sorted((*piece.ops, *piece.clones), key=place.__getitem__):
            op = graph.op[name]
            names = (*op.inputs, *op.params, *op.buffers, *op.updates, *(v.name for v in op.outputs))
            rows.append((calls[name], tuple(number.setdefault(n, len(number)) for n in names)))
        sent = {
            (number[c.value.name], c.value.needs_grad) for c in pieces.crossings if c.source == piece.index
        }
        came = {
            (number[c.value.name], c.value.needs_grad) for c in pieces.crossings if c.target == piece.index
        }
        ends = piece.index == pieces.loss_stage
        signatures.append((tuple(rows), tuple(sorted(sent)), tuple(sorted(came)), ends))
    return signatures


def time_piece(
    captured: Captured, pieces: StageGraph, index: int, timer: Timer, *, budget_s: float = PIECE_S
) -> tuple[float, float, float, float]:
    """Compile one piece and time it both ways, with one CPU thread.

    pieces: the model cut into them.  budget_s: for which it runs, at least `LEAST_REPEATS` times both ways.
    Returns: seconds of its eager forward and backward, and of its compiled ones.
    Raises: whatever the compiler raises.
    """
    device = str(timer.device)
    # A capture of its own: what is traced here, no stage of a plan will be.
    alone = replace(captured, traced={})
    eager, compiled = (
        _PieceRun(alone, stage_functions(alone, pieces, index, device=device, compiled=way), timer)
        for way in (False, True)
    )
    with torch_threads(1), torch.no_grad():
        for run in (eager, compiled) * 2:  # the second time nothing is compiled or made for the first time
            run()
        until = perf_counter() + budget_s
        times = [(*eager(), *compiled())]
        while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and perf_counter() < until):
            times.append((*eager(), *compiled()))
    eager_f, eager_b, compiled_f, compiled_b = (median(kind) for kind in zip(*times, strict=True))
    return eager_f, eager_b, compiled_f, compiled_b


def measure_piece(captured: Captured, pieces: StageGraph, index: int, timer: Timer) -> CompiledRatio:
    """What a piece takes compiled, over what it takes eager; raises as `time_piece`."""
    eager_f, eager_b, compiled_f, compiled_b = time_piece(captured, pieces, index, timer)
    return CompiledRatio(forward=_ratio(eager_f, compiled_f), backward=_ratio(eager_b, compiled_b))


def compiled_costs(profile: Profile, pieces: StageGraph, ratios: Sequence[CompiledRatio]) -> Profile:
    """A profile of eager ops as their pieces take, compiled. ratios: of each piece. Cheap ops, which are in
    none, stay as they are."""
    costs = dict(profile.costs)
    for piece, ratio in zip(pieces.stages, ratios, strict=True):
        costs |= {name: costs[name].scaled(ratio.forward, ratio.backward) for name in piece.ops}
    return replace(profile, costs=costs)


def _ratio(eager_s: float, compiled_s: float) -> float:
    """1 where there is nothing to run, such as a backward."""
    return compiled_s / eager_s if eager_s > 0.0 and compiled_s > 0.0 else 1.0


class _PieceRun:
    """One way to run a piece, forward and backward, on made-up numbers."""

    def __init__(self, captured: Captured, functions: StageFunctions, timer: Timer) -> None:
        self._functions = functions
        self._timer = timer
        self._sums = _Sums()
        arguments = OpArguments(captured, timer.device, {})
        values = captured.graph.value
        self._state = arguments.named((*functions.params, *functions.buffers))
        self._inputs = arguments.named((*functions.batch, *functions.received))
        for name in functions.received:
            self._inputs[name] = copy_in_order(self._inputs[name], values[name].order)

    def __call__(self) -> tuple[float, float]:
        """Seconds of a forward and of its backward."""
        functions, results = self._functions, []
        forward_s = self._timer.once(
            lambda: results.append(functions.forward(self._state, self._inputs, seed=0))
        )
        outputs, residuals = results.pop()
        grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
        outputs.clear()
        if not functions.differentiable:
            return forward_s, 0.0
        return forward_s, self._timer.once(
            lambda: functions.backward(self._state, residuals, grads, self._sums)
        )


class _Sums:
    """Adds gradients up as ranks do: an eager product is added while it is made."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.clone()

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        if name in self._sums:
            self._sums[name].addmm_(left, right)
        else:
            self._sums[name] = left @ right


def measure_ratios(
    captured: Captured,
    pieces: StageGraph,
    eager_s: Mapping[str, float],
    *,
    timer: Timer,
    budget_s: float,
    known: Mapping[Hashable, CompiledRatio],
) -> list[CompiledRatio]:
    """The ratio of each piece; equal pieces are compiled once, those that take most of the time first.

    eager_s: seconds of each op.  budget_s: no further piece is begun that would end later, if it took as
    long as the slowest one so far; the first one always is.  known: by signature, are not measured again.
    """
    signatures = piece_signatures(captured, pieces)
    weight: dict[Hashable, float] = dict.fromkeys(signatures, 0.0)
    for signature, piece in zip(signatures, pieces.stages, strict=True):
        weight[signature] += sum(eager_s[name] for name in piece.ops)
    found = dict(known)
    start, slowest_s = perf_counter(), 0.0
    for signature in sorted((s for s in weight if s not in known), key=lambda s: -weight[s]):
        begin = perf_counter()
        if slowest_s and begin - start + slowest_s > budget_s:
            found[signature] = CompiledRatio(why_not=f"compiling took {begin - start:.0f} s already")
            continue
        try:
            found[signature] = measure_piece(captured, pieces, signatures.index(signature), timer)
        except (RuntimeError, OSError) as error:  # the compiler's own, and of the compilers that it calls
            found[signature] = CompiledRatio(why_not=_first_line(error))
        slowest_s = max(slowest_s, perf_counter() - begin)
    return [found[signature] for signature in signatures]


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""Whether the stages of a cut between modules run: found out when a model is captured, not in its first step.

Every stage of the finest cut runs the forward once, on what the stages before it have sent; where the forward
may take several ways, for several seeds; and once in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...ir.errors import CutError
from ...ir.flow import flow_of
from ...ir.graph import OpGraph
from ...ir.stages import Stage, StageGraph, cut
from ..guards import attributes_kept
from ..job_calls import sample_batch
from ..stage.functions import DiscardSink, Tensors, activation_bytes
from ..tensors import LiveBytes
from .functions import ModuleFunctions
from .skeleton import initial_state


def trial_run(functions: ModuleFunctions, batch: Mapping[str, Tensor], device: torch.device) -> None:
    """Run each function once on initial weights and fill in what memory it takes: `residual_bytes`,
    `carried_bytes` and `peak_bytes`.

    batch: a micro-batch, on any device.
    """
    state = initial_state(functions.skeleton, [*functions.params, *functions.buffers], device)
    inputs = {n: t.to(device) for n, t in batch.items()} | dict(functions.examples)
    with attributes_kept(functions.skeleton.model), torch.random.fork_rng(), torch.no_grad():
        for split in (False, True):
            with _peak(functions, "forward"):
                outputs, residuals = functions.forward(state, inputs, 0)
            if not functions.differentiable:
                return
            functions.residual_bytes = {"autograd": activation_bytes(residuals)}
            grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
            outputs.clear()
            if not split:
                with _peak(functions, "backward", residuals):
                    functions.backward(state, residuals, grads, DiscardSink())
                continue
            try:
                with _peak(functions, "input_grad", residuals):
                    _, carried = functions.backward_input(state, residuals, grads)
            except CutError:  # it is an error only if the schedule splits the backward
                return
            functions.carried_bytes = activation_bytes(carried)
            with _peak(functions, "weight_grad", carried):
                functions.backward_weight(state, carried, DiscardSink())


@contextmanager
def _peak(functions: ModuleFunctions, name: str, given_up: Tensors | None = None) -> Iterator[None]:
    """Measure what runs in the block. given_up: to it, so that they count from the start."""
    with LiveBytes(t for slot, t in (given_up or {}).items() if slot.kind == "residual") as live:
        yield
    functions.peaks[name] = live.peak_bytes


TRIAL_LIMIT_BYTES = 2**30
"""Models of more are not tried as a whole: a rank tries its own stages when it builds its pipeline."""

TRIAL_WAYS = 4
"""How many micro-batches a forward is tried with that may take several ways."""


def finest_cut(graph: OpGraph) -> StageGraph:
    """A stage for each op, but for ops that share a buffer which one of them updates."""
    place = {op.name: index for index, op in enumerate(graph.ops)}
    spans = [
        range(min(at), max(at) + 1)
        for at in ([place[name] for name in ops] for ops in graph.together.values())
    ]
    stage_of: dict[str, int] = {}
    stage = -1
    for index, op in enumerate(graph.ops):
        stage += not any(index in span and index != span.start for span in spans)
        stage_of[op.name] = stage
    return cut(graph, stage_of)


def first_failure(
    functions: Sequence[ModuleFunctions], stages: StageGraph, batch: Mapping[str, Tensor], ways: int
) -> tuple[Stage, CutError] | None:
    """The first stage that cannot run, and why.

    functions: of all stages.  ways: how many micro-batches to train with.
    """
    skeleton, job = functions[0].skeleton, functions[0].job
    state = initial_state(skeleton, skeleton.names, torch.device("cpu"))
    rows = len(next(iter(batch.values())))
    with attributes_kept(skeleton.model), torch.random.fork_rng(devices=[]):
        for seed in range(ways + 1):
            other = sample_batch(job, seed, rows)
            same = all(other[n].shape == t.shape for n, t in batch.items())
            values: dict[str, Tensor] = dict(other if same else batch)
            for stage in flow_of(stages).order:
                runs = functions[stage]
                inputs = {name: values[name].clone() for name in (*runs.batch, *runs.received)}
                try:
                    trains = seed < ways
                    values |= runs.rehearse(state, inputs, seed) if trains else runs.evaluate(state, inputs)
                except CutError as error:
                    return stages.stages[stage], error
    return None

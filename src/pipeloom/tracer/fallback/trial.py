"""Trial runs of modules on the weights that the model initialises itself with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...ir.errors import CutError
from ..attributes import attributes_kept
from ..stage.functions import DiscardSink, activation_bytes
from .module_functions import ModuleFunctions
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
            outputs, residuals = functions.forward(state, inputs, 0)
            if not functions.differentiable:
                return
            functions.residual_bytes = {"autograd": activation_bytes(residuals)}
            grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
            outputs.clear()
            if not split:
                functions.backward(state, residuals, grads, DiscardSink())
                continue
            try:
                _, carried = functions.backward_input(state, residuals, grads)
            except CutError:  # it is an error only if the schedule splits the backward
                return
            functions.carried_bytes = activation_bytes(carried)
            functions.backward_weight(state, carried, DiscardSink())

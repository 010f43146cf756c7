"""Handlers of F, B, I, W and RECOMPUTE: they run stage functions, and keep what lies between them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir.action import RECOMPUTE, Action, B, F, I, Kind, W
from ..tracer.stage.functions import StageFunctions, activation_bytes
from ..tracer.tensors import zeros_like_value
from .ledger import crossing_bytes
from .loss_scaling import loss_gradient
from .offload.handlers import wait_reload
from .step_state import MicrobatchState, StepContext
from .transfer_handlers import hand_back, hand_over

PEAK_OF = {F: "forward", B: "backward", I: "input_grad", W: "weight_grad", RECOMPUTE: "recompute"}
"""Kind -> its key in `StageFunctions.peak_bytes`."""


class Compute:
    """Runs the compute actions of a rank.

    It remembers what an action of each kind and stage has last left behind, in bytes, which is part of what
    the next one needs.
    """

    def __init__(self) -> None:
        self._left_bytes: dict[tuple[int, Kind], int] = {}

    def forward(self, step: StepContext, action: Action) -> None:
        """F: inputs -> outputs and residuals."""
        microbatch, state, functions = step.microbatch(action), step.state(action), step.functions(action)
        parameters = step.parameters(action)
        inputs = state.inputs | {name: microbatch.inputs[name] for name in functions.batch}
        with step.recorder.record("compute", str(action)):
            if step.training:
                outputs, state.residuals = functions.forward(parameters, inputs, microbatch.seed)
            else:
                outputs = functions.evaluate(parameters, inputs)
        if step.training:
            size = activation_bytes(state.residuals)
            self._count_peak(step, action, residuals=size)
            step.count_residuals(action, state, size)
        for name in [n for n in outputs if n.startswith("buffer:")]:
            step.weights.replace_buffer(name.removeprefix("buffer:"), outputs.pop(name))
        if functions.loss is not None:
            loss = step.losses[step.number(action)] = outputs.pop(functions.loss)
            state.output_grads[functions.loss] = loss_gradient(loss, microbatch)
        hand_over(step, action, outputs)
        inputs_stay = step.training and not functions.kept_inputs.isdisjoint(state.inputs)
        state.inputs = {}
        if not inputs_stay:
            step.in_flight.release_inputs(state, step.channel)

    def backward(self, step: StepContext, action: Action) -> None:
        """B: residuals and gradients of outputs -> gradients of inputs and parameters."""
        state, functions = step.state(action), step.functions(action)
        if not functions.differentiable:
            return self._skip_backward(step, action, state)
        wait_reload(step, state)
        grads, parameters = _output_grads(step, action, functions), step.parameters(action)
        with step.recorder.record("compute", str(action)):
            input_grads = functions.backward(parameters, state.residuals, grads, step.weights.grads)
        self._count_peak(step, action)
        step.count_residuals(action, state, -state.residual_bytes)
        state.output_grads = {}
        step.in_flight.release_inputs(state, step.channel)
        step.release_version(state)
        hand_back(step, action, input_grads)

    def backward_input(self, step: StepContext, action: Action) -> None:
        """I: residuals and gradients of outputs -> gradients of inputs, and what W needs."""
        state, functions = step.state(action), step.functions(action)
        if not functions.differentiable:
            return self._skip_backward(step, action, state)
        wait_reload(step, state)
        grads, parameters = _output_grads(step, action, functions), step.parameters(action)
        with step.recorder.record("compute", str(action)):
            input_grads, state.carried = functions.backward_input(parameters, state.residuals, grads)
        self._count_peak(step, action)
        step.count_residuals(action, state, -state.residual_bytes)
        step.count_residuals(action, state, activation_bytes(state.carried))
        state.output_grads = {}
        hand_back(step, action, input_grads)

    def backward_weight(self, step: StepContext, action: Action) -> None:
        """W: what I has left -> gradients of parameters."""
        state, functions = step.state(action), step.functions(action)
        if not functions.differentiable:
            return step.release_version(state)
        parameters = step.parameters(action)
        with step.recorder.record("compute", str(action)):
            functions.backward_weight(parameters, state.carried, step.weights.grads)
        self._count_peak(step, action)
        step.release_version(state)
        step.count_residuals(action, state, -state.residual_bytes)
        step.in_flight.release_inputs(state, step.channel)

    def recompute(self, step: StepContext, action: Action) -> None:
        """RECOMPUTE: the residuals that were kept -> those that were dropped."""
        state, functions = step.state(action), step.functions(action)
        wait_reload(step, state)
        parameters = step.parameters(action)
        with step.recorder.record("compute", str(action)):
            residuals = functions.recompute(parameters, state.residuals)
        state.residuals |= residuals
        size = activation_bytes(residuals)
        self._count_peak(step, action, residuals=size)
        step.count_residuals(action, state, size)

    def needed_bytes(self, step: StepContext, action: Action) -> int:
        """Bytes that an action takes on top of what is there."""
        peak = step.functions(action).peak_bytes.get(PEAK_OF[action.kind], 0)
        return max(peak, self._left_bytes.get((action.stage, action.kind), 0))

    def _count_peak(self, step: StepContext, action: Action, **left: int) -> None:
        """Enter what an action held while it ran. left: bytes by kind that outlive it, besides what it makes
        for other stages. Raises: MemoryCapError."""
        peak = step.functions(action).peak_bytes[PEAK_OF[action.kind]]
        values, grads = crossing_bytes(step.stages_of(action), action.stage)
        left["boundary"] = {F: values, W: 0, RECOMPUTE: 0}.get(action.kind, grads)
        self._left_bytes[action.stage, action.kind] = sum(left.values())
        step.recorder.burst(step.ledger.total + peak)
        step.ledger.during(str(action), peak, left)

    def _skip_backward(self, step: StepContext, action: Action, state: MicrobatchState) -> None:
        """A stage without gradients, as one of frozen parameters on the model's inputs."""
        state.residuals = {}
        if action.kind == B:
            step.release_version(state)
        step.count_residuals(action, state, -state.residual_bytes)
        step.in_flight.release_inputs(state, step.channel)


def _output_grads(step: StepContext, action: Action, functions: StageFunctions) -> dict[str, Tensor]:
    """Gradients of all outputs; zero for one whose readers gave none."""
    stages = step.stages_of(action)
    crossing = [v for t in stages.successors[action.stage] for v in stages.between[action.stage, t]]
    values = {v.name: v for v in crossing if v.needs_grad}
    grads = step.state(action).output_grads
    device = next(iter(step.parameters(action).values()), torch.empty(0)).device
    for name in functions.sent:
        if name in values and name not in grads:
            grads[name] = zeros_like_value(values[name], device)
    return grads

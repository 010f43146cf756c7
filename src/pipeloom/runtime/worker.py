"""Worker: walks one rank's row of a Program. A dispatch table and one loop.

It knows actions, stage functions and a channel; not how a schedule was made, nor what a planner is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.action import (
    KINDS,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STEP,
    Action,
    B,
    F,
    I,
    Instruction,
    Kind,
    StageAction,
    Transfer,
    W,
)
from ..ir.graph import Value
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program
from ..ir.tied_gradients import reductions
from ..tracer import StageFunctions, activation_bytes, zeros_like_value
from .failure import Watch
from .ledger import Ledger, crossing_bytes
from .messages import Channel, Message
from .offload import Tier
from .operations import Operations
from .recorder import Recorder
from .residuals import Residuals
from .step_state import Microbatch as Microbatch, MicrobatchState, Variant as Variant
from .weights import Weights, clip_factor

Key = tuple[int, int]
"""(stage, micro-batch)."""


class Worker:
    """Runs the steps of one rank."""

    def __init__(
        self,
        *,
        rank: int,
        program: Program,
        weights: Weights,
        channel: Channel,
        ledger: Ledger,
        recorder: Recorder,
        watch: Watch,
        clip_norm: float | None = None,
        tier: Tier | None = None,
    ) -> None:
        self.rank = rank
        self.program = program
        self.weights = weights
        self.channel = channel
        self.ledger = ledger
        self.recorder = recorder
        self.watch = watch
        self.clip_norm = clip_norm
        self.grad_norm: float | None = None
        self.training = True
        self.update = True
        self.updating = False
        self.losses: dict[int, Tensor] = {}
        self.microbatches: Sequence[Microbatch] = ()
        self.flights: dict[Key, MicrobatchState] = {}
        self.local_bytes = 0
        self.made_bytes: dict[tuple[int, Kind], int] = {}
        self.messages: dict[tuple[int, Transfer], Message] = {}
        self.handlers: dict[Kind, Callable[[Any], None]] = {
            F: self.forward,
            B: self.backward,
            I: self.backward_input,
            W: self.backward_weight,
            SEND_F: self.send,
            SEND_B: self.send,
            RECV_F: self.receive,
            RECV_B: self.receive,
            REDUCE: self.reduce,
            STEP: self.step,
        }
        self.operations = Operations(self)
        added = [kind for kind, row in KINDS.items() if kind in OPERATIONS or row.handler is not None]
        self.handlers |= dict.fromkeys(added, self.operations.begin)
        self.residuals = Residuals(self, tier)
        self.handlers |= self.residuals.handlers

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        program: Program | None = None,
        training: bool = True,
        update: bool = True,
    ) -> dict[int, Tensor]:
        """Run one step.

        microbatches: of all replicas of the stages, in the order in which `ir.stages` deals them out.
        program: another program than the training one, such as the forward-only one.
        update: whether the step ends with the optimizer; if not, gradients stay for the next one.
        Returns: micro-batch -> loss, on the rank of the loss stage; elsewhere nothing.
        """
        current = program or self.program
        self.microbatches, self.training, self.update = microbatches, training, update
        self.placement, self.share = current.placement, current.microbatches
        self.losses = {}
        row = current.rows[self.rank]
        with torch.no_grad():
            self.channel.begin(self._incoming(current))
            for instruction in row:
                self.watch.status = str(instruction)
                self.operations.settle(instruction)
                self.residuals.settle()
                self.residuals.make_room(instruction)
                self.handlers[instruction.kind](instruction)
                self._note_boundary(instruction)
            with self.recorder.record("recv", "END"):
                self.channel.end()
        self._note_boundary(None)
        assert not any(f.residuals or f.carried for f in self.flights.values()) or not training
        self.flights = {}
        return self.losses

    def forget(self) -> None:
        """Forget what a step that was broken off has left, gradients too: nothing will ask for it.

        Waits for operations that it has begun, as they may still write to gradients.
        """
        self.operations.give_up()
        self.residuals.give_up()
        for flight in self.flights.values():
            self._release(flight)
        self.local_bytes = 0
        self.flights = {}
        self.weights.discard_gradients()
        for kind in ("residuals", "transient"):
            self.ledger.set(kind, 0)
        self._note_boundary(None)

    def _incoming(self, program: Program) -> list[Message]:
        return [
            self._message(send)
            for (_, target), sends in program.messages.items()
            if target == self.rank
            for send in sends
            if isinstance(send, Transfer)
        ]

    def _message(self, send: Transfer) -> Message:
        """The message of a SEND; the same object every step."""
        key = (id(self._microbatch(send).variant), send)
        if key not in self.messages:
            self.messages[key] = Message(
                key=str(send),
                source=self.placement[send.stage],
                target=self.placement[send.peer],
                values=self._values(send),
            )
        return self.messages[key]

    def _values(self, send: Transfer) -> tuple[Value, ...]:
        stages = self._microbatch(send).variant.stages
        if send.kind == SEND_F:
            return stages.between[send.stage, send.peer]
        return stages.gradients(send.peer, send.stage)

    def _flight(self, action: Action | Transfer) -> MicrobatchState:
        return self.flights.setdefault((action.stage, action.microbatch), MicrobatchState())

    def _number(self, action: Action | Transfer) -> int:
        stages = self.microbatches[0].variant.stages
        return stages.number(action.stage, action.microbatch, of=self.share)

    def _microbatch(self, action: Action | Transfer) -> Microbatch:
        return self.microbatches[self._number(action)]

    def functions(self, action: Action) -> StageFunctions:
        return self._microbatch(action).variant.functions[action.stage]

    def state(self, action: Action) -> Mapping[str, Tensor]:
        return self.weights.state(self._number(action))

    def forward(self, action: Action) -> None:
        microbatch, flight = self._microbatch(action), self._flight(action)
        functions = self.functions(action)
        state = self.state(action)
        inputs = flight.inputs | {name: microbatch.inputs[name] for name in functions.batch}
        with self.recorder.record("compute", str(action)):
            if not self.training:
                outputs = functions.evaluate(state, inputs)
            else:
                outputs, flight.residuals = functions.forward(state, inputs, microbatch.seed)
        if self.training:
            flight.residual_bytes = activation_bytes(flight.residuals)
            self.note_scratch(action, "forward", residuals=flight.residual_bytes)
            self.ledger.add("residuals", flight.residual_bytes, str(action))
        for name in [n for n in outputs if n.startswith("buffer:")]:
            self.weights.replace_buffer(name.removeprefix("buffer:"), outputs.pop(name))
        if functions.loss is not None:
            loss = self.losses[self._number(action)] = outputs.pop(functions.loss)
            flight.grads[functions.loss] = torch.tensor(
                microbatch.weight, dtype=loss.dtype, device=loss.device
            )
        self._hand_over(action, outputs)
        kept = self.training and not functions.kept_inputs.isdisjoint(flight.inputs)
        flight.inputs = {}
        if not kept:
            self._release(flight)

    def _hand_over(self, action: Action, outputs: dict[str, Tensor]) -> None:
        """Give outputs to stages on this rank; keep for SEND what others need."""
        stages = self._microbatch(action).variant.stages
        flight = self._flight(action)
        for target in stages.successors[action.stage]:
            values = stages.between[action.stage, target]
            if self.placement[target] == self.rank:
                neighbour = self.flights.setdefault((target, action.microbatch), MicrobatchState())
                neighbour.inputs.update((v.name, outputs[v.name]) for v in values)
                neighbour.local_bytes += sum(v.bytes for v in values)
                self.local_bytes += sum(v.bytes for v in values)
            else:
                flight.sends_left += 1
                flight.outputs.update((v.name, outputs[v.name]) for v in values)

    def backward(self, action: Action) -> None:
        flight, functions = self._flight(action), self.functions(action)
        if not functions.differentiable:
            return self._skip_backward(flight)
        self.residuals.gather(flight)
        grads = self._output_grads(action, functions)
        state = self.state(action)
        with self.recorder.record("compute", str(action)):
            made = functions.backward(state, flight.residuals, grads, self.weights.grads)
        self.note_scratch(action, "backward")
        self._free_residuals(flight)
        flight.grads = {}
        self._release(flight)
        self._give_back(action, made)

    def backward_input(self, action: Action) -> None:
        flight, functions = self._flight(action), self.functions(action)
        if not functions.differentiable:
            return self._skip_backward(flight)
        self.residuals.gather(flight)
        grads = self._output_grads(action, functions)
        state = self.state(action)
        with self.recorder.record("compute", str(action)):
            made, flight.carried = functions.backward_input(state, flight.residuals, grads)
        self.note_scratch(action, "input_grad")
        self._free_residuals(flight)
        flight.residual_bytes = activation_bytes(flight.carried)
        self.ledger.add("residuals", flight.residual_bytes, str(action))
        flight.grads = {}
        self._give_back(action, made)

    def backward_weight(self, action: Action) -> None:
        flight, functions = self._flight(action), self.functions(action)
        if not functions.differentiable:
            return
        state = self.state(action)
        with self.recorder.record("compute", str(action)):
            functions.backward_weight(state, flight.carried, self.weights.grads)
        self.note_scratch(action, "weight_grad")
        self._free_residuals(flight)
        self._release(flight)

    def _skip_backward(self, flight: MicrobatchState) -> None:
        flight.residuals = {}
        self._free_residuals(flight)
        self._release(flight)

    def _free_residuals(self, flight: MicrobatchState) -> None:
        self.ledger.add("residuals", -flight.residual_bytes)
        flight.residual_bytes = 0

    def _release(self, flight: MicrobatchState) -> None:
        for message in flight.received:
            self.channel.release(message)
        flight.received = []
        self.local_bytes -= flight.local_bytes
        flight.local_bytes = 0

    def _output_grads(self, action: Action, functions: StageFunctions) -> dict[str, Tensor]:
        """Gradients of all outputs; zero for one whose readers gave none."""
        values = {v.name: v for v in self._crossing(action) if v.needs_grad}
        grads = self._flight(action).grads
        state = next(iter(self.state(action).values()), torch.empty(0))
        for name in functions.sent:
            if name in values and name not in grads:
                grads[name] = zeros_like_value(values[name], state.device)
        return grads

    def _crossing(self, action: Action) -> list[Value]:
        stages = self._microbatch(action).variant.stages
        return [v for target in stages.successors[action.stage] for v in stages.between[action.stage, target]]

    def _give_back(self, action: Action, made: dict[str, Tensor]) -> None:
        """Give input gradients to stages on this rank; keep for SEND what others need."""
        stages = self._microbatch(action).variant.stages
        flight = self._flight(action)
        for source in stages.predecessors[action.stage]:
            for value in stages.gradients(source, action.stage):
                grad = made.get(value.name)
                if grad is None:
                    device = next(iter(made.values())).device if made else "cpu"
                    grad = zeros_like_value(value, device)
                if self.placement[source] == self.rank:
                    _add(self.flights[source, action.microbatch].grads, value.name, grad)
                else:
                    flight.input_grads[value.name] = grad
            if self.placement[source] != self.rank and stages.gradients(source, action.stage):
                flight.sends_left += 1

    def send(self, transfer: Transfer) -> None:
        flight = self._flight(transfer)
        held = flight.outputs if transfer.kind == SEND_F else flight.input_grads
        message = self._message(transfer)
        self.channel.send(message, [held[v.name] for v in message.values])
        flight.sends_left -= 1
        if not flight.sends_left:
            held.clear()

    def opening_bytes(self, transfer: Transfer) -> int:
        """Bytes of the buffers that a RECV opens."""
        return self.channel.opening_bytes(self._message(transfer.other_end))

    def finish_send(self) -> bool:
        """Wait until the oldest message under way is taken. Returns False if there is none."""
        with self.recorder.record("recv", "ROOM"):
            found = self.channel.finish_send()
        self._note_boundary(None)
        return found

    def receive(self, transfer: Transfer) -> None:
        flight = self._flight(transfer)
        message = self._message(transfer.other_end)
        with self.recorder.record("recv", str(transfer)):
            tensors = self.channel.receive(message)
        flight.received.append(message)
        for value, tensor in zip(message.values, tensors, strict=True):
            if transfer.kind == RECV_F:
                flight.inputs[value.name] = tensor
            else:
                _add(flight.grads, value.name, tensor)

    def reduce(self, action: StageAction) -> None:
        if not self.update:
            return
        stages = self.microbatches[0].variant.stages
        with self.recorder.record("recv", str(action)):
            for tie in reductions(stages, self.placement)[self.rank]:
                if tie.name in self.weights.grads.sums:
                    self.channel.all_reduce(self.weights.grads.total(tie.name), tie.ranks)

    def step(self, action: StageAction) -> None:
        """The optimizer holds all stages of the rank: it runs at the last STEP of the row."""
        last = max(s for s, rank in enumerate(self.placement) if rank == self.rank)
        if not self.update or action.stage != last:
            return
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        self.updating = True
        with self.recorder.record("compute", str(action)):
            self.weights.step()
        self.ledger.set("optimizer", self.weights.sizes["optimizer"], str(action))
        self.ledger.during(str(action), self.weights.step_bytes, {})

    def _clip(self, limit: float) -> None:
        """Scale gradients by the norm over all ranks; a tied parameter counts once."""
        stages = self.microbatches[0].variant.stages
        mine = [
            name
            for name in self.weights.grads.sums
            if self.rank == min(self.placement[s] for s in stages.tied.get(name, (self._any_stage,)))
        ]
        squares = self.weights.norm_squares(mine).reshape(1)
        with self.recorder.record("recv", "CLIP"):
            self.channel.all_reduce(squares)
        self.grad_norm = float(squares.sqrt())
        factor = clip_factor(self.grad_norm, limit)
        if factor < 1.0:
            self.weights.scale_gradients(factor)

    @property
    def _any_stage(self) -> int:
        return self.placement.index(self.rank)

    def note_scratch(self, action: Action, function: str, **made: int) -> None:
        """made: bytes by kind that outlive the action, besides what it makes for other stages."""
        peak = self.functions(action).peak_bytes[function]
        values, grads = crossing_bytes(self._microbatch(action).variant.stages, action.stage)
        made["boundary"] = {F: values, W: 0, RECOMPUTE: 0}.get(action.kind, grads)
        self.made_bytes[action.stage, action.kind] = sum(made.values())
        self.recorder.burst(self.ledger.total + peak)
        self.ledger.during(str(action), peak, made)

    def _note_boundary(self, instruction: Instruction | None) -> None:
        held = self.channel.held_bytes + self.channel.sending_bytes + self.local_bytes
        self.ledger.set("boundary", held, str(instruction or ""))
        self.recorder.level(self.ledger.total)


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add to what is there without writing to it: a received buffer or another stage may own it."""
    grads[name] = grads[name] + grad if name in grads else grad

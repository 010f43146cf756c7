"""What passes between stages: handlers of SEND_F, SEND_B, RECV_F and RECV_B, and values within one rank.

F of stage s ─ hand_over ─┬─ reader on this rank:  its inputs, at once
                          └─ reader elsewhere:     outputs, until SEND_F ──▶ RECV_F: its inputs
B, I         ─ hand_back ─── the same for gradients, with SEND_B and RECV_B
"""

from __future__ import annotations

from torch import Tensor

from ..ir.action import RECV_F, SEND_F, Action, Transfer
from ..tracer.tensors import zeros_like_value
from .messages import Message
from .step_state import StepContext


class Transfers:
    """Sends and receives the messages of a rank's program."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, Transfer], Message] = {}

    def incoming(self, step: StepContext) -> list[Message]:
        """All messages that this rank will get, per source in the order it sends them."""
        if step.incoming is not None:
            return [self._message(step, send) for send in step.incoming]
        return [
            self._message(step, send)
            for (_, target), sends in step.program.messages.items()
            if target == step.rank
            for send in sends
            if isinstance(send, Transfer)
        ]

    def send(self, step: StepContext, transfer: Transfer) -> None:
        """SEND_F, SEND_B: hand a message's values to the channel, which posts the send."""
        state = step.state(transfer)
        values = state.outputs if transfer.kind == SEND_F else state.input_grads
        message = self._message(step, transfer)
        step.channel.send(message, [values[v.name] for v in message.values])
        state.sends_left -= 1
        if not state.sends_left:
            values.clear()

    def receive(self, step: StepContext, transfer: Transfer) -> None:
        """RECV_F, RECV_B: wait for a message; its buffer stays until the stage has used it."""
        state = step.state(transfer)
        message = self._message(step, transfer.other_end)
        with step.recorder.record("recv", str(transfer)):
            tensors = step.channel.receive(message)
        state.received.append(message)
        for value, tensor in zip(message.values, tensors, strict=True):
            if transfer.kind == RECV_F:
                state.inputs[value.name] = tensor
            else:
                _add(state.output_grads, value.name, tensor)

    def needed_bytes(self, step: StepContext, transfer: Transfer) -> int:
        """Bytes of the buffers that a RECV opens."""
        return step.channel.opening_bytes(self._message(step, transfer.other_end))

    def _message(self, step: StepContext, send: Transfer) -> Message:
        """The message of a SEND; the same object every step."""
        key = (id(step.microbatch(send).variant), send)
        if key not in self._messages:
            stages = step.stages_of(send)
            values = (
                stages.between[send.stage, send.peer]
                if send.kind == SEND_F
                else stages.gradients(send.peer, send.stage)
            )
            self._messages[key] = Message(
                key=str(send),
                source=step.placement[send.stage],
                target=step.placement[send.peer],
                values=values,
            )
        return self._messages[key]


def hand_over(step: StepContext, action: Action, outputs: dict[str, Tensor]) -> None:
    """Give a forward's outputs to stages on this rank; keep for SEND_F what others need."""
    stages, state = step.stages_of(action), step.state(action)
    for target in stages.successors[action.stage]:
        values = stages.between[action.stage, target]
        if step.placement[target] == step.rank:
            reader = step.in_flight.state(target, action.microbatch)
            reader.inputs.update((v.name, outputs[v.name]) for v in values)
            reader.local_bytes += sum(v.bytes for v in values)
            step.in_flight.local_bytes += sum(v.bytes for v in values)
        else:
            state.sends_left += 1
            state.outputs.update((v.name, outputs[v.name]) for v in values)


def hand_back(step: StepContext, action: Action, input_grads: dict[str, Tensor]) -> None:
    """Give a backward's input gradients to stages on this rank; keep for SEND_B what others need.

    An input that got no gradient gets zeros: whoever made it waits for one.
    """
    stages, state = step.stages_of(action), step.state(action)
    device = next(iter(input_grads.values())).device if input_grads else "cpu"
    for source in stages.predecessors[action.stage]:
        values, here = stages.gradients(source, action.stage), step.placement[source] == step.rank
        for value in values:
            grad = input_grads.get(value.name)
            if grad is None:
                grad = zeros_like_value(value, device)
            if here:
                _add(step.in_flight.states[source, action.microbatch].output_grads, value.name, grad)
            else:
                state.input_grads[value.name] = grad
        if values and not here:
            state.sends_left += 1


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add to what is there without writing to it: a received buffer or another stage may own it."""
    grads[name] = grads[name] + grad if name in grads else grad

"""A rank's part of a step: it walks its row of a program, and keeps what lies between two instructions.

    for work in row:   room for it ─▶ verbs[kind](self, work) ─▶ count what is held

An instruction is looked up once per program and size of micro-batches (`RankWork`): which functions it runs,
who reads what they make, and how many bytes that is. What passes between stages:

    F of stage s ─ hand over ─┬─ reader on this rank:  its inputs, at once
                              └─ reader elsewhere:     outputs, until SEND_F ──▶ RECV_F: its inputs
    B, I         ─ hand back ─── the same for gradients, with SEND_B and RECV_B

Copies of residuals run beside the computation. The ledger learns of their progress between two instructions:
residuals count until the copy away has ended, and again from the start of the copy back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch.profiler import record_function

from ..ir.action import (
    AWAIT,
    KINDS,
    OFFLOAD,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    RELOAD,
    SEND_B,
    SEND_F,
    STEP,
    Action,
    B,
    F,
    I,
    Kind,
    W,
)
from ..ir.graph import Value
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..tracer.stage.functions import MODEL_OUTPUT, StageFunctions, Tensors, activation_bytes
from ..tracer.tensors import zeros_like_value
from .channel import Channel
from .ledger import Ledger, crossing_bytes, out_of_memory_told
from .messages import Message
from .operations import Operations
from .recorder import Recorder
from .reduce_and_step import ReduceAndStep
from .tier import Copy, Tier
from .watch import Watch
from .weights import Weights

PEAK_OF = {F: "forward", B: "backward", I: "input_grad", W: "weight_grad", RECOMPUTE: "recompute"}
"""Kind -> its key in `StageFunctions.peak_bytes`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The stages for one size of micro-batch: same cut, other shapes.

    functions: of this rank's stages; those of a stage's replicas are the same.
    flops: of matrix products, to train all stages on one micro-batch; 0 where nobody asks.
    decides: data or random numbers decide which modules a step calls.
    """

    stages: StageGraph
    functions: Mapping[int, StageFunctions]
    flops: float = 0.0
    decides: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One micro-batch of a step.

    inputs: by name, those of the whole model.
    weight: its share of the step's loss; the shares of a step add up to 1.
    number: among those of one replica, from the start of training; says which weights it uses.
    """

    variant: Variant
    inputs: Mapping[str, Tensor]
    weight: float
    seed: int
    number: int = 0


class Neighbour(NamedTuple):
    """A stage that reads what another one makes, or made what it reads, and the values between them."""

    stage: int
    here: bool
    values: tuple[Value, ...]
    bytes: int


class Wiring:
    """One stage for one size of micro-batch: its functions, and the stages around it.

    readers: of its outputs.  sources: of its inputs, with the values whose gradients they wait for.
    sent_bytes, returned_bytes: of what it makes for either; each reader's copy counts.
    awaited: outputs whose gradients the backward reads, with zeros where no reader gives one.
    left_bytes: by kind, what its last action left, as the next may too.
    """

    def __init__(self, variant: Variant, stage: int, placement: Sequence[int]) -> None:
        self.variant, self.functions = variant, variant.functions[stage]
        stages = variant.stages

        def neighbour(other: int, values: tuple[Value, ...]) -> Neighbour:
            here = placement[other] == placement[stage]
            return Neighbour(other, here, values, sum(value.bytes for value in values))

        self.readers = [neighbour(t, stages.between[stage, t]) for t in stages.successors[stage]]
        self.sources = [neighbour(s, stages.gradients(s, stage)) for s in stages.predecessors[stage]]
        self.sent_bytes, self.returned_bytes = crossing_bytes(stages, stage)
        crossing = {v.name: v for reader in self.readers for v in reader.values if v.needs_grad}
        self.awaited = [crossing[name] for name in self.functions.sent if name in crossing]
        self.differentiable = self.functions.differentiable
        self.left_bytes: dict[Kind, int] = {}
        self._activation_bytes: dict[Kind, int] = {}

    def activation_bytes(self, kind: Kind, tensors: Tensors) -> int:
        """Of what an action has made and leaves; counted once of a graph, which always leaves the same."""
        if kind not in self._activation_bytes or not self.functions.leaves_the_same:
            self._activation_bytes[kind] = activation_bytes(tensors)
        return self._activation_bytes[kind]

    def needed_bytes(self, kind: Kind) -> int:
        return max(self.functions.peak_bytes.get(PEAK_OF[kind], 0), self.left_bytes.get(kind, 0))


@dataclass(frozen=True, slots=True, eq=False)
class RankWork:
    """An instruction of a row, with all that is known of it before the step.

    key: stage and micro-batch; -1 for what a stage does once.  index: the micro-batch among all of the step.
    message: of a transfer.
    """

    instruction: Action
    text: str
    kind: Kind
    key: tuple[int, int]
    index: int
    wiring: Wiring
    message: Message | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """A rank's row of a program, for micro-batches of certain sizes.

    program: kept, so that no other one gets its id.  incoming: all messages that the rank will get, per
    source in the order it sends them.  receives: the same in the order of the row.
    """

    program: Program
    variants: Sequence[Variant]
    works: Sequence[RankWork]
    incoming: Sequence[Message]
    receives: Sequence[Message]


@dataclass(eq=False)
class Kept:
    """What a stage keeps of one micro-batch between its actions.

    inputs, outputs: crossing values: those that the forward will read, and those that a SEND_F will.
    output_grads, input_grads: their gradients: of outputs, for the backward; of inputs, for a SEND_B.
    sends_left: how many SENDs are still to come.
    received: messages whose buffers inputs or gradients lie in.
    local_bytes: of values that another stage of this rank handed over.
    residuals: what the forward left for the backward.  carried: what I left for W.
    residual_bytes: of either, as the ledger counts them.
    copy: what is on its way to the tier and back.
    version: of the weights that it uses; None before its forward.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_grads: dict[str, Tensor] = field(default_factory=dict)
    input_grads: dict[str, Tensor] = field(default_factory=dict)
    sends_left: int = 0
    received: list[Message] = field(default_factory=list)
    local_bytes: int = 0
    residuals: Tensors = field(default_factory=dict)
    carried: Tensors = field(default_factory=dict)
    residual_bytes: int = 0
    copy: Copy | None = None
    version: int | None = None


class Rank:
    """Runs the steps of one rank.

    program: the training program.  clip_norm: limit of the gradients' global norm.
    tier: where residuals go; None if the program offloads nothing.  after_step: called after each update.
    kept: (stage, micro-batch) -> what is kept of it.  running: the program that ran last.
    look: called with what each F, B, I and W has made, see `action_hooks`.
    outputs: micro-batch -> outputs of the model that this rank makes, where the last step was asked for them.
    """

    def __init__(
        self,
        *,
        program: Program,
        weights: Weights,
        channel: Channel,
        ledger: Ledger,
        recorder: Recorder,
        watch: Watch,
        clip_norm: float | None = None,
        tier: Tier | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.weights = channel.rank, weights
        self.program = self.running = program
        self.channel, self.ledger, self.recorder, self.watch = channel, ledger, recorder, watch
        self.tier = tier
        self.kept: defaultdict[tuple[int, int], Kept] = defaultdict(Kept)
        self._copies: dict[Copy, Kept] = {}
        self._handed_over_bytes = 0
        self._training = True
        self._microbatches: Sequence[Microbatch] = ()
        self._losses: dict[int, Tensor] = {}
        self.outputs: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        self._rows: dict[int, Row] = {}
        self._wirings: dict[tuple[Variant, int], Wiring] = {}
        self._messages: dict[tuple[Variant, Action], Message] = {}
        self.look: Callable[..., None] | None = None
        # No cycle: what a rank holds on a device goes with its last reference.
        self.operations = Operations(proxy(self))
        self.reduce_and_step = ReduceAndStep(proxy(self), clip_norm, after_step)
        added = [k for k, row in KINDS.items() if row.handler is not None or row.category == "compute"]
        self.verbs: dict[Kind, Callable[[Rank, RankWork], None]] = {
            **dict.fromkeys(added, lambda rank, work: rank.operations.begin(work)),
            F: Rank._forward,
            B: Rank._backward,
            I: Rank._backward,
            W: Rank._backward,
            RECOMPUTE: Rank._recompute,
            SEND_F: Rank._send,
            SEND_B: Rank._send,
            RECV_F: Rank._receive,
            RECV_B: Rank._receive,
            OFFLOAD: Rank._offload,
            AWAIT: Rank._await_offload,
            RELOAD: Rank._reload,
            REDUCE: lambda rank, work: rank.reduce_and_step.sum_shared_gradients(work),
            STEP: lambda rank, work: rank.reduce_and_step.step(work),
        }

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        program: Program | None = None,
        training: bool = True,
        update: bool = True,
        incoming: Sequence[Action] | None = None,
        drains: bool = True,
    ) -> dict[int, Tensor]:
        """Run one step.

        microbatches: of all replicas of the stages, in the order in which `ir.stages` deals them out.
        program: another program than the training one, such as the forward-only one.
        training: whether forwards keep residuals.
        update: whether the step ends with the optimizer; that of a rehearsal does not.
        incoming: the SENDs of the messages that the rank gets, where the program's are not all of them; the
            same whenever this program runs.
        drains: whether nothing is in flight at its end; if it is, the next step goes on from there.
        Returns: micro-batch -> loss, on the rank of the loss stage; elsewhere nothing.
        """
        self.running = program or self.program
        row = self._row(self.running, microbatches, incoming)
        self._microbatches, self._training, self._losses = microbatches, training, {}
        self.outputs.clear()
        self.reduce_and_step.update, self.reduce_and_step.variants = update, row.variants
        with torch.no_grad(), out_of_memory_told(self.ledger, lambda: self.watch.status):
            self.channel.begin(row.incoming, row.receives)
            self._count_boundary()  # of the first receives
            for work in row.works:
                self.watch.status = work.text
                if self.operations.begun:
                    self.operations.wait_before(work)
                if self.reduce_and_step.pending is not None:
                    self.reduce_and_step.progress()
                if self.tier is not None:
                    self._count_copies()
                if training and self.ledger.cap_bytes is not None:
                    self._make_room_under_cap(work, self.ledger.cap_bytes)
                if profiler_enabled():  # torch.profiler, and nsys by `emit_nvtx`, show actions by name
                    with record_function(work.text):
                        self.verbs[work.kind](self, work)
                else:
                    self.verbs[work.kind](self, work)
                self._count_boundary(work.text)
            with self.recorder.record("recv", "END"):
                self.channel.end(wait_for_sends=drains)
        self._count_boundary()
        if drains:
            left = [key for key, kept in self.kept.items() if kept.residuals or kept.carried]
            assert not left or not training, f"the step has left residuals of (stage, micro-batch) {left}"
            self.kept.clear()
        return self._losses

    def reuse(self, microbatches: Container[int]) -> None:
        """Forget what was kept of micro-batches that are through: others are going to have their numbers."""
        for key in [key for key in self.kept if key[1] in microbatches]:
            assert not self.kept[key].residuals, f"stage {key[0]} still keeps residuals of {key[1]}"
            del self.kept[key]

    def forget(self) -> None:
        """Forget what a step that was broken off has left, gradients too: nothing will ask for it.

        Waits for operations that it has begun, as they may still write to gradients.
        """
        self.operations.wait_for_all()
        self.reduce_and_step.pending = None
        for copy in self._copies:
            copy.discard()
        self._copies.clear()
        for kept in self.kept.values():
            self._release_inputs(kept)
        self._handed_over_bytes = 0
        self.kept.clear()
        self.weights.discard_gradients()
        for kind in ("residuals", "transient"):
            self.ledger.set(kind, 0)
        self._count_boundary()

    def parameters(self, work: RankWork) -> Mapping[str, Tensor]:
        """Parameters and buffers that an action reads, by FQN: of the version that its micro-batch uses."""
        if not self._training:
            return self.weights.newest_state
        kept = self.kept[work.key]
        if kept.version is None:
            kept.version = self.weights.use_version(self._microbatches[work.index].number)
        return self.weights.state(kept.version)

    # A row, looked up

    def _row(
        self, program: Program, microbatches: Sequence[Microbatch], incoming: Sequence[Action] | None
    ) -> Row:
        variants = [microbatch.variant for microbatch in microbatches]
        row = self._rows.get(id(program))
        if row is None or row.variants != variants:
            self.reduce_and_step.attend(variants[0].stages, program.placement)
            if incoming is None:
                incoming = [
                    send
                    for (_, target), sends in program.messages.items()
                    if target == self.rank
                    for send in sends
                ]
            works = [self._work(program, variants, instruction) for instruction in program.rows[self.rank]]
            row = self._rows[id(program)] = Row(
                program=program,
                variants=variants,
                works=works,
                incoming=[self._message(program, variants, send) for send in incoming],
                receives=[w.message for w in works if w.message and w.message.target == self.rank],
            )
        return row

    def _work(self, program: Program, variants: Sequence[Variant], instruction: Action) -> RankWork:
        stage, kind = instruction.stage, instruction.kind
        microbatch, index, message = -1, 0, None
        if not instruction.is_stage_wide:
            microbatch = instruction.microbatch
            index = variants[0].stages.number(stage, microbatch, of=program.microbatches)
        if instruction.is_transfer:
            send = instruction if instruction.sends else instruction.other_end
            message = self._message(program, variants, send)
        variant = variants[index]
        if (variant, stage) not in self._wirings:
            self._wirings[variant, stage] = Wiring(variant, stage, program.placement)
        wiring = self._wirings[variant, stage]
        return RankWork(instruction, str(instruction), kind, (stage, microbatch), index, wiring, message)

    def _message(self, program: Program, variants: Sequence[Variant], send: Action) -> Message:
        """The message of a SEND; the same object every step."""
        variant = variants[variants[0].stages.number(send.stage, send.microbatch, of=program.microbatches)]
        if (variant, send) not in self._messages:
            stages = variant.stages
            forward = send.kind == SEND_F
            self._messages[variant, send] = Message(
                key=str(send),
                source=program.placement[send.stage],
                target=program.placement[send.peer],
                values=stages.between[send.stage, send.peer]
                if forward
                else stages.gradients(send.peer, send.stage),
            )
        return self._messages[variant, send]

    # F, B, I, W and RECOMPUTE

    def _forward(self, work: RankWork) -> None:
        kept, functions = self.kept[work.key], work.wiring.functions
        microbatch = self._microbatches[work.index]
        parameters = self.parameters(work)
        inputs = dict(kept.inputs)
        for name in functions.batch:
            inputs[name] = microbatch.inputs[name]
        with self.recorder.record("compute", work.text):
            if self._training:
                outputs, kept.residuals = functions.forward(parameters, inputs, microbatch.seed)
            else:
                outputs = functions.evaluate(parameters, inputs)
        if self._training:
            size = work.wiring.activation_bytes(F, kept.residuals)
            self._count_peak(work, residuals=size, boundary=work.wiring.sent_bytes)
            self._count_residuals(work.text, kept, size)
        if self.look is not None:
            self.look(work.text, work.key[0], outputs, state=parameters, inputs=inputs)
        for name in [name for name in outputs if name.startswith(("buffer:", MODEL_OUTPUT))]:
            if name.startswith(MODEL_OUTPUT):
                self.outputs[work.index][name.removeprefix(MODEL_OUTPUT)] = outputs.pop(name)
            else:
                self.weights.replace_buffer(name.removeprefix("buffer:"), outputs.pop(name))
        if functions.loss is not None:
            # A copy: the result of a mean may lie in a storage as large as what it is the mean of.
            loss = self._losses[work.index] = outputs.pop(functions.loss).clone()
            # The share of the micro-batch in the step's loss: sums of gradients need no division.
            share = torch.full((), microbatch.weight, dtype=loss.dtype, device=loss.device)
            kept.output_grads[functions.loss] = share
        self._hand_over(work, kept, outputs)
        inputs_stay = self._training and not functions.kept_inputs.isdisjoint(kept.inputs)
        kept.inputs = {}
        if not inputs_stay:
            self._release_inputs(kept)

    def _backward(self, work: RankWork) -> None:
        """B, or I and W. A stage without gradients, as one of frozen parameters on the model's inputs, only
        lets go of what it keeps."""
        kept, functions, kind = self.kept[work.key], work.wiring.functions, work.kind
        input_grads: dict[str, Tensor] = {}
        if work.wiring.differentiable:
            if kind != W:
                self._take_back(kept)
                for value in work.wiring.awaited:
                    if value.name not in kept.output_grads:
                        kept.output_grads[value.name] = zeros_like_value(value, self.weights.device)
            parameters, grads = self.parameters(work), kept.output_grads
            with self.recorder.record("compute", work.text):
                if kind == B:
                    input_grads = functions.backward(parameters, kept.residuals, grads, self.weights.grads)
                elif kind == I:
                    input_grads, kept.carried = functions.backward_input(parameters, kept.residuals, grads)
                else:
                    functions.backward_weight(parameters, kept.carried, self.weights.grads)
            self._count_peak(work, boundary=0 if kind == W else work.wiring.returned_bytes)
            if self.look is not None:
                made, sums = {f"gradient of {n}": g for n, g in input_grads.items()}, self.weights.grads
                made |= {f"gradient of {n}": sums.sums[n] for n in functions.params if n in sums.touched}
                self.look(work.text, work.key[0], made, state=parameters)
        kept.residuals, kept.output_grads = {}, {}
        left = work.wiring.activation_bytes(I, kept.carried) if kind == I else 0
        self._count_residuals(work.text, kept, left - kept.residual_bytes)
        if kind != I or not work.wiring.differentiable:
            self._release_inputs(kept)
        if kind != I and kept.version is not None:
            self.weights.release_version(kept.version)
            kept.version = None
        if kind != W and work.wiring.differentiable:
            self._hand_back(work, kept, input_grads)

    def _recompute(self, work: RankWork) -> None:
        kept = self.kept[work.key]
        self._take_back(kept)
        parameters = self.parameters(work)
        with self.recorder.record("compute", work.text):
            residuals = work.wiring.functions.recompute(parameters, kept.residuals)
        kept.residuals |= residuals
        size = work.wiring.activation_bytes(RECOMPUTE, residuals)
        self._count_peak(work, residuals=size, boundary=0)
        self._count_residuals(work.text, kept, size)

    # What passes between stages

    def _hand_over(self, work: RankWork, kept: Kept, outputs: Mapping[str, Tensor]) -> None:
        """Give a forward's outputs to stages on this rank; keep for SEND_F what others need."""
        for reader in work.wiring.readers:
            values = {value.name: outputs[value.name] for value in reader.values}
            if reader.here:
                other = self.kept[reader.stage, work.key[1]]
                other.inputs |= values
                other.local_bytes += reader.bytes
            else:
                kept.sends_left += 1
                kept.outputs |= values
            self._handed_over_bytes += reader.bytes

    def _hand_back(self, work: RankWork, kept: Kept, input_grads: Mapping[str, Tensor]) -> None:
        """Give a backward's input gradients to stages on this rank; keep for SEND_B what others need.

        An input that got no gradient gets zeros: whoever made it waits for one.
        """
        for source in work.wiring.sources:
            for value in source.values:
                grad = input_grads.get(value.name)
                if grad is None:
                    grad = zeros_like_value(value, self.weights.device)
                if source.here:
                    _add(self.kept[source.stage, work.key[1]].output_grads, value.name, grad)
                else:
                    kept.input_grads[value.name] = grad
            if source.values and not source.here:
                kept.sends_left += 1
                self._handed_over_bytes += source.bytes

    def _send(self, work: RankWork) -> None:
        kept, message = self.kept[work.key], work.message
        assert message is not None, "a transfer has a message"
        values = kept.outputs if work.kind == SEND_F else kept.input_grads
        self.channel.send(message, [values[v.name] for v in message.values])
        self._handed_over_bytes -= message.sent_bytes
        kept.sends_left -= 1
        if not kept.sends_left:
            values.clear()

    def _receive(self, work: RankWork) -> None:
        kept, message = self.kept[work.key], work.message
        assert message is not None, "a transfer has a message"
        with self.recorder.record("recv", work.text):
            tensors = self.channel.receive(message)
        kept.received.append(message)
        for value, tensor in zip(message.values, tensors, strict=True):
            if work.kind == RECV_F:
                kept.inputs[value.name] = tensor
            else:
                _add(kept.output_grads, value.name, tensor)

    def _release_inputs(self, kept: Kept) -> None:
        """What a stage got from others, values and gradients, is no longer used."""
        for message in kept.received:
            self.channel.release(message)
        kept.received = []
        self._handed_over_bytes -= kept.local_bytes
        kept.local_bytes = 0

    # Copies of residuals

    @property
    def _tier(self) -> Tier:
        assert self.tier is not None, "whoever plans to offload gives the rank a tier"
        return self.tier

    def _offload(self, work: RankWork) -> None:
        """Begin to copy residuals to the tier, which frees them once they are copied. A schedule may ask for
        it on a stage of which the memory policy offloads nothing."""
        kept, names = self.kept[work.key], work.wiring.functions.offloaded
        if not names:
            return
        leaving = {s: t for s, t in kept.residuals.items() if s.kind == "residual" and s.name in names}
        for slot in leaving:
            del kept.residuals[slot]
        kept.copy = self._tier.offload(work.text, leaving)
        self._copies[kept.copy] = kept
        self._count_host()

    def _await_offload(self, work: RankWork) -> None:
        copy = self.kept[work.key].copy
        if copy is not None and not copy.off_device:
            self._finish_leaving(copy, work.text)

    def _finish_leaving(self, copy: Copy, text: str) -> None:
        with self.recorder.record("recv", text):
            copy.leave(self.watch.check)
        self._count_copies()

    def _reload(self, work: RankWork) -> None:
        """Begin to copy them back; `_take_back` puts them where they were."""
        kept = self.kept[work.key]
        if kept.copy is not None:
            kept.copy.reload()
            kept.copy.reload_action = work.text
            if kept.copy.off_device:
                self._count_residuals(work.text, kept, kept.copy.bytes)
            self._count_copies()  # those that have left since the memory for this one was taken

    def _take_back(self, kept: Kept) -> None:
        """Wait for what a micro-batch has on the tier: what comes next reads it."""
        copy = kept.copy
        if copy is None:
            return
        with self.recorder.record("recv", copy.reload_action):
            kept.residuals |= copy.take(self.watch.check)
        self._count_copies()
        if copy.reload_span is not None:
            self.recorder.copied("h2d", copy.reload_action, *copy.reload_span)
        del self._copies[copy]
        kept.copy = None

    def _count_copies(self) -> None:
        """Enter into the ledger what copies have done since the last time; waits for none of them."""
        if self._tier.used_bytes != self.ledger.host:
            self._count_host()
        for copy, kept in self._copies.items():
            if copy.off_device or not copy.gone():
                continue
            copy.off_device = True
            self._count_residuals(copy.action, kept, -copy.bytes)
            if copy.offload_span is not None:
                self.recorder.freed(copy.bytes, copy.offload_span[1])
                self.recorder.copied("d2h", copy.action, *copy.offload_span)
            if copy.reload_action:  # it is on its way back by now
                self._count_residuals(copy.reload_action, kept, copy.bytes)

    def _count_host(self) -> None:
        ledger, size = self.ledger, self._tier.used_bytes
        ledger.host, ledger.host_peak = size, max(ledger.host_peak, size)
        self.recorder.host_level(size)

    # What is held

    def _count_peak(self, work: RankWork, **left: int) -> None:
        """Enter what an action held while it ran. left: bytes by kind that outlive it."""
        wiring, kind = work.wiring, work.kind
        peak = wiring.functions.peak_bytes[PEAK_OF[kind]]
        wiring.left_bytes[kind] = sum(left.values())
        self.recorder.burst(self.ledger.total + peak)
        self.ledger.during(work.text, peak, left)

    def _count_residuals(self, doing: str, kept: Kept, change: int) -> None:
        kept.residual_bytes += change
        self.ledger.add("residuals", change, doing)

    def _count_boundary(self, doing: str = "") -> None:
        """Enter what messages and values between stages take now."""
        self.ledger.set("boundary", self.channel.held_bytes + self._handed_over_bytes, doing)
        self.recorder.level(self.ledger.total)

    def _make_room_under_cap(self, work: RankWork, cap_bytes: int) -> None:
        """While the next instruction would pass the cap, wait for messages of this rank to be taken, then for
        what is on its way to the tier.

        The simulator lets messages go when they have travelled. So what a plan's peak counts on has been
        taken once its receiver has come as far as in the simulation, for which nothing later of this rank is
        needed: where that peak keeps the cap, these waits end. Copies may be slower than simulated; where the
        program does not await them itself (AWAIT), that costs time here.
        Raises: MemoryCapError if an action of a program that offloads would pass the cap even so.
        """
        while self.ledger.total + (need := self._needed_bytes(work)) > cap_bytes:
            with self.recorder.record("recv", "ROOM"):
                finished = self.channel.finish_send()
            self._count_boundary()
            if finished:
                continue
            leaving = next((copy for copy in self._copies if not copy.off_device), None)
            if leaving is not None:
                self._finish_leaving(leaving, "ROOM")
            if leaving is None or not leaving.off_device:
                if self.tier is not None:
                    self.ledger.refuse(need, work.text)
                return

    def _needed_bytes(self, work: RankWork) -> int:
        if work.kind in PEAK_OF:
            return work.wiring.needed_bytes(work.kind)
        if work.kind in (RECV_F, RECV_B):
            assert work.message is not None, "a transfer has a message"
            return self.channel.opening_bytes(work.message)
        if work.kind == STEP:
            return self.reduce_and_step.needed_bytes(work)
        copy = self.kept[work.key].copy if work.kind == RELOAD else None
        # Where it is still on its way there, RELOAD waits for that copy.
        return copy.bytes if copy is not None and copy.off_device else 0


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add to what is there without writing to it: a received buffer or another stage may own it."""
    grads[name] = grads[name] + grad if name in grads else grad

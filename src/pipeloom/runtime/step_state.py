"""What the handlers of a step are given, and the one place where what is in flight is kept.

A `StepContext` is frozen: it says which program runs on which micro-batches, and with which parts of the
rank. What changes while a step runs is in `InFlight`, by (stage, micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from ..ir.action import Action, Instruction, Transfer
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..tracer.stage.functions import StageFunctions, Tensors
from .failure.watch import Watch
from .ledger import Ledger
from .messages import Message
from .offload.tier import AsyncCopy, Tier
from .posted_channel import Channel
from .recorder import Recorder
from .weights import Weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The stages for one size of micro-batch: same cut, other shapes.

    functions: of this rank's stages; those of a stage's replicas are the same.
    """

    stages: StageGraph
    functions: Mapping[int, StageFunctions]


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


@dataclass(eq=False)
class MicrobatchState:
    """What a stage keeps of one micro-batch between its actions.

    inputs, outputs: crossing values: those that the forward will read, and those that a SEND_F will.
    output_grads, input_grads: their gradients: of outputs, for the backward; of inputs, for a SEND_B.
    sends_left: how many SENDs are still to come.
    received: messages whose buffers inputs or gradients lie in.
    local_bytes: of values that another stage of this rank handed over.
    residuals: what the forward left for the backward.  carried: what I left for W.
    residual_bytes: of either, as the ledger counts them.
    offloaded: what is on its way to the tier and back.
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
    offloaded: OffloadedResiduals | None = None
    version: int | None = None


@dataclass(eq=False)
class OffloadedResiduals:
    """Residuals of one micro-batch on a tier, and what the ledger knows of them.

    offload, reload: the actions; `reload` once it has run.
    off_device: whether the ledger no longer counts them.  on_device: whether it counts them again.
    """

    copy: AsyncCopy
    state: MicrobatchState
    offload: Action
    reload: Action | None = None
    off_device: bool = False
    on_device: bool = False


class InFlight:
    """All that a rank keeps of micro-batches between actions; the only owner of it.

    states: (stage, micro-batch) -> state.
    offloaded: of all states, in the order of their OFFLOADs.
    local_bytes: the sum over all states.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], MicrobatchState] = {}
        self.offloaded: list[OffloadedResiduals] = []
        self.local_bytes = 0

    def state(self, stage: int, microbatch: int) -> MicrobatchState:
        """The state of a micro-batch on a stage; empty where nothing has happened yet."""
        return self.states.setdefault((stage, microbatch), MicrobatchState())

    def release_inputs(self, state: MicrobatchState, channel: Channel) -> None:
        """What a stage got from others, values and gradients, is no longer used."""
        for message in state.received:
            channel.release(message)
        state.received = []
        self.local_bytes -= state.local_bytes
        state.local_bytes = 0

    def discard(self, channel: Channel, tier: Tier | None) -> None:
        """Forget everything, as after a step that was broken off: nothing will ask for it."""
        for offloaded in self.offloaded:
            assert tier is not None, "it came from there"
            tier.discard(offloaded.copy)
        self.offloaded = []
        for state in self.states.values():
            self.release_inputs(state, channel)
        self.local_bytes = 0
        self.states = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepContext:
    """One step of one rank, as its handlers see it.

    program: what runs: the training program, or another one, such as forward only.
    microbatches: of all replicas of the stages, in the order in which `ir.stages` deals them out.
    training: whether forwards keep residuals.
    update: whether the step ends with the optimizer; if not, gradients stay for the next one.
    tier: where residuals go; None for a program that offloads nothing.
    losses: micro-batch -> loss, as the forward of the loss stage enters it.
    incoming: the SENDs of the messages that the rank will get; None for all of the program.
    The other fields are parts of the rank, the same for all its steps.
    """

    rank: int
    weights: Weights
    channel: Channel
    ledger: Ledger
    recorder: Recorder
    watch: Watch
    tier: Tier | None
    in_flight: InFlight
    program: Program
    microbatches: Sequence[Microbatch] = ()
    training: bool = True
    update: bool = True
    losses: dict[int, Tensor] = field(default_factory=dict)
    incoming: Sequence[Transfer] | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return self.program.placement

    @property
    def stages(self) -> StageGraph:
        """For what does not depend on the size of micro-batches, such as which stages share a parameter."""
        return self.microbatches[0].variant.stages

    def number(self, action: Action | Transfer) -> int:
        """Which of `microbatches` an action means: each replica of a stage counts its own from 0."""
        return self.stages.number(action.stage, action.microbatch, of=self.program.microbatches)

    def microbatch(self, action: Action | Transfer) -> Microbatch:
        return self.microbatches[self.number(action)]

    def stages_of(self, action: Action | Transfer) -> StageGraph:
        """With the shapes of this action's micro-batch."""
        return self.microbatch(action).variant.stages

    def functions(self, action: Action) -> StageFunctions:
        return self.microbatch(action).variant.functions[action.stage]

    def parameters(self, action: Action) -> Mapping[str, Tensor]:
        """Parameters and buffers that an action reads, by FQN: of the version that its micro-batch uses."""
        if not self.training:
            return self.weights.newest_state
        state = self.state(action)
        if state.version is None:
            state.version = self.weights.use_version(self.microbatch(action).number)
        return self.weights.state(state.version)

    def release_version(self, state: MicrobatchState) -> None:
        """A micro-batch's last backward on a stage is over."""
        if state.version is not None:
            self.weights.release_version(state.version)
            state.version = None

    def state(self, action: Action | Transfer) -> MicrobatchState:
        return self.in_flight.state(action.stage, action.microbatch)

    def count_residuals(self, action: Action, state: MicrobatchState, change: int) -> None:
        """The device holds `change` bytes more of a micro-batch's residuals. Raises: MemoryCapError."""
        state.residual_bytes += change
        self.ledger.add("residuals", change, str(action))

    def count_boundary(self, instruction: Instruction | None = None) -> None:
        """Enter what messages and values between stages take now. Raises: MemoryCapError."""
        size = self.channel.used_bytes + self.channel.sending_bytes + self.in_flight.local_bytes
        self.ledger.set("boundary", size, str(instruction or ""))
        self.recorder.level(self.ledger.total)


Handler: TypeAlias = Callable[[StepContext, Any], None]
"""Runs one instruction of a row: an `Action`, `Transfer` or `StageAction`, as its kind has it."""

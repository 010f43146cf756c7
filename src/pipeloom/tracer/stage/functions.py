"""What a rank runs of one stage, whichever way the model was captured.

`stage.trace.stage_functions` makes them: from the captured graph, or, of a model that could not be exported,
from its modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from ..tensors import storage_bytes


class Sink(Protocol):
    """Sums gradients by FQN; it must not keep the tensor it is given."""

    def add(self, name: str, grad: Tensor) -> None: ...

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add the matrix product of the two; a sink may do so without a tensor of its own for it."""
        self.add(name, left @ right)


class DiscardSink(Sink):
    """A sink for gradients that nobody wants."""

    def add(self, name: str, grad: Tensor) -> None:
        pass

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        pass


MODEL_OUTPUT = "output of the model:"
"""Before the name of what a stage gives to the caller of an evaluation."""

SlotKind = Literal[
    "state",  # a parameter or buffer, by FQN
    "input",  # a batch input or received value
    "grad",  # the gradient of a value that this stage sends, or of the loss
    "sink",  # where gradients of parameters are added
    "residual",  # of the forward for the backward, by its name in the plan
    "old_buffer",  # a buffer as it was before the forward updated it
    "carried",  # handed from I to W
    "seed",  # of the random numbers
    "output",  # a value that is sent, the loss, `buffer:FQN`, or `MODEL_OUTPUT` with a name
    "input_grad",  # the gradient of a received value
    "weight_grad",  # the gradient of a parameter, by FQN
    "graph",  # the autograd graph of whole modules
]


class Slot(NamedTuple):
    """What a graph's placeholder or output stands for."""

    kind: SlotKind
    name: str


Tensors = dict[Slot, Any]
"""What one function of a stage leaves for another: residuals, or what I hands on to W. Tensors of any shape;
from whole modules also the autograd graph, which only they can use."""


@dataclass(eq=False, kw_only=True)
class StageFunctions(ABC):
    """The functions of stage `index`.

        forward(state, inputs, seed)             -> outputs, residuals
        recompute(state, residuals)              -> the residuals that forward dropped
        backward(state, residuals, grads, sink)  -> input grads; weight grads are added to the sink
        backward_input(state, residuals, grads)  -> input grads, carried
        backward_weight(state, carried, sink)    -> nothing; weight grads are added to the sink
        evaluate(state, inputs)                  -> outputs

    `state` maps FQNs to parameters and buffers; a weight version is only which mapping is passed. Results
    never share storage with inputs or parameters. Crossing values and their gradients lie in memory, without
    gaps, as `Value.order` says.

    params, buffers: FQNs it reads.  batch: batch inputs it reads.  received, sent: crossing values.
    loss: name of the loss among the outputs, on the stage that makes it.
    differentiable: whether any gradient flows through it.
    residual_bytes: name -> bytes of the tensors that its backward is given of its forward; none that the
        forward drops and the backward itself makes again.
    offloaded, recomputed: names of those that leave the device in between, and that the forward drops for
        `recompute` to make again.
    carried_bytes: made by the stage and alive between `backward_input` and `backward_weight`.
    kept_inputs: received values and batch inputs that the backward may read again.
    examples: received values that a trial run needs as they are, such as indices; others may be made up.
    leaves_the_same: whether each run of a function leaves tensors of the same sizes as the one before.
    """

    leaves_the_same: ClassVar[bool] = False

    index: int
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    loss: str | None = None
    differentiable: bool = True
    residual_bytes: Mapping[str, int] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    carried_bytes: int = 0
    kept_inputs: frozenset[str] = frozenset()
    examples: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    @abstractmethod
    def peak_bytes(self) -> Mapping[str, int]:
        """For "forward", "backward", "input_grad", "weight_grad" and "recompute" the most bytes alive above
        the level at the start: by its graph, or of whole modules as the first run has measured it."""

    @abstractmethod
    def forward(
        self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
    ) -> tuple[dict[str, Tensor], Tensors]:
        """Run one micro-batch forward.

        state: parameters and buffers by FQN, on the stage's device.
        inputs: batch inputs, with the rows of the micro-batch as their first dimension, and received
            values, shaped as `ir.graph.Value` says.
        seed: of this micro-batch; decides all random numbers.
        Returns: outputs by name (crossing values, the loss, `buffer:FQN` for next buffer states), and
            the residuals, which belong to the backward.
        """

    @abstractmethod
    def recompute(self, state: Mapping[str, Tensor], residuals: Tensors) -> Tensors:
        """Make the residuals that the forward dropped, bit for bit, from those that it kept.

        state: as the forward of this micro-batch read it.
        """

    @abstractmethod
    def backward(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor], sink: Sink
    ) -> dict[str, Tensor]:
        """Both gradients at once. Empties `residuals`, so that each is freed at its last use.

        grads: gradient of each crossing value that needs one, and of the loss.
        sink: gets the gradients of the parameters.
        Returns: gradients of the received values.
        """

    @abstractmethod
    def backward_input(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensors]:
        """Gradients of the received values only; empties `residuals`.

        Returns: gradients of the received values, and what `backward_weight` needs.
        """

    @abstractmethod
    def backward_weight(self, state: Mapping[str, Tensor], carried: Tensors, sink: Sink) -> None:
        """Gradients of the parameters, into `sink`; empties `carried`."""

    @abstractmethod
    def evaluate(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Forward in evaluation mode (no dropout, running statistics), nothing kept."""


def activation_bytes(tensors: Tensors) -> int:
    """Bytes of the residuals or carried tensors that a stage made itself, each storage once."""
    return storage_bytes([t for slot, t in tensors.items() if slot.kind in ("residual", "carried")])

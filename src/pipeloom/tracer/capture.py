"""nn.Module with a loss -> OpGraph, by torch.export.

The exported forward graph is made functional (no in-place calls; buffer updates are outputs) while
composite operations such as `linear` and `scaled_dot_product_attention` stay whole, so that each device
picks its own kernel. The model runs on fake tensors: its size does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..ir.errors import CaptureError
from ..ir.graph import OpGraph
from .describe import describe
from .exporting import export
from .initialise import Blueprint, blueprint
from .job import Job
from .meta import propagate
from .modules.python_random import python_random_kept, python_state
from .once import one_thread
from .sample import sample_batch

if TYPE_CHECKING:
    from .modules.fallback import ModuleCut

_log = logging.getLogger("pipeloom")

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
}


@dataclass(eq=False)
class Captured:
    """A captured model: the description (`graph`) and what can be run (`module`).

    module: functional ATen graph; an Op's name is the name of its node, and `getitem` nodes belong to
        the op that they unpack. One placeholder per parameter, buffer, constant and batch input.
    targets: placeholder name -> FQN of its parameter or buffer (constants are buffers that are not
        persistent), or name of its batch input.
    updates: node name -> FQN of the buffer whose next state it is.
    constants: FQN -> tensor, for constants that the model's forward makes.
    cut: how to run the model module by module, if `graph.fallback` says why it could not be exported; then
        `module` is empty.
    """

    graph: OpGraph
    module: fx.GraphModule
    targets: Mapping[str, str]
    updates: Mapping[str, str]
    blueprint: Blueprint
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    cut: ModuleCut | None = None


@one_thread
def capture(
    job: Job, microbatch_size: int, *, batch: Mapping[str, Tensor] | None = None,
    autocast: torch.dtype | None = None, like: Captured | None = None,
) -> Captured:  # fmt: skip
    """Capture a job's model and loss for one micro-batch.

    batch: a micro-batch to take the shapes from; by default `job.batch(0, microbatch_size)`.
    autocast: dtype of mixed precision, or None.
    like: an earlier capture of the same job, for a batch of other shapes: the model is not built again.
    A model that cannot be exported is captured as whole modules, with a warning that says why; so is one
    whose `Job.modules` says where to cut.

    Raises: CaptureError if the model can be captured in neither way; CutError if Job.modules is wrong.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = like.blueprint if like is not None else blueprint(job.model, fake)
    example = dict(batch) if batch is not None else sample_batch(job, 0, microbatch_size)
    _check_batch(example)
    _check_trainable(made.model, job)
    example = {key: tensor.clone() for key, tensor in example.items()}  # export merges equal tensors
    if like is not None and like.cut is not None:
        return _as_modules(job, example, made, like.cut.reason, autocast, like.cut)
    if job.modules is not None:
        return _as_modules(job, example, made, "Job.modules says where to cut", autocast)
    try:
        with python_random_kept():
            before = python_state()
            program = export(WithLoss(made.model, job), example, job.name, autocast)
            if python_state() != before:
                raise CaptureError(f"the forward of {job.name} draws random numbers that export would freeze")
        return from_program(program, job, made, list(example))
    except CaptureError as error:
        found = _instead(error, job, example, autocast)
    _log.warning("%s; cutting between its modules instead", found.graph.fallback)
    return found


def _instead(
    error: CaptureError, job: Job, batch: dict[str, Tensor], autocast: torch.dtype | None
) -> Captured:
    """Capture as modules what export refused."""
    made = blueprint(job.model, FakeTensorMode(allow_non_fake_inputs=True))  # export leaves traces in a model
    try:
        return _as_modules(job, batch, made, error.message, autocast)
    except CaptureError as second:
        if second.message == error.message:
            raise error from None
        raise CaptureError(f"{error.message}; and as modules: {second.message}", hint=second.hint) from error


def _as_modules(
    job: Job, batch: dict[str, Tensor], made: Blueprint, reason: str, autocast: torch.dtype | None,
    like: ModuleCut | None = None,
) -> Captured:  # fmt: skip
    from .modules.fallback import cut_modules  # it captures by itself, and uses what is defined here

    graph, found = cut_modules(job, batch, made, reason=reason, autocast=autocast, like=like)
    return Captured(
        graph=graph, module=fx.GraphModule({}, fx.Graph()), targets={}, updates={}, blueprint=made,
        constants=found.skeleton.constants, autocast=autocast, cut=found,
    )  # fmt: skip


def _check_trainable(model: nn.Module, job: Job) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise CaptureError(
            f"no parameter of {job.name} requires a gradient, so there is nothing to train",
            hint="call requires_grad_() on what should learn",
        )


class WithLoss(nn.Module):
    """Model and loss as one module, so that both are in the graph."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.model = model
        self.job = job

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return scalar_loss(self.job, self.model(**batch), batch)


def scalar_loss(job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model's outputs: by the job's `loss`, or the outputs' own.

    Raises: CaptureError if there is none, or it is not a scalar.
    """
    if job.loss is not None:
        loss: Any = job.loss(outputs, batch)
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, Tensor) and outputs.ndim == 0:
            loss = outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss of {job.name} must be a scalar tensor, got {got}",
            hint="return outputs with a `.loss`, or give Job(loss=...) a function that returns a scalar",
        )
    return loss.reshape(())


def _check_batch(batch: Mapping[str, Tensor]) -> None:
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"batch entry {key!r} is a {type(value).__name__}, not a tensor",
                hint="let Job.batch return tensors only; bind other arguments in Job.model",
            )


def from_program(
    program: ExportedProgram, job: Job, made: Blueprint, keys: list[str], *, training: bool = True
) -> Captured:
    """An exported program as a Captured.

    keys: names of the batch inputs.  training: if not, no gradients flow and no buffers are updated.
    """
    graph = program.graph
    canonical = _canonical_names(made.model)
    targets: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    batch_keys = iter(keys)
    first: dict[str, fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            targets[node.name] = next(batch_keys)
            continue
        assert spec.target is not None
        target = spec.target.removeprefix("model.")
        target = canonical.get(target, target)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            constants[target] = _constant(program, spec.target)
            if isinstance(constants[target], FakeTensor):  # the constructor made it
                made.others[target] = constants[target]
        if target in first:
            node.replace_all_uses_with(first[target])
        else:
            first[target] = node
            targets[node.name] = target
    updates: dict[str, str] = {}
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION and training:
            name = (spec.target or "").removeprefix("model.")
            updates[_made_for(spec.arg.name, graph, updates)] = canonical.get(name, name)
    _tidy(graph, set(targets), program.graph_signature.user_outputs[0], list(updates))
    module = fx.GraphModule(program.graph_module, graph)
    propagate(module, targets, made.model, training=training)
    op_graph = describe(module, targets, updates, made.model, constants, job.name)
    return Captured(
        graph=op_graph, module=module, targets=targets, updates=updates,
        blueprint=made,
        constants={n: t for n, t in constants.items() if n not in made.others},
    )  # fmt: skip


def _made_for(name: str, graph: fx.Graph, taken: Mapping[str, str]) -> str:
    """The name of a node that makes the next state of one buffer only: a copy if another has taken it."""
    if name not in taken:
        return name
    node = next(n for n in graph.nodes if n.name == name)
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy.name


def _constant(program: ExportedProgram, name: str) -> Tensor:
    constant = program.constants[name]
    if not isinstance(constant, Tensor):
        raise CaptureError(
            f"the model's forward uses a constant {name} of type {type(constant).__name__}",
            hint="cut by module names instead: give lists of FQNs, one list per stage",
        )
    return constant


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every FQN of a parameter or buffer -> the first FQN of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _tidy(graph: fx.Graph, keep: set[str], loss: Any, updates: list[str]) -> None:
    """Drop assertions, copies that copy nothing and dead code; make `view` valid for any strides."""
    by_name = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    output.args = ((*(by_name[name] for name in updates), by_name[str(loss)]),)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif node not in output.args[0] and (source := _copied(node)) is not None:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in keep or not node.users:
            graph.erase_node(node)


def _copied(node: fx.Node) -> fx.Node | None:
    """What a `clone` copies, if both have the same layout: as nothing is changed in place, one will do.

    Dropout with probability 0 is such a copy. A copied parameter, buffer or input stays copied.
    """
    if node.target is not torch.ops.aten.clone.default or not isinstance(source := node.args[0], fx.Node):
        return None
    made, given = node.meta["val"], source.meta["val"]
    same = given.is_contiguous() and made.stride() == given.stride()
    return source if same and source.op == "call_function" else None

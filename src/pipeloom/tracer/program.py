"""An exported program, made functional and tidy, as a `Captured`."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..ir.errors import CaptureError, of_type
from ..ir.user_code import at
from .blueprint import Blueprint
from .captured import Captured
from .causal_masks import replace_causal_masks
from .export import HINT, READ_AT
from .guards import as_buffers
from .job import Job
from .op_graph import ancestors, build_op_graph, loss_node, model_buffers, model_parameters, reached
from .product_copies import unfold_copies
from .tensors import arguments_of, tensors_of

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
}

_CHECKED = frozenset(
    """
    inverse istft linalg_cholesky linalg_eig linalg_eigvals linalg_inv linalg_lu_factor linalg_matrix_power
    linalg_solve linalg_tensorinv linalg_tensorsolve
    """.split()
)
"""Ops that look at what they made, some in the backward, and raise where a matrix has no inverse, say."""

_OF_LAYOUT = {  # which depend on how their input lies in memory
    torch.ops.aten.as_strided.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.view_as_complex.default,
}

_REPLACEMENTS = {  # for tensors of any strides, and without the mark of a conjugate that is not made yet
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def captured_from_program(
    program: ExportedProgram,
    job: Job,
    blueprint: Blueprint,
    keys: list[str],
    *,
    training: bool = True,
    copied: Collection[str] = (),
) -> Captured:
    """An exported program as a Captured.

    keys: names of the batch inputs.  training: if not, no gradients flow and no buffers are updated.
    copied: buffers that are read by way of a copy, which can be sent from where the buffer is.
    """
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            blueprint.changed_parameters.add((spec.target or "").removeprefix("model."))
    with as_buffers(blueprint.model, blueprint.changed_parameters):
        return _captured(program, job, blueprint, keys, training, copied)


def _captured(
    program: ExportedProgram,
    job: Job,
    blueprint: Blueprint,
    keys: list[str],
    training: bool,
    copied: Collection[str],
) -> Captured:
    graph = program.graph
    canonical = _canonical_names(blueprint.model)
    targets: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    batch_keys = iter(keys)
    first: dict[str, fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            targets[node.name] = next(batch_keys)
            node.meta["val"] = node.meta["val"].contiguous()  # as `runtime.batches` gives it to stages
            continue
        assert spec.target is not None
        if spec.kind is InputKind.CUSTOM_OBJ:
            what = of_type(program.constants[spec.target])
            raise CaptureError(f"the forward of {job.name} uses {what}, which is no tensor", hint=HINT)
        target = spec.target.removeprefix("model.")
        target = canonical.get(target, target)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            constants[target] = constant = cast("Tensor", program.constants[spec.target])
            if isinstance(constant, FakeTensor):  # the constructor made it
                blueprint.attribute_tensors[target] = constant
        if target in first:
            node.replace_all_uses_with(first[target])
        else:
            first[target] = node
            targets[node.name] = target
    for node in (first[target] for target in copied if target in first):
        with graph.inserting_after(placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        copy.args = (node,)
    updates: dict[str, str] = {}
    for spec in program.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION) and training:
            name = (spec.target or "").removeprefix("model.")
            updates[_node_for_buffer(spec.arg.name, graph, updates)] = canonical.get(name, name)
    _refuse_double_names(keys, {*canonical, *constants}, job.name)
    loss, outputs = _results(program, graph)
    replace_causal_masks(graph)
    _tidy(graph, set(targets), loss, [*updates, *outputs.values()])
    _refuse_sparse_gradients(graph, job.name)
    _refuse_checked_results(graph, job.name)
    _refuse_sizes_and_numbers_of_data(graph, job.name, program.graph_module.meta.get(READ_AT, ()))
    module = fx.GraphModule(program.graph_module, graph)
    # With gradients in evaluation mode, too: products copy what learns.
    learns = {name for name, p in blueprint.model.named_parameters() if p.requires_grad}
    propagate_gradient_flow(module, targets, learns)
    unfolded = unfold_copies(graph)
    if unfolded or not training:
        _replace_targets(graph)
        module.recompile()
        propagate_gradient_flow(module, targets, learns if training else ())
    renamed = _rename(graph, {*canonical, *constants, *keys})
    names = {
        name: renamed.get(now := unfolded.get(name, name), now) for name in (*updates, *outputs.values())
    }
    updates = {names[name]: buffer for name, buffer in updates.items()}
    parameters = model_parameters(blueprint.model, reached(module, targets))
    buffers = model_buffers(blueprint.model, constants)
    op_graph = build_op_graph(module, targets, updates, parameters, buffers, job.name)
    return Captured(
        graph=op_graph,
        module=module,
        targets=targets,
        updates=updates,
        blueprint=blueprint,
        constants={n: t for n, t in constants.items() if n not in blueprint.attribute_tensors},
        outputs={output: names[name] for output, name in outputs.items()},
    )


def _results(program: ExportedProgram, graph: fx.Graph) -> tuple[str, dict[str, str]]:
    """The node of the loss; and, by their names, those of the model's outputs that ops make of parameters."""
    spec = program.call_spec.out_spec
    assert spec is not None
    results = tree_unflatten(program.graph_signature.user_outputs, spec)
    if not isinstance(results, tuple):
        return str(results), {}
    loss, outputs = results
    state = {str(spec.arg.name) for spec in program.graph_signature.input_specs if spec.target is not None}
    learned: set[str] = set()
    for node in graph.nodes:
        if node.op == "call_function" and any(n.name in learned | state for n in node.all_input_nodes):
            learned.add(node.name)
    return loss, {name: node for name, node in outputs.items() if node in learned and node != loss}


def _refuse_sizes_and_numbers_of_data(graph: fx.Graph, name: str, lines: Sequence[str]) -> None:
    """Export keeps numbers that are read from tensors, and sizes that depend on data, as symbols as long as
    nothing is decided on them. Stages exchange tensors of known sizes. lines: where data is read."""
    for node in graph.nodes:
        val = node.meta.get("val") if node.op == "call_function" else None
        symbols = [
            v for v in tree_leaves(val) if isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
        ]
        sized = any(not isinstance(size, int) for tensor in tensors_of(val) for size in tensor.shape)
        if symbols or sized:
            what = "with a number that it reads from a tensor" if symbols else "with tensors sized by data"
            where = at(", ".join(lines[:3]) + ", ..." * (len(lines) > 3))
            raise CaptureError(
                f"the forward of {name} computes {what}{where}, which torch.export leaves open", hint=HINT
            )


def _refuse_sparse_gradients(graph: fx.Graph, name: str) -> None:
    """Traced backwards know dense tensors only; autograd, which runs modules, makes sparse ones dense."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            if sparse := arguments_of(node.target, node.args, node.kwargs).get("sparse"):
                what = "has sparse gradients" if sparse is True else "computes with a sparse tensor"
                raise CaptureError(f"the forward of {name} {what}, in {node.target}", hint=HINT)


def _refuse_checked_results(graph: fx.Graph, name: str) -> None:
    """Traced stages are without effects, so they would lose the check."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in _CHECKED:
            raise CaptureError(
                f"the forward of {name} checks a result, in {node.target}, which tracing would lose",
                hint=HINT,
            )


def _refuse_double_names(keys: list[str], state: set[str], name: str) -> None:
    """Inputs, parameters and buffers share one space of names."""
    for key in keys:
        if key in state:
            raise CaptureError(
                f"{name} has a batch entry {key!r}, and a parameter or buffer of that name",
                hint="give one of the two another name",
            )


def _rename(graph: fx.Graph, taken: set[str]) -> dict[str, str]:
    """Give values other names than parameters, buffers and inputs have. Returns: old name -> new one."""
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.name in taken:
            old = node.name
            while node.name in taken:
                node._rename(f"{node.name}_value")
            renamed[old] = node.name
    return renamed


def _node_for_buffer(name: str, graph: fx.Graph, taken: Mapping[str, str]) -> str:
    """The name of a node that makes the next state of one buffer only: a copy if another has taken it."""
    if name not in taken:
        return name
    node = next(n for n in graph.nodes if n.name == name)
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy.name


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every FQN of a parameter or buffer -> the first FQN of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _tidy(graph: fx.Graph, keep: set[str], loss: str, others: list[str]) -> None:
    """Drop assertions, copies that copy nothing and dead code; replace what suits some tensors only."""
    _replace_targets(graph)
    by_name = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    output.args = ((*(by_name[name] for name in others), by_name[loss]),)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node not in output.args[0] and (source := _copy_source(node)) is not None:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in keep or not node.users:
            graph.erase_node(node)


def _replace_targets(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.target = _REPLACEMENTS.get(node.target, node.target)


def _copy_source(node: fx.Node) -> fx.Node | None:
    """What a `clone` copies, if both have the same layout: as nothing is changed in place, one will do.

    Dropout with probability 0 is such a copy, and so is `cat` with empty tensors only, as of keys with those
    of a cache that is new. A copied parameter, buffer or input stays copied.
    """
    if node.target is torch.ops.aten.cat.default:
        joined = cast("list[fx.Node]", node.args[0])
        parts = [part for part in joined if part.meta["val"].numel()]
        source, *more = parts or [node]
        result, original = node.meta["val"], source.meta["val"]
        laid_out_alike = original.stride() == result.stride() or not any(
            other.target in _OF_LAYOUT for other in node.graph.nodes
        )
        same = not more and original.dtype == result.dtype and laid_out_alike
    elif node.target is torch.ops.aten.clone.default and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        result, original = node.meta["val"], source.meta["val"]
        same = original.is_contiguous() and result.stride() == original.stride()
    else:
        return None
    return source if same and source is not node and source.op == "call_function" else None


def propagate_gradient_flow(
    module: fx.GraphModule, targets: Mapping[str, str], trainable: Container[str]
) -> None:
    """Run the graph on fake tensors with autograd on; leave results in `node.meta`.

    trainable: FQNs of the parameters that require a gradient.
    meta["val"]: the fake result, detached.  meta["needs_grad"]: a gradient of the loss with respect to
    it flows, that is, it depends on a trainable parameter and the loss depends on it differentiably.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs: list[Any] = []
    with fake:
        for node in module.graph.find_nodes(op="placeholder"):
            val = node.meta["val"]
            tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
            inputs.append(tensor.requires_grad_(targets[node.name] in trainable))
    with fake, torch.enable_grad():
        _Propagator(module, garbage_collect_values=True).run(*inputs)
    _mark_needed(module.graph)


class _Propagator(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "placeholder"):
            n.meta["requires_grad"] = any(t.requires_grad for t in tensors_of(result))
            n.meta["val"] = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, result)
        return result


def _mark_needed(graph: fx.Graph) -> None:
    """Walk back from the loss along values that require gradients."""
    needed = ancestors([loss_node(graph)], lambda node: not node.meta.get("requires_grad"))
    for node in graph.nodes:
        node.meta["needs_grad"] = node in needed

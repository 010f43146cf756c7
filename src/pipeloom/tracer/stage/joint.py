"""One stage's ops -> one joint forward/backward graph. The only file that calls AOTAutograd.

`aot_export_joint_with_descriptors` is a private PyTorch API (seen in 2.9 to 2.13): everything it needs
and returns is translated here, so that a change in PyTorch is a change in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback

from ...ir.stages import StageGraph
from ..captured import Captured
from ..tensors import DimOrder, copy_in_order, ensure_unshared, memory_order, storage_ids, zeros_like_value
from .functions import MODEL_OUTPUT


@dataclass(eq=False)
class StageModule:
    """A stage's part of the captured graph.

    module: the graph; its placeholders are described by `names` and `kinds`, its results by `outputs`.
    names: FQN of a parameter or buffer, batch input or crossing value, in placeholder order.
    kinds: "param", "buffer", "batch" or "value", for each of the names.
    outputs: crossing values that this stage makes, the loss, `buffer:<FQN>` for a buffer's next state, or
        an output of the model (`MODEL_OUTPUT`).
    learning: the outputs that a gradient comes back for: some that have one are only read where none flows.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    outputs: tuple[str, ...]
    learning: frozenset[str]


def extract(captured: Captured, stages: StageGraph, index: int, device: str) -> StageModule:
    """Copy a stage's nodes, clones included, into a graph of their own that runs on `device`."""
    stage = stages.stages[index]
    inside = {*stage.ops, *stage.clones}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names: list[str] = []
    kinds: list[str] = []
    batch = {v.name for v in captured.graph.inputs}

    def enter(node: fx.Node) -> fx.Node:
        if node not in copies:
            target = captured.targets.get(node.name, node.name)
            placeholder = graph.placeholder(node.name)
            placeholder.meta = {"val": node.meta["val"], "needs_grad": node.meta["needs_grad"]}
            kinds.append(
                "value"
                if node.op != "placeholder"
                else "batch"
                if target in batch
                else "param"
                if target in captured.graph.parameter
                else "buffer"
            )
            names.append(target)
            copies[node] = placeholder
        return copies[node]

    members = [n for n in captured.module.graph.nodes if _owner(n) in inside]
    for node in members:  # placeholders come first
        for source in node.all_input_nodes:
            if _owner(source) not in inside:
                enter(source)
    for node in members:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.target is torch.ops.aten.reshape.default and not captured.graph.op[node.name].view:
            copies[node].target = reshaped_copy
        results = tuple(user.args[1] for user in node.users if user.target is getitem)
        origin = {"op": _owner(node), "node": node.name, "results": results}
        copies[node].meta = dict(node.meta) | {"custom": origin}
        if "device" in node.kwargs:
            copies[node].update_kwarg("device", torch.device(device))
    outputs = _outputs(captured, stages, index)
    by_name = {n.name: n for n in captured.module.graph.nodes}
    node_of = {f"buffer:{fqn}": name for name, fqn in captured.updates.items()}
    node_of |= {MODEL_OUTPUT + name: node for name, node in captured.outputs.items()}
    graph.output(tuple(copies[by_name[node_of.get(o, o)]] for o in outputs))
    learning = {v.name for target in stages.successors[index] for v in stages.gradients(index, target)}
    if index == stages.loss_stage and captured.graph.value[captured.graph.loss].needs_grad:
        learning.add(captured.graph.loss)
    return StageModule(
        fx.GraphModule(captured.module, graph), tuple(names), tuple(kinds), outputs, frozenset(learning)
    )


def reshaped_copy(tensor: Tensor, shape: list[int]) -> Tensor:
    """A reshape that had to copy. It does so, too, where a stage receives the tensor without gaps."""
    copy: Tensor = torch.ops.aten._unsafe_view.default(copy_in_order(tensor, ()), shape)
    return copy


def _owner(node: fx.Node) -> str:
    """Name of the op that a node belongs to."""
    source = node.args[0] if node.target is getitem else node
    assert isinstance(source, fx.Node)
    return source.name


def _outputs(captured: Captured, stages: StageGraph, index: int) -> tuple[str, ...]:
    sent = {c.value.name for c in stages.crossings if c.source == index}
    loss = [captured.graph.loss] if index == stages.loss_stage else []
    owned = set(stages.stages[index].ops)
    updated = [f"buffer:{fqn}" for op in captured.graph.ops if op.name in owned for fqn in op.updates]
    by_name = {n.name: n for n in captured.module.graph.nodes} if captured.outputs else {}
    results = [MODEL_OUTPUT + n for n, node in captured.outputs.items() if _owner(by_name[node]) in owned]
    return (*sorted(sent), *loss, *updated, *results)


@dataclass(eq=False)
class Joint:
    """A joint graph with each placeholder and output identified.

    attributes: the module that holds what `get_attr` nodes name.
    inputs: placeholder -> name, as in StageModule.names.
    tangents: placeholder -> name of the output whose gradient it is.
    outputs: name -> node.  grads: name -> gradient node, for the inputs that have one.
    orders: of values that do not lie as their dimensions are numbered, see `tracer.tensors`.
    """

    graph: fx.Graph
    attributes: object
    inputs: Mapping[fx.Node, str]
    tangents: Mapping[fx.Node, str]
    outputs: Mapping[str, fx.Node]
    grads: Mapping[str, fx.Node]
    orders: Mapping[str, DimOrder]


class _Callable(nn.Module):
    """The stage as a module that AOTAutograd can trace: parameters registered, the rest arguments."""

    def __init__(
        self,
        stage: StageModule,
        params: dict[int, nn.Parameter],
        detached: frozenset[str],
        orders: Mapping[str, DimOrder],
    ) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(params.values())
        self.where = dict(zip(params, range(len(params)), strict=True))
        self.stage = [stage]  # in a list, so that its tensors are not registered a second time
        self.detached = detached
        self.orders = orders

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        stage = self.stage[0]
        rest = iter(args)
        inputs = [
            self.leaves[self.where[i]] if i in self.where else next(rest) for i in range(len(stage.names))
        ]
        with traceback.preserve_node_meta():
            results = fx.Interpreter(stage.module).run(*inputs)
        taken = storage_ids(inputs)
        return tuple(
            ensure_unshared(t.detach() if name in self.detached else t, self.orders.get(name, ()), taken)
            for name, t in zip(stage.outputs, results, strict=True)
        )


def trace_joint(stage: StageModule, captured: Captured, device: str) -> Joint:
    """Trace forward and backward of a stage together, on fake tensors of `device`.

    Received values lie as `Value.order` says, and so do the gradients of what is sent. What leaves the stage
    has a storage of its own. An output that learns nothing is detached.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    params: dict[int, nn.Parameter] = {}
    args: list[Tensor] = []
    arg_names: list[str] = []
    with fake:
        for i, (node, name) in enumerate(
            zip(stage.module.graph.find_nodes(op="placeholder"), stage.names, strict=True)
        ):
            val = node.meta["val"]
            if stage.kinds[i] == "value":
                tensor = zeros_like_value(captured.graph.value[name], device)
            else:
                tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=device)
            if stage.kinds[i] == "param":
                trainable = captured.graph.parameter[name].trainable
                params[i] = nn.Parameter(tensor, requires_grad=trainable)
            else:
                if stage.kinds[i] == "value":
                    tensor.requires_grad_(captured.graph.value[name].needs_grad)
                args.append(tensor)
                arg_names.append(name)
    detached = frozenset(stage.outputs) - stage.learning
    orders = orders_of(stage, captured)
    module = _Callable(stage, params, detached, orders)
    param_names = [stage.names[i] for i in params]
    with ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(torch.enable_grad())  # whatever the caller does: without it there is no backward
        # Gradients of what is sent come back as that lies in memory.
        stack.enter_context(functorch_config.patch(guess_tangent_strides_as_outputs=True))
        exported = aot_export_joint_with_descriptors(stack, module, tuple(args))
        traced = exported.graph_module
    return _identify(traced, stage, param_names, arg_names, orders)


def orders_of(stage: StageModule, captured: Captured) -> dict[str, DimOrder]:
    """How the values of a graph lie, and the next states of a stage's buffers: as the buffers do."""
    orders = {name: value.order for name, value in captured.graph.value.items()}
    for node, name, kind in zip(
        stage.module.graph.find_nodes(op="placeholder"), stage.names, stage.kinds, strict=True
    ):
        if kind == "buffer":
            orders[f"buffer:{name}"] = memory_order(node.meta["val"])
    return {name: order for name, order in orders.items() if order}


def _identify(
    traced: fx.GraphModule,
    stage: StageModule,
    params: list[str],
    args: list[str],
    orders: Mapping[str, DimOrder],
) -> Joint:
    def input_name(described: Any) -> str:
        if isinstance(described, ParamAOTInput):
            return params[int(described.target.rsplit(".", 1)[1])]
        assert isinstance(described, PlainAOTInput), described
        return args[described.idx]

    graph = traced.graph
    inputs: dict[fx.Node, str] = {}
    tangents: dict[fx.Node, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        described = node.meta["desc"]
        if isinstance(described, TangentAOTInput):
            assert isinstance(described.output, PlainAOTOutput), described
            tangents[node] = stage.outputs[described.output.idx]
        else:
            inputs[node] = input_name(described)
    outputs: dict[str, fx.Node] = {}
    grads: dict[str, fx.Node] = {}
    output = graph.output_node()
    for node, described in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if isinstance(described, PlainAOTOutput):
            outputs[stage.outputs[described.idx]] = node
        elif node is not None:
            assert isinstance(described, GradAOTOutput), described
            grads[input_name(described.grad_of)] = node
    return Joint(graph, traced, inputs, tangents, outputs, grads, orders)


_RENAMES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_VIEW = torch.ops.aten.view.default
_TRANSPOSE = torch.ops.aten.t.default


def simplify(joint: Joint) -> Joint:
    """The same graph, changed in place: no `detach`, no `t` of `t`, and no `view` that could fail."""
    stands_for: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.target is _VIEW:
            node.target = torch.ops.aten.reshape.default
        same = _same_tensor(node)
        if same is not None:
            node.replace_all_uses_with(same)
            stands_for[node] = same

    def final(node: fx.Node) -> fx.Node:
        while node in stands_for:
            node = stands_for[node]
        return node

    for node in reversed(list(joint.graph.nodes)):
        left_over = node in stands_for or node.target is _TRANSPOSE
        if left_over and not node.users:
            joint.graph.erase_node(node)
    return replace(
        joint,
        outputs={name: final(node) for name, node in joint.outputs.items()},
        grads={name: final(node) for name, node in joint.grads.items()},
    )


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """The node whose tensor this call gives back, if that is all it does."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in _RENAMES:
        return source
    if node.target is _TRANSPOSE and source.target is _TRANSPOSE:
        inner = source.args[0]
        assert isinstance(inner, fx.Node)
        return inner
    return None

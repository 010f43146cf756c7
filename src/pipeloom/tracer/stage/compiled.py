"""An fx graph -> one plain Python function that frees every tensor at its last use, and the most bytes alive.

The function takes its inputs in a list and empties it, so that inputs the caller no longer holds are
freed at their last use too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..tensors import tensors_of

BoxedFunction = Callable[[list[Any]], tuple[Any, ...]]


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the nodes whose results nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last.setdefault(node, node)
        for source in node.all_input_nodes:
            last[source] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        dead.setdefault(user, []).append(node)
    return dead


SOURCE = "<pipeloom stage>"
"""What Python calls the file of a compiled graph."""


def compile_graph(graph: fx.Graph, attributes: object) -> tuple[BoxedFunction, dict[int, str]]:
    """Write the graph as Python source and compile it.

    attributes: the module that holds what `get_attr` nodes name.
    Returns: also the op of each line that calls one.
    """
    names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    scope: dict[str, Any] = {}

    def constant(value: Any) -> str:
        key = f"c{len(scope)}"
        scope[key] = value
        return key

    def text(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, (list, tuple)) and _has_node(arg):
            inner = ", ".join(map(text, arg))
            return f"[{inner}]" if isinstance(arg, list) else f"({inner},)"
        return constant(arg)

    placeholders = [names[n] for n in graph.nodes if n.op == "placeholder"]
    lines, ops = ["def run(box):"], dict[int, str]()
    if placeholders:
        lines += [f"    {', '.join(placeholders)}, = box", "    box.clear()"]
    dead = last_uses(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            args = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            call = f"{constant(_fastest(node))}({', '.join(args)})"
            if node.target is getitem:
                call = f"{args[0]}[{args[1]}]"
            elif _left_bytes(node):
                call += ".clone()"
            lines.append(f"    {names[node]} = {call}")
            ops[len(lines)] = str(node.target)
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = {constant(attrgetter(str(node.target))(attributes))}")
        elif node.op == "output":
            lines.append(f"    return {text(tuple(node.args[0]))}")
        if node.op != "output" and (gone := [names[n] for n in dead.get(node, [])]):
            lines.append(f"    del {', '.join(gone)}")
    exec(compile("\n".join(lines), SOURCE, "exec"), scope)
    return scope["run"], ops


def _mkldnn_rnn_layer(*args: Any) -> Any:
    """oneDNN's LSTM makes the workspace that its backward reads in grad mode only; without, that crashes."""
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(
            *(a.detach() if isinstance(a, Tensor) else a for a in args)
        )


_IN_GRAD_MODE: dict[Any, Any] = {torch.ops.aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer}


_OWNERS = (torch._C._VariableFunctions, torch._C._nn, Tensor)
"""Where torch keeps its own functions. They check their arguments in half the time that an op of `torch.ops`
takes, and then call the same."""


def _fastest(node: fx.Node) -> Any:
    """What runs a node with the least work of the host: torch's own function, if it is seen to call the same
    ops with the same arguments, else the op."""
    target: Any = _IN_GRAD_MODE.get(node.target, node.target)
    if not isinstance(target, torch._ops.OpOverload):
        return target
    sources = node.all_input_nodes
    if not sources or any("val" not in source.meta for source in sources):
        return target._op

    def described(source: fx.Node) -> str:
        values = tensors_of(val := source.meta["val"])
        looks = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in values] or type(val).__name__
        return f"input {sources.index(source)}: {looks}"

    key = f"{target} {fx.map_arg((node.args, dict(node.kwargs)), described)}"
    if key not in _found:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
        _found[key] = _fastest_for(target, args, kwargs)
    return _found[key]


_found: dict[str, Callable[..., Any]] = {}


def _fastest_for(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Callable[..., Any]:
    name = target._schema.name.removeprefix("aten::")
    expected = _calls_of(target, args, kwargs)
    for owner in _OWNERS:
        function: Callable[..., Any] | None = getattr(owner, name, None)
        with suppress(TypeError):  # it takes other arguments than the op
            if function is not None and _calls_of(function, args, kwargs) == expected:
                return function
    op: Callable[..., Any] = target._op
    return op


def _calls_of(function: Callable[..., Any], args: Any, kwargs: Any) -> list[list[Any]]:
    """The ops that a function calls, with their arguments: which input a tensor is, or what it looks like."""
    inputs = {id(leaf): at for at, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)}
    calls = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            calls.append([op, *map(look, tree_leaves((args, kwargs)))])
            return op(*args, **kwargs)

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return inputs.get(id(leaf), (leaf.shape, leaf.stride(), leaf.dtype))

    with Recorded(), torch.no_grad():  # type: ignore[no-untyped-call]
        function(*args, **kwargs)
    return calls


def _has_node(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_has_node, arg))
    return isinstance(arg, fx.Node)


_aten = torch.ops.aten
LEFT_IN_THEIR_INPUTS_SIZE = {
    *(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default),
    *(_aten.binary_cross_entropy.default, _aten.col2im.default),
}
"""Losses whose one number PyTorch leaves in memory as large as their input, and the sum of overlapping blocks
(`F.fold`), too. Fake results say otherwise."""


def _left_bytes(node: fx.Node) -> int:
    """Bytes of what such a result is left in: they go at once, because stages keep a clone."""
    if node.target not in LEFT_IN_THEIR_INPUTS_SIZE:
        return 0
    result = node.meta["val"]
    largest = max(t.numel() for source in node.all_input_nodes for t in tensors_of(source.meta["val"]))
    return largest * int(result.element_size()) if result.numel() < largest else 0


def peak_bytes(graph: fx.Graph, owned: Mapping[str, bool]) -> int:
    """The most bytes alive above the level at the start, by the fake results that tracing left in `meta`.
    Each storage counts once, and inputs that the run frees count as alive from the start.

    owned: placeholder name -> whether the caller gives the input up, so that its last use frees it.
    """
    dead = last_uses(graph)
    storages_of: dict[fx.Node, list[int]] = {}
    holders: Counter[int] = Counter()
    size: dict[int, int] = {}
    start: int | None = None
    level = peak = 0
    for node in graph.nodes:
        if start is None and node.op != "placeholder":
            start = peak = level
        if node.op == "output":
            break
        storages = _storages(node.meta.get("val"))
        storages_of[node] = [key for key, _ in storages]
        counted = node.op != "placeholder" or owned.get(node.name, False)
        for key, nbytes in storages:
            if not holders[key]:
                size[key] = nbytes if counted else 0
                level += size[key]
            holders[key] += 1
        peak = max(peak, level + _left_bytes(node))
        if node.op == "placeholder":
            continue
        for gone in dead.get(node, []):
            for key in storages_of.pop(gone):
                holders[key] -= 1
                level -= 0 if holders[key] else size[key]
    assert start is not None, "a graph has an output"
    return peak - start


def _storages(value: Any) -> list[tuple[int, int]]:
    return [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors_of(value)]

"""An fx graph -> one plain Python function that frees every tensor at its last use.

The function takes its inputs in a list and empties it, so that inputs the caller no longer holds are
freed at their last use too. `measure` does the same node by node and reports the most bytes alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

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


def compile_graph(graph: fx.Graph, attributes: object) -> BoxedFunction:
    """Write the graph as Python source and compile it.

    attributes: the module that holds what `get_attr` nodes name.
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
    lines = ["def run(box):"]
    if placeholders:
        lines += [f"    {', '.join(placeholders)}, = box", "    box.clear()"]
    dead = last_uses(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            args = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            target = _IN_GRAD_MODE.get(node.target, node.target)
            lines.append(f"    {names[node]} = {constant(target)}({', '.join(args)})")
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = {constant(_attribute(attributes, node.target))}")
        elif node.op == "output":
            lines.append(f"    return {text(tuple(node.args[0]))}")
        if node.op != "output" and (gone := [names[n] for n in dead.get(node, [])]):
            lines.append(f"    del {', '.join(gone)}")
    exec(compile("\n".join(lines), "<pipeloom stage>", "exec"), scope)
    run: BoxedFunction = scope["run"]
    return run


def _mkldnn_rnn_layer(*args: Any) -> Any:
    """oneDNN's LSTM makes the workspace that its backward reads in grad mode only; without, that crashes."""
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(
            *(a.detach() if isinstance(a, Tensor) else a for a in args)
        )


_IN_GRAD_MODE: dict[Any, Any] = {torch.ops.aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer}


def _has_node(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_has_node, arg))
    return isinstance(arg, fx.Node)


def _attribute(owner: object, path: Any) -> Any:
    for part in str(path).split("."):
        owner = getattr(owner, part)
    return owner


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of one run of a graph.

    peak_bytes: most bytes alive above the level at the start, where inputs that the run frees count as
        alive from the start.  end_bytes: change from start to end (outputs made minus inputs freed).
    """

    peak_bytes: int
    end_bytes: int


class _Count:
    """Bytes alive, by storage, as nodes run and values die."""

    def __init__(self) -> None:
        self.holders: dict[object, int] = {}
        self.size: dict[object, int] = {}
        self.level = 0
        self.peak = 0

    def add(self, storages: Iterable[tuple[object, int]], *, counted: bool = True) -> None:
        for key, size in storages:
            if key not in self.holders:
                self.holders[key] = 0
                self.size[key] = size if counted else 0
                self.level += self.size[key]
            self.holders[key] += 1
        self.peak = max(self.peak, self.level)

    def drop(self, storages: Iterable[tuple[object, int]]) -> None:
        for key, _ in storages:
            self.holders[key] -= 1
            if not self.holders[key]:
                del self.holders[key]
                self.level -= self.size.pop(key)


def _storages(value: Any) -> list[tuple[object, int]]:
    return [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors_of(value)]


def run_measured(
    graph: fx.Graph, attributes: object, box: list[Any], owned: Mapping[str, bool]
) -> tuple[tuple[Any, ...], MemoryUse]:
    """Run a graph once, node by node, and measure what it holds.

    owned: placeholder name -> whether the caller gives the input up, so that its last use frees it.
    """
    values: dict[fx.Node, Any] = {}
    count = _Count()
    inputs = iter(list(box))
    box.clear()
    dead = last_uses(graph)
    start: int | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
            count.add(_storages(values[node]), counted=owned.get(node.name, False))
            continue
        if start is None:
            start, count.peak = count.level, count.level
            del inputs
        if node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: values[n])
            break
        values[node] = (
            _attribute(attributes, node.target)
            if node.op == "get_attr"
            else _IN_GRAD_MODE.get(node.target, node.target)(
                *fx.map_arg(node.args, lambda n: values[n]), **fx.map_arg(node.kwargs, lambda n: values[n])
            )
        )
        count.add(_storages(values[node]))
        for gone in dead.get(node, []):
            count.drop(_storages(values[gone]))
            del values[gone]
    start = start or 0
    return tuple(result), MemoryUse(peak_bytes=count.peak - start, end_bytes=count.level - start)


def predict_memory(graph: fx.Graph, owned: Mapping[str, bool]) -> MemoryUse:
    """The same without running: from the fake results that tracing left in `node.meta`."""
    count = _Count()
    dead = last_uses(graph)
    start: int | None = None
    for node in graph.nodes:
        storages = _storages(node.meta.get("val"))
        if node.op == "placeholder":
            count.add(storages, counted=owned.get(node.name, False))
            continue
        if start is None:
            start, count.peak = count.level, count.level
        if node.op == "output":
            break
        count.add(storages)
        for gone in dead.get(node, []):
            count.drop(_storages(gone.meta.get("val")))
    start = start or 0
    return MemoryUse(peak_bytes=count.peak - start, end_bytes=count.level - start)

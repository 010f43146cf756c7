"""A joint graph -> forward, backward, input-gradient, weight-gradient and recomputation graphs.

    inputs, state --> [ F ] --> outputs                  forward      F, and every random call
                        |
                     residuals   . . . the cut . . .     recompute    dropped residuals, from kept ones
                        |
    tangents ------> [ I ] --> gradients of inputs       input_grad   what gradients of inputs need
                        |                     |
                     carried                  | B        backward     I and W in one
                        |                     |
                     [ W ] --> gradients of weights      weight_grad  the rest

What the backward needs from the forward becomes a residual: always the tensor that owns the storage, never
a view of it, so that no storage is counted or kept twice; views are made again where they are used.
Parameters and buffers are not residuals: they are passed again, and mixed precision casts them again.

What the forward drops is recomputed either ahead of the backward, by a graph of its own and all at once, or
inside the backward: each in front of the first op that reads it, and gone behind the last. A split backward
recomputes in I what I needs and hands on what W reads of that; the rest is recomputed in W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.utils._pytree import tree_map_only

from ...ir.memory_policy import Residual
from ..op_graph import ancestors
from ..random import draws, seed_draws
from ..tensors import copy_in_order, has_order, storage_ids, tensors_of
from .functions import Sink, Slot
from .joint import Joint
from .residuals import chain, describe_residuals, is_view, residual_names, storage_owner

_ADD = torch.ops.aten.add.Tensor
_CAST = torch.ops.aten._to_copy.default
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def add_in_place(graph: fx.Graph, sums: Collection[fx.Node]) -> None:
    """Change those of the `sums` that can be made in place, and the fake results that tell where tensors lie.

    What comes from outside, is read again, or is handed out stays as it is, and so does what is only a
    part of its storage.
    """
    # By storage: the last node that reads it, and all results that lie in it. A sum may be made in place
    # where it is itself the last reader of one of its terms:
    #
    #     a ──┐                     a += b: whatever lay in the sum's storage now lies in that of a, and a's
    #         + ── s ── ...         last reader is that of s: so s may in turn take a further sum
    #     b ──┘
    #
    foreign: set[int] = set()
    last: dict[int, fx.Node] = {}
    inside: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in _storages(node):
            inside.setdefault(storage, []).append(node)
            if node.op != "call_function":
                foreign.add(storage)
        for source in node.all_input_nodes:
            last |= dict.fromkeys(_storages(source), node)
    for node in graph.nodes:
        if node not in sums or node.target is not _ADD or node.kwargs:
            continue
        for target, other in (node.args, node.args[::-1]):
            if isinstance(target, fx.Node) and isinstance(other, fx.Node) and _fits(target, other, node):
                (target_storage,), (sum_storage,) = _storages(target), _storages(node)
                if target_storage in foreign or last[target_storage] is not node:
                    continue
                node.target, node.args = _ADD_IN_PLACE, (target, other)
                for each in inside[sum_storage]:
                    _move(each, sum_storage, target.meta["val"])
                inside[target_storage] += inside.pop(sum_storage)
                last[target_storage] = last.pop(sum_storage, node)
                break


def _fits(target: fx.Node, other: fx.Node, result: fx.Node) -> bool:
    """Whether the sum of `target` and `other` can lie where `target` does."""
    a, b, c = target.meta.get("val"), other.meta.get("val"), result.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not isinstance(c, Tensor):
        return False
    alike = a.shape == c.shape and a.stride() == c.stride() and a.dtype == c.dtype
    whole = a.untyped_storage().nbytes() == a.numel() * a.element_size()
    apart = a.untyped_storage()._cdata != b.untyped_storage()._cdata
    return alike and whole and apart


def _storages(node: fx.Node) -> set[int]:
    return storage_ids(tensors_of(node.meta.get("val")))


def _move(node: fx.Node, storage: int, home: Tensor) -> None:
    """Let a fake result that lies in `storage` lie in that of `home`."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        return home.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    with home.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])


def add_gradient(sink: Sink, name: str, grad: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is ready."""
    sink.add(name, grad)


def add_product(sink: Sink, name: str, left: Tensor, right: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is the matrix product of the two."""
    sink.add_product(name, left, right)


def add_products(graph: fx.Graph) -> None:
    """Let matrix products that are only gradients of a parameter be added up while they are made: no gradient
    of the size of a weight is alive besides the sum."""
    for node in graph.find_nodes(op="call_function", target=add_gradient):
        sink, name, grad = node.args
        if grad.target is torch.ops.aten.mm.default and len(grad.users) == 1:
            node.target, node.args = add_product, (sink, name, *grad.args)
            graph.erase_node(grad)


@dataclass(eq=False)
class Part:
    """One runnable graph of a stage, its placeholders and outputs named by slots."""

    graph: fx.Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


def draw_keys(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Random nodes by the node of the captured graph that they come from, numbered if it became several."""
    keys: dict[fx.Node, str] = {}
    taken: Counter[str] = Counter()
    for node in nodes:
        if draws(node):
            source = (node.meta.get("custom") or {}).get("node", node.name)
            keys[node] = f"{source}#{taken[source]}" if taken[source] else source
            taken[source] += 1
    return keys


class Splitter:
    """Splits a joint graph.

    state: FQNs of parameters and buffers.  updated: those of buffers that the forward replaces: the
    backward gets them as they were, as a residual.
    accumulate: add weight gradients to a sink as soon as they are made, so that no two stay alive, and other
    gradients in place; otherwise graphs are functional, and weight gradients outputs.
    """

    def __init__(
        self, joint: Joint, state: frozenset[str], updated: frozenset[str], accumulate: bool
    ) -> None:
        self.joint = joint
        self.nodes = list(joint.graph.nodes)
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.state = state
        self.updated = updated
        self.accumulate = accumulate
        self.weight_grads = {n: g for n, g in joint.grads.items() if n in state}
        self.input_grads = {n: g for n, g in joint.grads.items() if n not in state}
        self.forward_nodes = self._forward_nodes()
        self.made_of_state = {n for n in self.forward_nodes if self._is_cast_of_state(n)}
        self.names = residual_names(joint, self.forward_nodes)
        self.keys = draw_keys(self.nodes)

    def _forward_nodes(self) -> set[fx.Node]:
        """What the outputs need, and what only the backward needs but must run now: random calls and
        the other results of a forward call."""
        needed = ancestors(self.joint.outputs.values(), lambda n: n.op == "placeholder")
        # In the graph's order, in which a node stands behind all that it reads. All results of one call are
        # taken where it runs, also those that only the backward reads, as what attention keeps.
        after_tangent = set(self.joint.tangents)
        for node in self.nodes:
            if after_tangent.intersection(node.all_input_nodes):
                after_tangent.add(node)
            elif draws(node) or (node.target is getitem and node.args[0] in needed):
                needed |= ancestors([node], lambda n: n.op == "placeholder")
        assert not needed & after_tangent
        return needed

    def _is_cast_of_state(self, node: fx.Node) -> bool:
        """Mixed precision casts each weight. Kept as a residual, the cast would be there once per micro-batch
        in flight; a backward casts the weight anew."""
        if node.target is not _CAST:
            return False
        source = storage_owner(node.args[0])  # type: ignore[arg-type]
        return self.joint.inputs.get(source) in self.state - self.updated

    def residuals(self) -> dict[str, Residual]:
        """What the backward needs of the forward, and how each can be made again."""
        names = {node: self.names[node] for node in self._residual_nodes()}
        return describe_residuals(self.joint, names, self.state, self.updated)

    def parts(self, dropped: Collection[str] = (), *, ahead: bool = False) -> dict[str, Part]:
        """The graphs of the stage, as the picture above has them; `recompute` only if one is needed.

        dropped: residuals, by name, that the forward does not keep.
        ahead: whether `recompute` makes them all, instead of the graphs that read them.
        """
        backward = self._backward_nodes(self.joint.grads.values())
        input_grad = self._backward_nodes(self.input_grads.values())
        input_grad |= _results_of(input_grad, backward)
        weight_grad = self._backward_nodes(self.weight_grads.values()) - input_grad
        residuals = self._residual_nodes()
        kept = [node for node in residuals if self.names[node] not in dropped]
        lost = [node for node in residuals if self.names[node] in dropped]
        in_i, in_w = (set(), set()) if ahead else self._recomputed_inside(input_grad, weight_grad, lost, kept)
        input_grads, weight_grads = self._grad_slots("input_grad"), self._grad_slots("weight_grad")
        weight_part = self._part(weight_grad, weight_grads, recomputed=in_w, carried=in_i)
        names = {slot.name for slot in weight_part.inputs if slot.kind == "carried"}
        carried = [(Slot("carried", node.name), node) for node in self.nodes if node.name in names]
        outputs = [(Slot("output", name), node) for name, node in self.joint.outputs.items()]
        parts = {
            "forward": self._part(self.forward_nodes, outputs + self._residual_slots(kept)),
            "backward": self._part(backward, input_grads + weight_grads, recomputed=in_i | in_w),
            "input_grad": self._part(input_grad, input_grads + carried, recomputed=in_i),
            "weight_grad": weight_part,
        }
        if lost and ahead:
            made_again = chain(lost, set(kept))
            parts["recompute"] = self._part(made_again, self._residual_slots(lost), state=True)
        return parts

    def _recomputed_inside(
        self,
        input_grad: set[fx.Node],
        weight_grad: set[fx.Node],
        lost: list[fx.Node],
        kept: list[fx.Node],
    ) -> tuple[set[fx.Node], set[fx.Node]]:
        """The nodes of the forward that I runs again, and those that W does, which begins with what I has
        made: nothing runs again twice."""
        read = self._read(input_grad, self._grad_slots("input_grad"))
        in_i = chain(set(lost).intersection(read), set(kept))
        read = self._read(weight_grad, self._grad_slots("weight_grad"))
        in_w = chain(set(lost).intersection(read), in_i.union(kept))
        in_i |= _results_of(in_i, in_w)
        return in_i, in_w - in_i

    def _residual_nodes(self) -> list[fx.Node]:
        backward = self._backward_nodes(self.joint.grads.values())
        return [n for n in self._read(backward, self._grad_slots()) if n in self.forward_nodes]

    def _residual_slots(self, nodes: list[fx.Node]) -> list[tuple[Slot, fx.Node]]:
        return [(Slot("residual", self.names[node]), node) for node in nodes]

    def _backward_nodes(self, grads: Iterable[fx.Node]) -> set[fx.Node]:
        stop = self.forward_nodes.__contains__
        return ancestors(grads, lambda n: n.op == "placeholder" or stop(n))

    def _grad_slots(self, *kinds: str) -> list[tuple[Slot, fx.Node]]:
        slots = [(Slot("input_grad", name), node) for name, node in self.input_grads.items()]
        slots += [(Slot("weight_grad", name), node) for name, node in self.weight_grads.items()]
        return [(slot, node) for slot, node in slots if not kinds or slot.kind in kinds]

    def _slot(self, node: fx.Node, in_backward: bool, carried: Collection[fx.Node]) -> Slot:
        """What a node stands for where another graph reads it. carried: see `_part`."""
        if node in self.joint.tangents:
            return Slot("grad", self.joint.tangents[node])
        if node in self.joint.inputs:
            name = self.joint.inputs[node]
            if name not in self.state:
                return Slot("input", name)
            return Slot("old_buffer" if in_backward and name in self.updated else "state", name)
        if node in self.forward_nodes and node not in carried:
            return Slot("residual", self.names[node])
        return Slot("carried", node.name)

    def _part(
        self,
        members: set[fx.Node],
        outputs: list[tuple[Slot, fx.Node]],
        *,
        state: bool = False,
        recomputed: Collection[fx.Node] = (),
        carried: Collection[fx.Node] = (),
    ) -> Part:
        """A graph of these nodes.

        state: whether updated buffers are read as they are, not as they were at the forward.
        recomputed: nodes of the forward that run again here; they always read buffers as they are.
        carried: nodes of the forward that I hands on.
        """
        state = state or members is self.forward_nodes
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        slots: list[Slot] = []
        read_as_it_was = set() if state else set(self._read(members, outputs))
        for node in self._read(members.union(recomputed), outputs):
            copies[node] = graph.placeholder(f"in_{len(slots)}")
            copies[node].meta = {"val": node.meta.get("val")}
            slots.append(self._slot(node, node in read_as_it_was, carried))
        added: dict[fx.Node, list[str]] = {}
        if self.accumulate and any(slot.kind == "weight_grad" for slot, _ in outputs):
            slots.append(Slot("sink", "gradients"))
            sink = graph.placeholder("sink")
            for slot, node in outputs:
                if slot.kind == "weight_grad":
                    added.setdefault(node, []).append(slot.name)
            outputs = [(slot, node) for slot, node in outputs if slot.kind != "weight_grad"]

        def copy(node: fx.Node) -> fx.Node:
            """A node's copy, behind what it needs and nothing has needed so far: nodes that are recomputed,
            and views of what comes from outside."""
            needed = ancestors([node], copies.__contains__)
            for each in sorted(needed, key=self.place.__getitem__):
                results = [n for n in each.users if n.target is getitem and n in recomputed]
                # At once, since a call's results stay alive together until the last of them is taken.
                for one in (each, *results):
                    if one not in copies:
                        copies[one] = graph.node_copy(one, copies.__getitem__)
            return copies[node]

        for node in self.nodes:
            if node in members:
                copy(node)
            for name in added.get(node, ()):
                graph.call_function(add_gradient, (sink, name, copy(node)))
        graph.output(tuple(self._results(graph, [(slot, copy(node)) for slot, node in outputs])))
        if self.accumulate:
            add_in_place(graph, {copies[node] for node in members - self.forward_nodes})
            add_products(graph)
        if seed_draws(graph, {copies[n]: key for n, key in self.keys.items() if n in copies}):
            slots.append(Slot("seed", "seed"))
        return Part(graph, tuple(slots), tuple(slot for slot, _ in outputs))

    def _read(self, members: set[fx.Node], outputs: list[tuple[Slot, fx.Node]]) -> list[fx.Node]:
        """What a graph of these members takes in, in the joint graph's order."""
        sources: set[fx.Node] = set()
        needed = [s for n in members for s in n.all_input_nodes] + [node for _, node in outputs]
        pending = [n for n in needed if n not in members]
        while pending:
            node = pending.pop()
            if (is_view(node) or node in self.made_of_state) and node not in members:
                pending.extend(s for s in node.all_input_nodes if s not in members)
            else:
                sources.add(node)
        return sorted(sources, key=self.place.__getitem__)

    def _results(self, graph: fx.Graph, outputs: list[tuple[Slot, fx.Node]]) -> list[Argument]:
        """Give each output but residuals and carried tensors a storage of its own, and what is sent the
        layout of the value, as the other stage was traced."""
        seen: set[fx.Node] = set()
        results: list[Argument] = []
        for slot, node in outputs:
            base = storage_owner(node)
            shared = base.op == "placeholder" or base in seen
            order = self.joint.orders.get(slot.name, ()) if slot.kind in ("input_grad", "output") else ()
            strided = slot.kind == "input_grad" and not has_order(node.meta["val"], order)
            expanded = slot.kind.endswith("_grad") and not _dense(node.meta["val"])
            if slot.kind not in ("residual", "carried") and (shared or strided or expanded):
                copy = graph.call_function(copy_in_order, (node, order))
                with node.meta["val"].fake_mode:
                    copy.meta = {"val": copy_in_order(node.meta["val"], order)}
                node = copy
            seen.add(storage_owner(node))
            results.append(node)
        return results


def _results_of(calls: Collection[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of the nodes that take a result out of what one of the calls returns."""
    return {node for node in nodes if node.target is getitem and node.args[0] in calls}


def _dense(val: object) -> bool:
    return isinstance(val, Tensor) and val.untyped_storage().nbytes() == val.numel() * val.element_size()

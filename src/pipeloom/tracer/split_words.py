"""Heads and embeddings cut by words, as a rewrite of the captured graph.

A product with a large vocabulary, and the loss that reads it, become parts that a planner may put on
different ranks. Part k has rows [a, b) of the weight:

    h ─┬─ linear, cap, cast by W[0:a] ─▶ log sum exp of its words, the label's value ─┬─▶ loss
       ├─ linear, cap, cast by W[a:b] ─▶ log sum exp of its words, the label's value ─┤
       └─ ...                                                                         ┘

The log sum exp of all words is that of the parts' own. An embedding looks up each word in the part that has
it, takes zeros from the others, and adds them. All are ordinary ops, with autograd's gradients.

Values are followed through the graph as `WordParts` until a reduction joins them again. An op without a rule
here reads the parts put together, which is right and gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, prod
from typing import Any, TypeAlias

import torch
from torch import fx

from ..ir.errors import PlanError
from ..ir.graph import Parameter, PartRows
from .captured import Captured
from .op_graph import build_op_graph
from .program import propagate_gradient_flow
from .random import one_thread_at_a_time
from .tensors import arguments_of

_aten = torch.ops.aten


@one_thread_at_a_time
def split_words(captured: Captured, parts: Mapping[str, int]) -> Captured:
    """The same model with some weights cut by rows.

    parts: FQN of a weight -> in how many. A weight that is cut already stays as it is.
    Raises: PlanError if there is no such weight, or it cannot be cut so often.
    """
    if parts == captured.split_words:
        return captured
    if captured.split_words or captured.cut is not None:
        why = "its words are split already" if captured.split_words else captured.graph.fallback
        raise PlanError(f"the words of {captured.graph.name} cannot be split: {why}", hint="plan again")
    rewrite = _Rewrite(captured, parts)
    rewrite.run()
    return rewrite.captured()


@dataclass(frozen=True, kw_only=True)
class Head:
    """A product by a row for each word, and the loss that reads it.

    names: FQNs of its weight and its bias.  rows: of each.  ops: what is cut with them; the embedding too, if
    the two are tied.
    """

    names: tuple[str, ...]
    rows: int
    ops: tuple[str, ...]


@one_thread_at_a_time
def heads(captured: Captured) -> list[Head]:
    """The products that are read by nothing but what has a rule here, up to a reduction."""
    if captured.cut is not None:
        return []
    graph = captured.graph
    words = {size for node in captured.module.graph.nodes for size in _words_read(node)}
    found = []
    for weight in graph.parameters:
        if len(weight.shape) != 2 or weight.shape[0] not in words or not weight.trainable:
            continue
        names: tuple[str, ...] = (weight.name,)
        if (rewrite := _cut_in_two(captured, names)) is None:
            continue
        read = (name for op in graph.ops if op.name in rewrite.replaced for name in op.params)
        biases = [name for name in dict.fromkeys(read) if graph.parameter[name].shape == weight.shape[:1]]
        if biases and (with_bias := _cut_in_two(captured, (*names, *biases))) is not None:
            names, rewrite = (*names, *biases), with_bias
        replaced = tuple(op.name for op in graph.ops if op.name in rewrite.replaced)
        found.append(Head(names=names, rows=weight.shape[0], ops=replaced))
    return found


def _words_read(node: fx.Node) -> list[int]:
    """How many words a loss reads at once; of another node, none."""
    if node.op != "call_function" or _name(node) not in _OVER_WORDS:
        return []
    arguments = _arguments(node)
    shape = _shape(arguments["self"])
    dims = arguments.get("dim", min(1, len(shape) - 1))  # that of classes
    return [shape[dim] for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _cut_in_two(captured: Captured, names: tuple[str, ...]) -> _Rewrite | None:
    """The rewrite, if it cuts a product and joins all that comes of it."""
    rewrite = _Rewrite(captured, dict.fromkeys(names, 2))
    rewrite.run()
    products = [name for name in rewrite.replaced if _base(captured.graph.op[name].target) in _PRODUCTS]
    return rewrite if products and not rewrite.gathered else None


def part_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """Where a weight of so many rows is cut: at multiples of 8, which kernels like, if it is large.

    >>> part_rows(50, 4), part_rows(1000, 3)
    ([(0, 12), (12, 25), (25, 37), (37, 50)], [(0, 328), (328, 664), (664, 1000)])
    """
    unit = 8 if rows >= 64 * parts else 1
    return list(pairwise([*(rows * k // parts // unit * unit for k in range(parts)), rows]))


@dataclass(frozen=True, eq=False)
class WordParts:
    """A tensor that is there in parts along one of its dimensions.

    bounds: of each along it.  back: that dimension, counted from the end.  shape, dtype: of the whole.
    minus: to be subtracted, of size 1 along the dimension: log-probabilities are logits minus this.
    """

    nodes: tuple[fx.Node, ...]
    bounds: tuple[tuple[int, int], ...]
    back: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    minus: fx.Node | None = None

    @property
    def dim(self) -> int:
        return len(self.shape) + self.back

    @property
    def words(self) -> int:
        return self.shape[self.back]


Result: TypeAlias = "WordParts | fx.Node | None"
"""Of a rule: None if it does not apply."""


class _Rewrite:
    """One pass over a captured graph.

    values: what each of its nodes has become.  rows: of the parts of each weight.  replaced: ops that are
    cut.  gathered: values that are put together for an op that has no rule.
    """

    def __init__(self, captured: Captured, parts: Mapping[str, int]) -> None:
        self.old, self.split = captured, parts
        self.graph = fx.Graph()
        self.targets: dict[str, str] = {}
        self.values: dict[fx.Node, fx.Node | WordParts] = {}
        self.rows: dict[str, list[PartRows]] = {}
        self.replaced: set[str] = set()
        self.gathered: dict[fx.Node, fx.Node] = {}
        self._node = next(iter(captured.module.graph.nodes))

    def run(self) -> None:
        for name, count in self.split.items():
            self._cut_parameter(name, count)
        for node in self.old.module.graph.nodes:
            self._node = node
            if node.op == "placeholder":
                self.values[node] = self._placeholders(node)
                continue
            reads_parts = any(isinstance(self.values[n], WordParts) for n in node.all_input_nodes)
            rule = _RULES.get(_name(node)) if reads_parts and node.op == "call_function" else None
            result = None if rule is None else rule(self, node)
            if result is None:
                result = self.graph.node_copy(node, self._whole)
                result.meta = dict(node.meta)
            else:
                self.replaced.add(node.name)
                if isinstance(result, fx.Node):
                    result._rename(node.name)
            self.values[node] = result
        _part_after_part(self.graph)

    def _cut_parameter(self, name: str, count: int) -> None:
        parameter = self.old.graph.parameter.get(name)
        if parameter is None:
            raise PlanError(f"{self.old.graph.name} has no parameter {name} to split", hint="plan again")
        rows = parameter.shape[0] if parameter.shape else 0
        if not 1 < count <= rows:
            raise PlanError(
                f"{name} has {rows} rows: it cannot be split in {count} parts",
                hint=f"use at most {rows} parts, or leave it whole: --split-words off",
            )
        self.rows[name] = [PartRows(whole=name, start=a, stop=b, of=rows) for a, b in part_rows(rows, count)]

    def captured(self) -> Captured:
        old = self.old
        module = fx.GraphModule(old.module, self.graph)
        learns = {n for n in old.module.graph.find_nodes(op="placeholder") if n.meta["requires_grad"]}
        trainable = {name for node in learns for name in self._names(old.targets[node.name])}
        propagate_gradient_flow(module, self.targets, trainable)
        parameters = tuple(part for whole in old.graph.parameters for part in self._parts_of(whole))
        graph = build_op_graph(
            module, self.targets, old.updates, parameters, old.graph.buffers, old.graph.name
        )
        return replace(
            old,
            graph=graph,
            module=module,
            targets=self.targets,
            evaluation=None,
            traced={},
            split_words=dict(self.split),
        )

    def _names(self, name: str) -> list[str]:
        return [f"{name}[{r.start}:{r.stop}]" for r in self.rows[name]] if name in self.rows else [name]

    def _parts_of(self, whole: Parameter) -> Iterable[Parameter]:
        for name, rows in zip(self._names(whole.name), self.rows.get(whole.name, [None]), strict=True):
            if rows is None:
                yield whole
            else:
                shape = (rows.stop - rows.start, *whole.shape[1:])
                yield replace(whole, name=name, shape=shape, rows=rows, given_update=None)

    # New nodes

    def call(self, part: int | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new op of the node that is being rewritten. part: its number; None for what joins them."""
        where = "joined" if part is None else f"part{part}"
        name = f"{self._node.name}_{where}_{str(target).split('.')[1]}"
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = {key: self._node.meta[key] for key in ("nn_module_stack",) if key in self._node.meta}
        node.meta["part"] = part
        return node

    def _placeholders(self, node: fx.Node) -> fx.Node | WordParts:
        target = self.old.targets[node.name]
        if target not in self.rows:
            copy = self.graph.node_copy(node)
            copy.meta = dict(node.meta)
            self.targets[copy.name] = target
            return copy
        nodes, whole = [], node.meta["val"]
        for name, rows in zip(self._names(target), self.rows[target], strict=True):
            new = self.graph.placeholder(f"{node.name}_{rows.start}_{rows.stop}")
            new.meta = dict(node.meta) | {"val": whole[rows.start : rows.stop]}
            self.targets[new.name] = name
            nodes.append(new)
        bounds = tuple((rows.start, rows.stop) for rows in self.rows[target])
        return WordParts(tuple(nodes), bounds, -whole.ndim, tuple(whole.shape), whole.dtype)

    def _whole(self, node: fx.Node) -> fx.Node:
        """What a node has become, put together if it is in parts: under its old name."""
        value = self.values[node]
        if isinstance(value, fx.Node):
            return value
        if node not in self.gathered:
            whole = self.call(None, _aten.cat.default, list(value.nodes), value.dim)
            if value.minus is not None:
                whole = self.call(None, _aten.sub.Tensor, whole, value.minus)
            whole._rename(node.name)
            self.gathered[node] = whole
        return self.gathered[node]

    def sliced(self, part: int, value: fx.Node, shape: tuple[int, ...], like: WordParts) -> fx.Node:
        """What a part reads of an operand that is whole: all of it, if it is the same for every word."""
        if len(shape) < -like.back or shape[like.back] == 1:
            return value
        return self.call(part, _aten.slice.Tensor, value, len(shape) + like.back, *like.bounds[part])

    # What reductions are made of

    def of_labels(self, part: int, labels: fx.Node, parts: WordParts) -> tuple[fx.Node, fx.Node]:
        """Which labels are among the words of a part; and their rows in it, any row for those of other
        parts. What no part has stays out of bounds, and the kernel refuses it."""
        start, stop = parts.bounds[part]
        row = self.call(part, _aten.sub.Tensor, labels, start)
        # The first part does not clamp below, nor the last one above: a label that is no word at all reaches
        # the kernel of one of them as it is.
        above = self.call(part, _aten.ge.Scalar, row, 0)
        below = self.call(part, _aten.lt.Scalar, row, stop - start)
        inside = self.call(part, _aten.logical_and.default, above, below)
        least, most = (0 if start else None), (stop - start - 1 if stop < parts.words else None)
        return inside, self.call(part, _aten.clamp.default, row, least, most)

    def cast(self, parts: WordParts, dtype: torch.dtype) -> WordParts:
        if parts.dtype is dtype:
            return parts
        nodes = (self.call(k, _aten._to_copy.default, x, dtype=dtype) for k, x in enumerate(parts.nodes))
        return replace(parts, nodes=tuple(nodes), dtype=dtype)

    def log_sum(self, parts: WordParts) -> fx.Node:
        """log sum exp over the words, which are no dimension any more."""
        each = [self._log_sum_of(k, x, parts) for k, x in enumerate(parts.nodes)]
        return self.call(None, _aten.logsumexp.default, self.call(None, _aten.stack.default, each), [0])

    def _log_sum_of(self, part: int, x: fx.Node, parts: WordParts) -> fx.Node:
        """m + log sum exp(x - m), m the largest. The gradient of `logsumexp` makes the exponentials again, in
        three passes over the logits; that of these ops multiplies those that are kept. The sum is 1 at least,
        unless all words of the part are ruled out."""
        call, dims, finite = partial(self.call, part), [parts.dim], torch.finfo(parts.dtype)
        largest = call(_aten.amax.default, call(_aten.detach.default, x), dims, True)
        largest = call(_aten.clamp_min.default, largest, finite.min)
        powers = call(_aten.exp.default, call(_aten.sub.Tensor, x, largest))
        total = call(_aten.clamp_min.default, call(_aten.sum.dim_IntList, powers, dims), finite.tiny)
        return call(
            _aten.add.Tensor, call(_aten.log.default, total), call(_aten.squeeze.dim, largest, parts.dim)
        )

    def total(self, nodes: Iterable[fx.Node]) -> fx.Node:
        return self.call(None, _aten.sum.dim_IntList, self.call(None, _aten.stack.default, list(nodes)), [0])

    def picked(self, parts: WordParts, labels: fx.Node) -> fx.Node:
        """The value of each label; 0 where it is no word. labels: with a dimension in place of the words."""
        found = []
        for k, x in enumerate(parts.nodes):
            inside, row = self.of_labels(k, labels, parts)
            value = self.call(k, _aten.gather.default, x, parts.dim, row)
            found.append(self.call(k, _aten.where.ScalarOther, inside, value, 0.0))
        return self.total(found)

    def summed(self, parts: WordParts) -> fx.Node:
        return self.total(
            self.call(k, _aten.sum.dim_IntList, x, [parts.dim]) for k, x in enumerate(parts.nodes)
        )


Rule: TypeAlias = Callable[[_Rewrite, fx.Node], Result]


def _base(target: str) -> str:
    return target.split(".")[1] if "." in target else target


def _name(node: fx.Node) -> str:
    return _base(str(node.target))


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    return arguments_of(node.target, node.args, node.kwargs)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _parts_of(rewrite: _Rewrite, node: Any) -> WordParts | None:
    value = rewrite.values[node] if isinstance(node, fx.Node) else None
    return value if isinstance(value, WordParts) else None


def _elementwise(rewrite: _Rewrite, node: fx.Node) -> Result:
    """Each part by itself, with its part of operands that are whole."""
    found = {n: value for n in node.all_input_nodes if isinstance(value := rewrite.values[n], WordParts)}
    first = next(iter(found.values()))
    shape = _shape(node)
    if any(p.minus is not None or (p.back, p.bounds) != (first.back, first.bounds) for p in found.values()):
        return None
    if len(shape) < -first.back or shape[first.back] != first.words:
        return None

    def operand(part: int, n: fx.Node) -> fx.Node:
        if n in found:
            return found[n].nodes[part]
        whole = rewrite.values[n]
        assert isinstance(whole, fx.Node)
        return rewrite.sliced(part, whole, _shape(n), first)

    nodes = []
    for k in range(len(first.nodes)):
        operands = {n: operand(k, n) for n in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
        made = rewrite.call(k, node.target, *args, **kwargs)
        if -inf in node.args:  # words that are ruled out: the log sum exp of none but these has no gradient
            made = rewrite.call(k, _aten.clamp_min.default, made, torch.finfo(first.dtype).min)
        nodes.append(made)
    return replace(first, nodes=tuple(nodes), shape=shape, dtype=node.meta["val"].dtype)


def _moved(rewrite: _Rewrite, node: fx.Node) -> Result:
    """A view that leaves the words a dimension of their own: reshape, transpose, slice, select, ..."""
    parts = _parts_of(rewrite, node.args[0])
    if parts is None:
        return None
    after = _shape(node)
    at = _new_place(node, parts)
    if at is None:
        return None
    reshapes = _name(node) in _RESHAPES

    def moved(k: int | None, x: fx.Node, words: int) -> fx.Node:
        if reshapes:
            return rewrite.call(k, _aten.reshape.default, x, [*after[:at], words, *after[at + 1 :]])
        return rewrite.call(k, node.target, x, *node.args[1:], **node.kwargs)

    sizes = [stop - start for start, stop in parts.bounds]
    nodes = tuple(moved(k, x, sizes[k]) for k, x in enumerate(parts.nodes))
    minus = None if parts.minus is None else moved(None, parts.minus, 1)
    return replace(parts, nodes=nodes, back=at - len(after), shape=after, minus=minus)


def _new_place(node: fx.Node, parts: WordParts) -> int | None:
    """Where a view puts the dimension of the words; None if it changes it."""
    name, arguments = _name(node), _arguments(node)
    rank, dim = len(parts.shape), parts.dim
    dims: list[int] = [d % rank for d in arguments.get("dims") or ()]
    if name in _RESHAPES:
        # Entries in front of the dimension, its own size, and entries behind: a reshape keeps a dimension if
        # these three are as they were. (2, 3, words) -> (6, words): (6, words, 1) twice.
        before, after = parts.shape, _shape(node)
        around = prod(before[:dim]), before[dim], prod(before[dim + 1 :])
        places = [(prod(after[:d]), size, prod(after[d + 1 :])) for d, size in enumerate(after)]
        return places.index(around) if around in places else None
    if name == "t":
        return rank - 1 - dim
    if name == "transpose":
        pair = arguments["dim0"] % rank, arguments["dim1"] % rank
        return pair[1 - pair.index(dim)] if dim in pair else dim
    if name == "permute":
        return dims.index(dim)
    if name == "unsqueeze":
        return dim + int(arguments["dim"] % (rank + 1) <= dim)
    if name in ("slice", "select"):
        taken = arguments["dim"] % rank
        return None if taken == dim else dim - int(name == "select" and taken < dim)
    return dim


def _product(rewrite: _Rewrite, node: fx.Node) -> Result:
    """x times the weight, which has the words as rows (linear) or columns (mm, matmul, addmm)."""
    arguments, name = _arguments(node), _name(node)
    x, weight, bias = _PRODUCTS[name]
    cut, left, added = _parts_of(rewrite, arguments[weight]), arguments[x], arguments.get(bias)
    if cut is None or _parts_of(rewrite, left) is not None or len(cut.shape) != 2 or cut.minus is not None:
        return None
    if cut.back != (-2 if name == "linear" else -1):
        return None
    result = replace(cut, back=-1, shape=_shape(node), dtype=node.meta["val"].dtype)
    also = None if added is None else _parts_of(rewrite, added)
    if also is not None and (also.back, also.bounds) != (-1, cut.bounds):
        return None

    def bias_of(part: int) -> list[fx.Node]:
        if added is None:
            return []
        whole = rewrite.values[added]
        return [
            whole.nodes[part]
            if isinstance(whole, WordParts)
            else rewrite.sliced(part, whole, _shape(added), result)
        ]

    nodes = []
    for k, w in enumerate(cut.nodes):
        factors = [rewrite.values[left], w]
        operands = [*bias_of(k), *factors] if name == "addmm" else [*factors, *bias_of(k)]
        nodes.append(rewrite.call(k, node.target, *operands, **node.kwargs))
    return replace(result, nodes=tuple(nodes))


def _embedding(rewrite: _Rewrite, node: fx.Node) -> Result:
    """Each word from the part that has it, and zeros from the others."""
    arguments = _arguments(node)
    cut = _parts_of(rewrite, arguments["weight"])
    indices = rewrite.values[arguments["indices"]]
    if cut is None or cut.back != -2 or isinstance(indices, WordParts) or arguments["scale_grad_by_freq"]:
        return None
    found = []
    for k, (w, (start, stop)) in enumerate(zip(cut.nodes, cut.bounds, strict=True)):
        inside, row = rewrite.of_labels(k, indices, cut)
        padding = arguments["padding_idx"] - start if start <= arguments["padding_idx"] < stop else -1
        looked_up = rewrite.call(k, _aten.embedding.default, w, row, padding)
        inside = rewrite.call(k, _aten.unsqueeze.default, inside, -1)
        found.append(rewrite.call(k, _aten.where.ScalarOther, inside, looked_up, 0.0))
    total = found[0]
    for more in found[1:]:
        total = rewrite.call(None, _aten.add.Tensor, total, more)
    return total


def _cross_entropy(rewrite: _Rewrite, node: fx.Node) -> Result:
    """Of logits (cross_entropy_loss), or of log-probabilities (nll_loss and its kin)."""
    arguments, call = _arguments(node), rewrite.call
    parts, labels = _parts_of(rewrite, arguments["self"]), arguments["target"]
    of_logits, smoothing = _name(node) == "cross_entropy_loss", arguments.get("label_smoothing", 0.0)
    if parts is None or _parts_of(rewrite, labels) is not None or arguments["weight"] is not None:
        return None
    if parts.dim != min(1, len(parts.shape) - 1) or labels.meta["val"].is_floating_point():
        return None
    if of_logits and parts.minus is not None:
        return None
    # In float32 at least, as PyTorch's kernels compute inside.
    logits = rewrite.cast(parts, torch.promote_types(parts.dtype, torch.float32))
    if of_logits:
        log_sum = rewrite.log_sum(logits)
    elif parts.minus is not None:
        log_sum = call(None, _aten.squeeze.dim, parts.minus, parts.dim)
    else:
        return None
    target = rewrite.values[labels]
    counted = call(None, _aten.ne.Scalar, target, arguments["ignore_index"])
    target = call(None, _aten.where.ScalarOther, counted, target, 0)
    label = rewrite.picked(logits, call(None, _aten.unsqueeze.default, target, parts.dim))
    loss = call(None, _aten.sub.Tensor, log_sum, call(None, _aten.squeeze.dim, label, parts.dim))
    # With a share e of smoothing all words are the label alike:
    #     loss = (1 - e) (log sum - x[label]) + e (log sum - mean of x)
    if smoothing:
        mean = call(None, _aten.div.Tensor, rewrite.summed(logits), parts.words)
        of_all = call(None, _aten.sub.Tensor, log_sum, mean)
        loss = call(None, _aten.mul.Tensor, loss, 1 - smoothing)
        loss = call(None, _aten.add.Tensor, loss, of_all, alpha=smoothing)
    loss = call(None, _aten.where.ScalarOther, counted, loss, 0.0)
    if arguments["reduction"]:
        loss = call(None, _aten.sum.default, loss)
    if arguments["reduction"] == _MEAN:
        loss = call(None, _aten.div.Tensor, loss, call(None, _aten.sum.default, counted))
    if logits is not parts:
        loss = call(None, _aten._to_copy.default, loss, dtype=parts.dtype)
    return loss


def _log_softmax(rewrite: _Rewrite, node: fx.Node) -> Result:
    arguments, dtype = _arguments(node), node.meta["val"].dtype
    parts = _parts_of(rewrite, arguments["self"])
    if parts is None or parts.minus is not None or not _over_words([arguments["dim"]], parts):
        return None
    if dtype.itemsize < torch.float32.itemsize:  # PyTorch rounds only what comes out
        return None
    parts = rewrite.cast(parts, dtype)
    log_sum = rewrite.log_sum(parts)
    return replace(parts, minus=rewrite.call(None, _aten.unsqueeze.default, log_sum, parts.dim))


def _log_sum_exp(rewrite: _Rewrite, node: fx.Node) -> Result:
    arguments = _arguments(node)
    parts = _parts_of(rewrite, arguments["self"])
    if parts is None or parts.minus is not None or not _over_words(arguments["dim"], parts):
        return None
    if parts.dtype.itemsize < torch.float32.itemsize:
        return None
    return _kept(rewrite, rewrite.log_sum(parts), arguments["keepdim"], parts)


def _sum(rewrite: _Rewrite, node: fx.Node) -> Result:
    """Of all words: of log-probabilities it is that of the logits, less what is subtracted from each."""
    arguments = _arguments(node)
    parts = _parts_of(rewrite, arguments["self"])
    if parts is None or arguments["dtype"] is not None or not _over_words(arguments.get("dim"), parts):
        return None
    result = rewrite.summed(parts)
    if parts.minus is not None:
        minus = rewrite.call(None, _aten.squeeze.dim, parts.minus, parts.dim)
        result = rewrite.call(None, _aten.sub.Tensor, result, minus, alpha=parts.words)
    if _name(node) == "mean":
        result = rewrite.call(None, _aten.div.Tensor, result, parts.words)
    return _kept(rewrite, result, arguments["keepdim"], parts)


def _over_words(dims: Any, parts: WordParts) -> bool:
    return [d % len(parts.shape) for d in dims or ()] == [parts.dim]


def _kept(rewrite: _Rewrite, result: fx.Node, keeps: bool, parts: WordParts) -> fx.Node:
    return rewrite.call(None, _aten.unsqueeze.default, result, parts.dim) if keeps else result


def _gather(rewrite: _Rewrite, node: fx.Node) -> Result:
    arguments = _arguments(node)
    parts, index = _parts_of(rewrite, arguments["self"]), rewrite.values[arguments["index"]]
    if parts is None or isinstance(index, WordParts) or arguments["dim"] % len(parts.shape) != parts.dim:
        return None
    shape, dim = _shape(node), parts.dim
    if (*shape[:dim], *shape[dim + 1 :]) != (*parts.shape[:dim], *parts.shape[dim + 1 :]):
        return None
    picked = rewrite.picked(parts, index)
    return picked if parts.minus is None else rewrite.call(None, _aten.sub.Tensor, picked, parts.minus)


_MEAN = 1
"""`reduction` of a loss: 0 is none, 2 is the sum."""

_PRODUCTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "self"),
    "mm": ("self", "mat2", ""),
    "matmul": ("self", "other", ""),
}
"""Names of their arguments: x, the weight and the bias."""

_OVER_WORDS = ("cross_entropy_loss", "log_softmax", "logsumexp")
"""What reads all words of a head at once."""

_RESHAPES = ("reshape", "view", "_unsafe_view", "flatten")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, _product),
    "embedding": _embedding,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"), _cross_entropy),
    "log_softmax": _log_softmax,
    "logsumexp": _log_sum_exp,
    "gather": _gather,
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(
        (*_RESHAPES, *"alias clone contiguous detach t transpose permute unsqueeze slice select".split()),
        _moved,
    ),
    **dict.fromkeys(
        """
        add sub mul div neg abs tanh sigmoid exp log sqrt relu gelu silu pow clamp clamp_min clamp_max where
        masked_fill _to_copy to type_as maximum minimum
        """.split(),
        _elementwise,
    ),
}


def _part_after_part(graph: fx.Graph) -> None:
    """Put all ops of a part together, part after part, and what joins them behind: planners of chains cut
    between neighbours."""
    joins: dict[fx.Node, int] = {}
    """Node -> how often parts were joined before it."""
    for node in graph.nodes:
        own = node.meta.get("part")
        read = (joins[n] + (own is None and n.meta.get("part") is not None) for n in node.all_input_nodes)
        joins[node] = max(read, default=0)

    # No node moves in front of one that it reads. Within a level of joins a part reads itself and what is of
    # no part, which comes first; what reads parts and is of none is a level further on.
    def place(node: fx.Node) -> tuple[int, int]:
        part = node.meta.get("part")
        return joins[node], -1 if part is None else part

    output = graph.output_node()
    for node in sorted(graph.nodes, key=place):  # which keeps the order of what has the same place
        if node is not output:
            output.prepend(node)

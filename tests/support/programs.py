"""Random models: programs of a few instructions over tensors of one shape, and random ways to cut them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import nets
import networkx as nx
import torch
from batches import normal
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.memory_policy import MemoryPolicy, Residual

CHANNELS, WIDTH = 4, 6


class Step(NamedTuple):
    """One instruction; a, b: which earlier values it reads, counted from the newest."""

    kind: str
    a: int = 0
    b: int = 0


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(0.5).add_(y, alpha=0.3)
    x[:, 0] = y[:, 1]
    x[:, 2:].tanh_()
    return x


def _halves(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second * y[..., :1], first], -1)


def _frozen(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * y).mean((1, 2), keepdim=True).abs() + 0.5
    return x / scale


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda x, y: x.tanh(),
    "gelu": lambda x, y: fn.gelu(x),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y.sigmoid(),
    "view": lambda x, y: x.view(-1, CHANNELS // 2, 2 * WIDTH).transpose(1, 2).reshape(x.shape),
    "matmul": lambda x, y: (x @ y.transpose(1, 2)).softmax(-1) @ y,
    "halves": _halves,
    "in_place": _in_place,
    "mask": lambda x, y: x.masked_fill(y > 0.5, 0.1) * (x.detach() > -1),
    "sort": lambda x, y: x.gather(-1, y.argsort(-1)),
    "detach": lambda x, y: x + y.detach(),
    "frozen": _frozen,
    "mean": lambda x, y: x - x.mean(-1, keepdim=True).expand_as(y),
    "flip": lambda x, y: x.flip(-1).cumsum(1) * 0.5,
}
WITH_PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(CHANNELS),
    "fixed": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
STATEFUL = ("shared", "embedding", "seen")
RANDOM = ("dropout", "noise")


class Program(nn.Module):
    """Runs its steps; the loss reads the last value and two earlier ones."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.table = nn.Embedding(5, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layers = nn.ModuleDict(
            {str(i): WITH_PARAMETERS[s.kind]() for i, s in enumerate(steps) if s.kind in WITH_PARAMETERS}
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [self.shared(x), y]
        for place, step in enumerate(self.steps):
            a, b = (values[-1 - index % len(values)] for index in (step.a, step.b))
            values.append(self.value(step.kind, place, a, b))
        newest, middle = values[-1], values[len(values) // 2]
        return fn.mse_loss(newest, y) + (self.shared(middle) * values[0]).tanh().mean()

    def value(self, kind: str, place: int, a: Tensor, b: Tensor) -> Tensor:
        if kind in PLAIN:
            return PLAIN[kind](a, b)
        if kind == "shared":
            return self.shared(a).tanh()
        if kind == "seen":
            self.mean.add_(a.detach().mean((0, 1)))
            return a.tanh()
        if kind == "embedding":
            return self.table((b * 2).long().clamp(0, 4)[..., 0]) + a
        if kind == "dropout":
            return fn.dropout(a, 0.3, self.training)
        if kind == "noise":
            return a + torch.randn_like(b) * 0.1
        return self.layers[str(place)](a)


def steps(*, random: bool = False) -> st.SearchStrategy[list[Step]]:
    """Programs of 1 to 9 steps."""
    kinds = (*PLAIN, *WITH_PARAMETERS, *STATEFUL, *(RANDOM if random else ()))
    number = st.integers(0, 5)
    return st.lists(st.builds(Step, st.sampled_from(kinds), number, number), min_size=1, max_size=9)


def job_of(program: Sequence[Step]) -> Job:
    """A float64 job whose model is the program."""

    rows = normal(x=(CHANNELS, WIDTH), y=(CHANNELS, WIDTH))
    single = Job(model=lambda: Program(program), batch=rows, optimizer=nets.sgd, name="program")
    return nets.in_double(replace(single, name="program"))


@st.composite
def policies(draw: st.DrawFn, stages: Sequence[Mapping[str, Residual]]) -> MemoryPolicy:
    """Any treatment of each residual that can have it; recomputed inside the backward or ahead of it."""

    def ways(residual: Residual) -> st.SearchStrategy[str]:
        return st.sampled_from(["offload", "keep", *([] if residual.obstacle else ["recompute"])])

    treatments = tuple({name: draw(ways(r), label=name) for name, r in found.items()} for found in stages)
    ahead = tuple(s for s in range(len(stages)) if draw(st.booleans(), label=f"{s} ahead"))
    return MemoryPolicy(stages=treatments, ahead=ahead)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cut:
    """stage_of: op -> stage.  placement: stage -> rank."""

    stage_of: dict[str, int]
    placement: tuple[int, ...]


@st.composite
def cuts(draw: st.DrawFn, graph: OpGraph) -> Cut:
    """Any cut whose stages form a DAG: their ops need not be neighbours in the list of ops."""
    blocks = _blocks(graph)
    order = _random_order(draw, blocks)
    count = draw(st.integers(1, min(4, len(order))), label="stages")
    ends = sorted(draw(st.permutations(range(1, len(order))), label="ends")[: count - 1])
    names = draw(st.permutations(range(count)), label="names of stages")
    stage_of = {
        op: names[sum(end <= place for end in ends)]
        for place, block in enumerate(order)
        for op in blocks.nodes[block]["members"]
    }
    ranks = draw(st.integers(1, count), label="ranks")
    free = draw(st.lists(st.integers(0, ranks - 1), min_size=count - ranks, max_size=count - ranks))
    placement = draw(st.permutations([*range(ranks), *free]), label="placement")
    return Cut(stage_of, tuple(placement))


def _blocks(graph: OpGraph) -> nx.DiGraph:
    """What may be cut apart, as a DAG; nodes carry the ops of a block as `members`."""
    wiring = nx.DiGraph()
    wiring.add_nodes_from(op.name for op in graph.ops if not op.cheap)
    for op in graph.ops:
        for name in op.inputs:
            maker = graph.producer.get(name)
            if maker in wiring and op.name in wiring:
                wiring.add_edge(maker, op.name)
    for group in graph.together.values():
        nx.add_cycle(wiring, group)
    return nx.condensation(wiring)


def _random_order(draw: st.DrawFn, blocks: nx.DiGraph) -> list[int]:
    """One of the orders in which the blocks can run."""
    waiting = {block: blocks.in_degree(block) for block in blocks}
    order: list[int] = []
    while ready := sorted(block for block, count in waiting.items() if count == 0):
        chosen = ready[draw(st.integers(0, len(ready) - 1))] if len(ready) > 1 else ready[0]
        order.append(chosen)
        del waiting[chosen]
        for reader in blocks.successors(chosen):
            waiting[reader] -= 1
    return order

"""Graphs of ops for the planner: chains by hand, random graphs with everything that the cost model
distinguishes, and searches for their cuts."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.graph import Buffer, Op, OpGraph, Parameter, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions

Draw = Callable[[Any], Any]


def wired(
    reads: Sequence[Sequence[int]],
    sizes: Sequence[int],
    weights: Sequence[int],
    costs: Sequence[OpCost],
    *,
    name: str = "wired",
    device: str = "d",
    modules: Sequence[str] = (),
    x: tuple[int, ...] = (4,),
    tied: bool = False,
) -> tuple[OpGraph, Profile]:
    """Ops that read earlier ones, or the input, and make v0, v1, ...; each has a weight.

    sizes, weights: how many numbers.  x: shape of the input.  tied: the last op has the first one's weight.
    """
    count = len(reads)
    owned = [f"w{0 if tied and k == count - 1 else k}" for k in range(count)]
    ops = tuple(
        Op(
            name=f"op{k}",
            target="aten.linear.default",
            inputs=tuple(f"v{j}" for j in reads[k]) or ("x",),
            outputs=(Value(name=f"v{k}", shape=(sizes[k],), dtype="float32", needs_grad=True),),
            params=(owned[k],),
            module=modules[k] if modules else "",
        )
        for k in range(count)
    )
    inputs = (Value(name="x", shape=x, dtype="float32"),)
    params = (Parameter(name=n, shape=(weights[int(n[1:])],), dtype="float32") for n in dict.fromkeys(owned))
    given = {"inputs": inputs, "parameters": tuple(params), "buffers": (), "loss": f"v{count - 1}"}
    graph = OpGraph(name=name, ops=ops, **given)
    each = {op.name: cost for op, cost in zip(ops, costs, strict=True)}
    return graph, Profile(device=device, source="hand", graph=graph.fingerprint, batch=(), costs=each)


def op_chain(
    seconds: Sequence[float],
    sizes: Sequence[int] = (),
    *,
    weight: int = 10,
    back: float = 0.0,
    device: str = "cpu",
    x: tuple[int, ...] = (10,),
    **more: Any,
) -> tuple[OpGraph, Profile]:
    """x -> op0 -> op1 ...; each saves its input.

    sizes: numbers in each result, 10 by default.  weight: numbers in each weight.  back: I and W of an op
    take so many times its forward.  more: as of `wired`.
    """
    count, takes = len(seconds), zip(seconds, ("x", *(f"v{k}" for k in range(len(seconds)))), strict=False)
    costs = [
        OpCost(forward_s=float(s), input_grad_s=back * s, weight_grad_s=back * s, saves=(source,))
        for s, source in takes
    ]
    reads = [[k - 1] if k else [] for k in range(count)]
    sizes, weights = sizes or (10,) * count, (weight,) * count
    return wired(reads, sizes, weights, costs, name="chain", device=device, x=x, **more)


def op_graph(draw: Draw, ops: int) -> OpGraph:
    """`ops` assignable ops with views, cheap ops, tied parameters, buffers and several outputs."""
    parameters = tuple(
        Parameter(name=f"p{k}", shape=(draw(st.integers(1, 50)),), dtype="float32", trainable=k != 1)
        for k in range(3)
    )
    inputs = (Value(name="x", shape=(draw(st.integers(1, 20)),), dtype="int64"),)
    values = {"x": inputs[0]}
    made: list[Op] = []
    while sum(not op.cheap for op in made) < ops:
        index = len(made)
        kind = draw(st.sampled_from(["plain", "plain", "plain", "view", "view", "cheap", "cheap view"]))
        cheap, view = "cheap" in kind, "view" in kind
        reads = draw(st.lists(st.sampled_from(sorted(values)), max_size=1 if view else 3, unique=True))
        params = [] if cheap else draw(st.lists(st.sampled_from(["p0", "p1", "p2"]), max_size=2 - view))
        if view and reads:
            params = []
        grad = not cheap and (draw(st.booleans()) if not view or not reads else values[reads[0]].needs_grad)
        outputs = tuple(
            Value(name=f"v{index}_{k}", shape=(draw(st.integers(1, 40)),), dtype="float32", needs_grad=grad)
            for k in range(draw(st.integers(1, 2)))
        )
        made.append(
            Op(
                name=f"op{index}",
                target="aten.some.default",
                inputs=tuple(reads),
                outputs=outputs,
                params=tuple(dict.fromkeys(params)),
                buffers=("b0",) if draw(st.integers(0, 5)) == 0 else (),
                view=view,
                cheap=cheap,
            )
        )
        values |= {v.name: v for v in outputs}
    last = [op for op in made if not op.cheap][-1]
    buffers, loss = (Buffer(name="b0", shape=(7,), dtype="float32"),), last.outputs[0].name
    given = {"inputs": inputs, "parameters": parameters, "buffers": buffers, "loss": loss}
    return OpGraph(name="random", ops=tuple(made), **given)


def profile_of(draw: Draw, graph: OpGraph) -> Profile:
    """Random costs; what an op saves is named by a value that it touches."""
    costs = {}
    for op in graph.ops:
        touched = sorted({*op.inputs, *(v.name for v in op.outputs)})
        costs[op.name] = OpCost(
            forward_s=draw(st.integers(0, 9)),
            input_grad_s=0.0 if op.cheap else draw(st.integers(0, 9)),
            weight_grad_s=0.0 if op.cheap else draw(st.integers(0, 9)),
            saves=tuple(draw(st.lists(st.sampled_from(touched), max_size=2, unique=True))),
            extra_saved_bytes=draw(st.integers(0, 30)),
            transient_bytes=draw(st.integers(0, 100)),
        )
    return Profile(device="cpu", source="random", graph=graph.fingerprint, batch=(), costs=costs)


def cluster_of(
    caps: Sequence[int], bandwidth: float = 1e9, latency_s: float = 0.0, nodes: int = 1
) -> Cluster:
    """A device for each cap, in turn on so many nodes, between which links are slower."""
    each = enumerate(caps)
    devices = tuple(Device(name=f"d{rank}", memory_bytes=cap, node=rank % nodes) for rank, cap in each)
    within = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    between = Link(bandwidth_bytes_per_s=bandwidth / 4, latency_s=2 * latency_s)
    return Cluster(devices=devices, within_node=within, between_nodes=between)


def search_for(graph: OpGraph, profiles: Profile | Sequence[Profile], cluster: Cluster) -> Search:
    """For a stage on each device, under 1F1B with two micro-batches for each of them."""
    stages = len(cluster.devices)
    each = [profiles] * stages if isinstance(profiles, Profile) else list(profiles)
    return Search(
        model=CostModel(graph, each, cluster, CostOptions(microbatches=2 * stages)),
        caps=tuple(device.memory_bytes for device in cluster.devices),
        in_flight=tuple(range(stages, 0, -1)),
    )


def layered_search(modules: Sequence[str], stages: int, cap: int = 10**9) -> Search:
    """A chain of ops of these modules, one second each, for so many stages."""
    graph, profile = op_chain([1.0] * len(modules), modules=modules)
    return search_for(graph, profile, cluster_of([cap] * stages))

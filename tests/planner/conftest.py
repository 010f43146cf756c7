"""Random graphs with everything that the cost model distinguishes, and small clusters."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.graph import Buffer, Op, OpGraph, Parameter, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions

Draw = Callable[[Any], Any]


def op_graph(draw: Draw, ops: int) -> OpGraph:
    """`ops` assignable ops with views, cheap ops, tied parameters, buffers and several outputs."""
    parameters = tuple(
        Parameter(name=f"p{k}", shape=(draw(st.integers(1, 50)),), dtype="float32", trainable=k != 1)
        for k in range(3)
    )
    buffers = (Buffer(name="b0", shape=(7,), dtype="float32"),)
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
    return OpGraph(
        name="random",
        inputs=inputs,
        ops=tuple(made),
        parameters=parameters,
        buffers=buffers,
        loss=last.outputs[0].name,
    )


def profile_of(draw: Draw, graph: OpGraph, device: str = "cpu") -> Profile:
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
    return Profile(device=device, source="random", graph=graph.fingerprint, batch=(), costs=costs)


@pytest.fixture(scope="session")
def draw_graph() -> Callable[[Draw, int], OpGraph]:
    return op_graph


@pytest.fixture(scope="session")
def draw_profile() -> Callable[..., Profile]:
    return profile_of


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    def make(caps: list[int], bandwidth: float = 1e9, latency_s: float = 0.0, nodes: int = 1) -> Cluster:
        devices = tuple(
            Device(name=f"d{rank}", memory_bytes=cap, node=rank % nodes) for rank, cap in enumerate(caps)
        )
        within = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
        between = Link(bandwidth_bytes_per_s=bandwidth / 4, latency_s=2 * latency_s)
        return Cluster(devices=devices, within_node=within, between_nodes=between)

    return make


@pytest.fixture(scope="session")
def layered_search(make_cluster: Callable[..., Cluster]) -> Callable[[list[str], int], Search]:
    """A chain of ops of these modules, one second each, for so many stages."""

    def make(modules: list[str], stages: int, cap: int = 10**9) -> Search:
        ops, source = [], "x"
        for k, module in enumerate(modules):
            out = Value(name=f"v{k}", shape=(10,), dtype="float32", needs_grad=True)
            ops.append(
                Op(
                    name=f"op{k}",
                    target="aten.linear.default",
                    inputs=(source,),
                    outputs=(out,),
                    params=(f"w{k}",),
                    module=module,
                )
            )
            source = out.name
        graph = OpGraph(
            name="layered",
            inputs=(Value(name="x", shape=(10,), dtype="float32"),),
            ops=tuple(ops),
            parameters=tuple(Parameter(name=f"w{k}", shape=(10,), dtype="float32") for k in range(len(ops))),
            buffers=(),
            loss=source,
        )
        costs = {op.name: OpCost(forward_s=1.0, saves=op.inputs) for op in ops}
        profile = Profile(device="cpu", source="hand", graph=graph.fingerprint, batch=(), costs=costs)
        cluster = make_cluster([cap] * stages)
        model = CostModel(graph, [profile] * stages, cluster, CostOptions(microbatches=2 * stages))
        return Search(model=model, caps=(cap,) * stages, in_flight=tuple(range(stages, 0, -1)))

    return make

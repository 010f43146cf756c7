"""Random stages with all that decides about residuals, for tests of memory optimisation and its bench."""

import random

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.graph import Op, OpGraph, Parameter, UpdateBytes, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions


def random_model(
    seed: int,
    ops: int,
    *,
    microbatches: int = 16,
    host_bytes_per_s: float | None = 40.0,
    host_memory: int = 0,
    equal_times: bool = False,
    several_outputs: bool = False,
) -> CostModel:
    """The cost model of one random graph on 8 equal devices, in a world of bytes per second.

    Most ops read the one before; some also an earlier value. A good half save their result or an input; some
    draw random numbers, some pass their gradient on.  equal_times: of all ops.  several_outputs: of some ops.
    """
    draw, more = random.Random(seed), random.Random(seed)
    made: list[Op] = []
    costs: dict[str, OpCost] = {}
    values = [Value(name="x", shape=(8,), dtype="float32")]
    for index in range(ops):
        earlier = [values[-1].name, *([draw.choice(values).name] if draw.random() < 0.3 else [])]
        inputs = tuple(dict.fromkeys(earlier))
        out = Value(name=f"v{index}", shape=(draw.randint(1, 40),), dtype="float32", needs_grad=True)
        others = tuple(
            Value(name=f"v{index}.{n}", shape=(more.randint(1, 40),), dtype="float32", needs_grad=True)
            for n in range(more.choice((0, 0, 1, 2)) if several_outputs and index < ops - 1 else 0)
        )
        op = Op(
            name=f"v{index}",
            target="aten.some.default",
            inputs=inputs,
            outputs=(out, *others),
            params=("w",) if draw.random() < 0.3 else (),
            random=draw.random() < 0.1,
        )
        made.append(op)
        values += op.outputs
        saves = [v for v in (*inputs, out.name) if draw.random() < 0.4]
        saves += [v.name for v in others if more.random() < 0.4]
        forward = 1.0 if equal_times else draw.uniform(0.2, 2.0)
        costs[op.name] = OpCost(
            **dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), forward),
            saves=tuple(saves),
            extra_saved_bytes=draw.choice((0, 0, 8)),
            transient_bytes=draw.choice((0, 0, 40)),
            passes=inputs[:1] if draw.random() < 0.3 else (),
        )
    momentum = UpdateBytes(state=20, step=20)
    weight = Parameter(name="w", shape=(5,), dtype="float32", given_update=momentum)
    given = {"inputs": (values[0],), "parameters": (weight,), "buffers": (), "loss": values[-1].name}
    graph = OpGraph(name="random", ops=tuple(made), **given)
    profile = Profile(device="d", source="random", graph=graph.fingerprint, batch=(), costs=costs)
    host = None if host_bytes_per_s is None else Link(bandwidth_bytes_per_s=host_bytes_per_s)
    device = Device(name="d", memory_bytes=1 << 40, host_link=host, host_memory_bytes=host_memory)
    cluster = Cluster(devices=(device,) * 8, within_node=Link(bandwidth_bytes_per_s=1e9))
    return CostModel(graph, [profile] * 8, cluster, CostOptions(microbatches=microbatches))

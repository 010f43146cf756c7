"""Random op graphs: chains, series-parallel graphs, others; requests for them, and their plans."""

import random
from dataclasses import replace

from random_ops import wired

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.planners import PLANNERS, make_plan
from pipeloom.planner.refusals import least_share
from pipeloom.planner.request import PlanOptions, Request

Reads = list[list[int]]
"""Of each op those that it reads, all earlier ones."""

KINDS = ("chain", "series-parallel", "any")


def reads_of(dice: random.Random, ops: int, kind: str) -> Reads:
    """A graph of so many ops, the last of which makes the loss."""
    if kind == "chain":
        return [[i - 1] if i else [] for i in range(ops)]
    if kind == "any":
        reads = [sorted(dice.sample(range(i), min(i, dice.randint(1, 2)))) for i in range(ops)]
        unread = set(range(ops - 1)) - {i for row in reads for i in row}
        reads[-1] = sorted({*reads[-1], *unread})
        return reads
    reads = [[]]
    heads = _grow(dice, reads, [0], ops - 2)
    reads.append(sorted(set(heads)))
    return reads


def _grow(dice: random.Random, reads: Reads, heads: list[int], ops: int) -> list[int]:
    """Add so many ops behind heads, as a series or as branches; returns the ops that nothing reads yet."""
    if ops <= 0:
        return heads
    if ops == 1 or dice.random() < 0.4:
        reads.append(sorted(set(heads)))
        return _grow(dice, reads, [len(reads) - 1], ops - 1)
    first = dice.randint(1, ops - 1)
    left, right = _grow(dice, reads, heads, first), _grow(dice, reads, heads, ops - first)
    return sorted({*left, *right})


def random_graph(seed: int, ops: int, kind: str) -> tuple[OpGraph, Profile]:
    """A graph with trainable ops of unequal times, each of which saves what it makes, in a world of bytes per
    second."""
    dice = random.Random(seed)
    reads = reads_of(dice, ops, kind)
    sizes, weights = ([dice.randint(1, most) for _ in range(ops)] for most in (30, 20))

    def cost(op: int) -> OpCost:
        forward, back, weight = (dice.randint(1, 9) for _ in "FIW")
        return OpCost(forward_s=forward, input_grad_s=back, weight_grad_s=weight, saves=(f"v{op}",))

    return wired(reads, sizes, weights, [cost(op) for op in range(ops)], name=f"{kind} {seed}")


def cluster_of(stages: int, memory: int = 1 << 40, bytes_per_s: float = 100.0) -> Cluster:
    devices = tuple(Device(name="d", memory_bytes=memory) for _ in range(stages))
    return Cluster(devices=devices, within_node=Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0))


def request_for(
    graph: OpGraph,
    profile: Profile,
    stages: int,
    *,
    slack: float | None = None,
    schedule: str = "1f1b",
    bytes_per_s: float = 100.0,
) -> Request:
    """To cut a graph. slack: caps as multiples of the least with which some cut into a chain fits."""
    cluster = cluster_of(stages, bytes_per_s=bytes_per_s)
    options = PlanOptions(schedule=schedule, microbatches=2 * stages, planner="graphpipe", treatments=())
    request = Request(graph, profile, cluster, options, PLANNERS["graphpipe"])
    if slack is None:
        return request
    memory = int(least_share(request.search())[0] * cluster.devices[0].memory_bytes * slack) + 1
    return replace(request, cluster=cluster_of(stages, memory, bytes_per_s))


def plan_of(request: Request, strategy: str = "graphpipe", **options) -> Plan:
    """The plan of a request by a planner. Raises: InfeasibleError if nothing fits."""
    given = request.graph, request.profile, request.cluster, request.options
    how = {"ranks": len(request.cluster.devices), "planner": strategy, "explained": False}
    return make_plan(*given, **how | options)


def step_s(request: Request, strategy: str = "graphpipe", **options) -> float:
    """Seconds of the planned step; infinite if nothing fits."""
    try:
        return plan_of(request, strategy, **options).predicted_step_s
    except InfeasibleError:
        return float("inf")

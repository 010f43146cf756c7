"""Reader of the graphs that Piper was published with: JSON files of msr-fiddle/piper, read from a path.

A node has, per degree of tensor parallelism, ways to run it. Read is the first one of degree 1, in which
nothing is recomputed: timePerSample (forward and backward), parameterSize, memoryUsageA (residuals of a
micro-batch), memoryUsageB (parameters and what belongs to them). An edge has communicationCost, in bytes. Of
the whole graph: maxDevices, maxMemoryPerDevice, bandwidth, mbsInBatch (maxBatchSize in its README).

Two of the published files, gnmt and resnet, give times in milliseconds and the bandwidth in bytes per second:
read them with `seconds_per_unit=1e-3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import Op, OpGraph, Parameter, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.search.down_sets import PieceGraph

MOST_BYTES = 256 * 1024**2
"""Size of a file beyond which it is refused unread."""


@dataclass(frozen=True, kw_only=True)
class PiperGraph:
    """pieces: the nodes in a topological order.  names: of them.  parameters: bytes of each node's."""

    pieces: PieceGraph
    names: tuple[str, ...]
    parameters: tuple[float, ...]
    devices: int
    memory_bytes: float
    bandwidth: float
    microbatches: int

    def as_model(self, devices: int | None = None) -> tuple[OpGraph, Profile, Cluster]:
        """The same for `make_plan`: an op per node, so that every planner can be asked.

        A third of an op's time is its forward, a third each the gradients of its inputs and parameters. Each
        op makes, besides the values that others read, one that nobody reads and that is its residual.
        """
        ops, costs = [], {}
        reads: dict[int, list[str]] = {piece: [] for piece in range(len(self.names))}
        made: dict[int, list[Value]] = {piece: [] for piece in range(len(self.names))}
        for number, (maker, readers, size) in enumerate(self.pieces.values):
            value = _value(f"v{number}", size, needs_grad=True)
            made[maker].append(value)
            for reader in readers:
                reads[reader].append(value.name)
        parameters = tuple(
            Parameter(name=f"p{piece}", shape=(round(size / 4),), dtype="float32")
            for piece, size in enumerate(self.parameters)
        )
        for piece, (name, seconds) in enumerate(zip(self.names, self.pieces.seconds, strict=True)):
            held = _value(f"r{piece}", self.pieces.held_bytes[piece])
            last = [] if made[piece] else [_value(f"end{piece}", 4, needs_grad=True)]
            ops.append(
                Op(
                    name=f"{piece}:{name}",
                    target="piper.node",
                    inputs=tuple(reads[piece]),
                    outputs=(*made[piece], *last, held),
                    params=(f"p{piece}",) if self.parameters[piece] else (),
                )
            )
            third = seconds / 3
            costs[ops[-1].name] = OpCost(
                forward_s=third, input_grad_s=third, weight_grad_s=third, saves=(held.name,)
            )
        ends = [value.name for op in ops for value in op.outputs if value.name.startswith("end")]
        graph = OpGraph(
            name="piper", inputs=(), ops=tuple(ops), parameters=parameters, buffers=(), loss=ends[-1]
        )
        profile = Profile(device="any", source="roofline", graph=graph.fingerprint, batch=(), costs=costs)
        device = Device(name="any", memory_bytes=round(self.memory_bytes))
        link = Link(bandwidth_bytes_per_s=self.bandwidth)
        return graph, profile, Cluster(devices=(device,) * (devices or self.devices), within_node=link)


def read_piper_graph(path: Path, *, seconds_per_unit: float = 1.0) -> PiperGraph:
    """Read a graph.

    seconds_per_unit: of its times.
    Raises: PlanError if the file cannot be read, lacks a field, or its nodes wait in a circle.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(
                f"{path} is larger than {MOST_BYTES:,} bytes", hint="is it one of Piper's graphs?"
            )
        found = msgspec.json.decode(path.read_bytes())
        return _graph(found, seconds_per_unit)
    except (OSError, msgspec.DecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}", hint="name one of Piper's JSON files") from None
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"{path} is not a graph as Piper has them: {type(error).__name__} {error}",
            hint="its README names the fields; pipeloom reads the ways of tensor parallelism 1",
        ) from None


def _graph(found: Mapping[str, Any], seconds_per_unit: float) -> PiperGraph:
    nodes = {int(node["id"]): node for node in found["nodes"]}
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for edge in found["edges"]:
        before[int(edge["destId"])].append(int(edge["sourceId"]))
        before[int(edge["sourceId"])]  # a KeyError if there is no such node
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ValueError(f"its nodes wait in a circle: {error.args[1]}") from None
    place = {node: number for number, node in enumerate(order)}
    ways = [nodes[node]["TMPCs"]["1"][0] for node in order]
    return PiperGraph(
        pieces=PieceGraph(
            seconds=tuple(float(way["timePerSample"]) * seconds_per_unit for way in ways),
            held_bytes=tuple(float(way["memoryUsageA"]) for way in ways),
            state_bytes=tuple(float(way["memoryUsageB"]) for way in ways),
            values=tuple(
                (place[int(e["sourceId"])], (place[int(e["destId"])],), float(e["communicationCost"]))
                for e in found["edges"]
            ),
        ),
        names=tuple(str(nodes[node].get("name", node)) for node in order),
        parameters=tuple(float(way["parameterSize"]) for way in ways),
        devices=int(found["maxDevices"]),
        memory_bytes=float(found["maxMemoryPerDevice"]),
        bandwidth=float(found["bandwidth"]),
        microbatches=int(found["mbsInBatch"] if "mbsInBatch" in found else found["maxBatchSize"]),
    )


def _value(name: str, size: float, *, needs_grad: bool = False) -> Value:
    return Value(name=name, shape=(max(1, round(size / 4)),), dtype="float32", needs_grad=needs_grad)

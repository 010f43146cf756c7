"""What many tests make: devices that are alike, rows as text, a schedule of the library, its step."""

from math import inf
from random import Random

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.schedule import Schedule, parse_pairs, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.timeline import MemoryCurve, Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate


def alike(count: int, bytes_per_s: float = inf, latency_s: float = 0.0, memory: int = 1) -> Cluster:
    """So many devices of one kind; by default messages take no time."""
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Cluster(devices=(Device(name="d", memory_bytes=memory),) * count, within_node=link)


def by_hand(*lines: str, placement: tuple[int, ...] | None = None, microbatches: int = 0) -> Schedule:
    """A line for each rank; stage s on rank s, and the micro-batches that the rows name."""
    rows = parse_rows(lines)
    return Schedule(
        name="hand",
        microbatches=microbatches or 1 + max(a.microbatch for row in rows for a in row),
        placement=tuple(range(len(rows))) if placement is None else placement,
        rows=rows,
        pairs=parse_pairs(lines),
    )


def built(name: str, ranks: int, microbatches: int, chunks: int = 0, **how: object) -> Schedule:
    """A schedule of the library in its usual placement."""
    stages, placement = registry.default_placement(name, ranks, chunks)
    return registry.build(name, stages, placement, microbatches, **how)  # type: ignore[arg-type]


def simulated(
    made: Schedule,
    costs: tuple[StageCost, ...] = (),
    stages: StageGraph | None = None,
    where: Cluster | None = None,
) -> Timeline:
    """F = I = W = 1 s, a chain and messages that take no time, unless the arguments say otherwise."""
    stages = stages or chain(made.stages)
    program = lower(made, stages)
    return simulate(program, stages, costs or equal_costs(made.stages), where or alike(made.ranks))


def changes(curve: MemoryCurve) -> list[tuple[float, int]]:
    """What is held from each time on, where it changes."""
    steps = list(dict(zip(curve.times_s, curve.sizes, strict=True)).items())
    return [step for i, step in enumerate(steps) if i == 0 or step[1] != steps[i - 1][1]]


def whole_costs(stages: int, seed: int) -> tuple[StageCost, ...]:
    """Uneven costs in whole numbers, so that sums of floats are exact."""
    dice = Random(seed)

    def number() -> int:
        return dice.randint(1, 9)

    def cost() -> StageCost:
        times = {name: number() for name in ("forward_s", "backward_s", "input_grad_s", "step_s")}
        held = {name: number() for name in ("residual_bytes", "carried_bytes")}
        held |= {"static_bytes": {"parameters": number()}, "tied_bytes": {"x": 8, "y": 4}}
        transient = {"F": number(), "STEP": number()}
        return StageCost(**times, **held, weight_grad_s=dice.randint(0, 9), transient_bytes=transient)

    return tuple(cost() for _ in range(stages))

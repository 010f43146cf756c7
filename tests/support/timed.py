"""A schedule of the library for some times, as the list scheduler expects it."""

from pipeloom.ir.costs import equal_costs
from pipeloom.schedules import registry
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose import fastest
from pipeloom.schedules.list_scheduler.engine import ScheduledRecipe


def shape(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 0,
    *,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    transfer_s: float = 0.0,
) -> Shape:
    stages, placement = registry.default_placement(name, ranks, chunks)
    f, i, w = times
    costs = equal_costs(len(placement), forward_s=f, input_grad_s=i, weight_grad_s=w)
    options = dict(o.split("=") for o in filter(None, name.partition(":")[2].split(",")))
    return Shape(
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        costs=costs,
        transfer_s=lambda source, target: transfer_s,
        options={k: float(v) for k, v in options.items()},
    )


def made_for(name: str, s: Shape) -> ScheduledRecipe:
    recipe = registry.entry(name).recipe
    assert recipe is not None
    return fastest(s, recipe)


def one(p: int) -> float:
    """What p ranks hold, in micro-batches: a peak of 1F1B; half and a third of it, as V schedules have."""
    return p


def half(p: int) -> float:
    return p // 2 + 1


def third(p: int) -> float:
    return (p + 4) // 3

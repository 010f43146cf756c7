"""equal: as many of the repeated layers in each stage as in any other; Megatron-LM's division.

The embedding goes with the first layer, and what follows a layer with that layer, the head and the loss with
the last one. Where the number of stages does not divide that of the layers, shares differ by one. Neither
times nor memory are looked at. Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 (each device is
assigned an equal number of layers).
"""

from __future__ import annotations

from ...ir.errors import PlanError
from ..search.cut_search import Search
from ..search.layer_groups import layers
from ..search.problem import Cuts


def equal(search: Search) -> Cuts:
    """Cut positions. Raises: PlanError if there are fewer layers than stages."""
    points = search.model.cut_points.tolist()
    pieces = layers(search.model.readers.ops)
    repeated = [piece for piece in pieces if piece.layer] or pieces
    allowed = set(points[1:-1])
    inner = [piece.start for piece in repeated[1:] if piece.start in allowed]
    count, stages = len(inner) + 1, len(search.caps)
    if count < stages:
        raise PlanError(
            f"planner equal found {count} layers for {stages} stages",
            hint="use fewer stages, or planner balanced, which cuts within layers",
        )
    return (0, *(inner[stage * count // stages - 1] for stage in range(1, stages)), points[-1])

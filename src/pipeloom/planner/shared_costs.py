"""What requests for one graph, its profiles and one cluster share: whoever plans with many schedules makes
cost models, cuts and weighs stages, once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from ..ir.graph import OpGraph
from ..ir.stages import StageGraph, cut, replicate
from .branches import BranchOrdered
from .search.evaluation import Known
from .stage_cost.model import CostModel
from .stage_cost.readers import Readers

MOST_CUTS = 200
"""Cuts that are remembered."""


@dataclass(eq=False)
class SharedCosts:
    """models: by all that they depend on besides.  known: of each model, what is known of its stages.
    orders: of branches, by the number of stages.  stages: by the order of ops, where they are cut,
    and how many replicas there are."""

    models: dict[Hashable, CostModel] = field(default_factory=dict)
    known: dict[CostModel, Known] = field(default_factory=dict)
    orders: dict[int, list[BranchOrdered]] = field(default_factory=dict)
    stages: dict[Hashable, StageGraph] = field(default_factory=dict)

    def cut(self, graph: OpGraph, readers: Readers, cuts: tuple[int, ...], replicas: int) -> StageGraph:
        """The stages [cuts[s], cuts[s + 1]) of the ops of readers, of so many replicas."""
        key = readers.order, cuts, replicas
        if key not in self.stages:
            ops = [op.name for op in readers.ops]
            stage_of = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in ops[i:j]}
            if len(self.stages) >= MOST_CUTS:
                del self.stages[next(iter(self.stages))]
            self.stages[key] = replicate(cut(graph, stage_of), replicas)
        return self.stages[key]

    def model(self, key: Hashable, make: Callable[[CostModel | None], CostModel]) -> CostModel:
        """The model of a key; if there is none, it is made, from one that may have tables for it."""
        if key not in self.models:
            self.models[key] = make(next(iter(self.models.values()), None))
        return self.models[key]

    def known_of(self, model: CostModel) -> Known:
        """What is known of the stages of a model; to be filled."""
        return self.known.setdefault(model, {})

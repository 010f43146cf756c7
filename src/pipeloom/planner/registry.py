"""Planners by name. A planner takes a `Search` and returns cut positions, () if it finds none that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, TypeAlias

from ..ir.errors import PlanError
from .search.cut_search import Search
from .strategies.dawnpiper import dawnpiper
from .strategies.graph_chains import (
    Arranged,
    pipedream_graph_layers,
    pipedream_graph_ops,
    piper_layers,
    piper_ops,
)
from .strategies.graphpipe import graphpipe, shallow_cuts
from .strategies.pipedream import pipedream, pipedream_repo
from .strategies.probe import probe
from .strategies.simple import balanced, equal, exact
from .strategies.vpipe import vpipe

Granularity: TypeAlias = Literal["op", "module", "layer"]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A way to cut a model.

    granularity: the smallest piece that it moves.  optimises: whether it may recompute and offload
        residuals: never, if asked, or unless told otherwise.  keeps_caps: it looks at memory by itself.
    source: where it is from.
    also: planners whose plans it starts from besides its own search, so that none of them has a faster one;
        the slowest to search first.
    polishes: it moves cuts by the simulated step at last (refine.py).
    chooses_schedule: it plans with many schedules and takes the fastest, whichever was asked for.
    propose: several cuts, for stages of a DAG, of which the fastest simulated step wins; None: `find` is all.
    evens: where ranks have several stages, it also looks at cuts whose ranks, not whose stages, take equally
        long (even_ranks.py).
    rounds: searches that are made at most; None for as many as is usual.
    asks: planners that are each asked for the whole; the fastest of their plans wins, `find` is not asked.
    arrange: finds an op order of its own along with the cuts, for stages that are a chain; then `find` is
        not asked, and is `no_cuts`.
    """

    find: Callable[[Search], tuple[int, ...]]
    granularity: Granularity
    about: str
    source: str
    optimises: Literal["never", "asked", "always"] = "never"
    keeps_caps: bool = True
    also: tuple[str, ...] = ()
    polishes: bool = False
    chooses_schedule: bool = False
    asks: tuple[str, ...] = ()
    evens: bool = False
    rounds: int | None = None
    propose: Callable[[Search], Iterator[tuple[int, ...]]] | None = None
    arrange: Callable[[Search], Arranged | None] | None = None


def no_cuts(search: Search) -> tuple[int, ...]:
    """What a planner finds in the search's op order that has an order of its own."""
    return ()


PLANNERS: dict[str, Planner] = {
    "auto": Planner(
        find=no_cuts,
        asks=("dawnpiper", "graphpipe", "pipeoffload"),
        granularity="op",
        optimises="always",
        source="this project",
        about="dawnpiper, graphpipe and pipeoffload under the same caps; the fastest of their plans",
    ),
    "exact": Planner(
        find=exact,
        granularity="op",
        optimises="asked",
        evens=True,
        source="dynamic programming",
        about="the best contiguous cut; slow where residuals are optimised",
    ),
    "dawnpiper": Planner(
        find=dawnpiper,
        granularity="op",
        optimises="always",
        also=("probe", "vpipe", "pipedream"),
        evens=True,
        source="arXiv 2505.05856, reconstructed from the abstract; and more",
        polishes=True,
        about="dawnpiper-alone, probe, vpipe, pipedream; the best, its cuts moved by the simulated step",
    ),
    "pipeoffload": Planner(
        find=dawnpiper,
        granularity="op",
        optimises="always",
        chooses_schedule=True,
        evens=True,
        source="arXiv 2503.01328 leaves the choice to its user",
        about="dawnpiper over many schedules, with and without offloading; the fastest that fits",
    ),
    "dawnpiper-alone": Planner(
        find=dawnpiper,
        granularity="op",
        optimises="always",
        evens=True,
        source="arXiv 2505.05856, reconstructed from the abstract",
        about="halves the stages and bisects between balanced compute and balanced memory",
    ),
    "probe": Planner(
        find=probe,
        granularity="op",
        optimises="always",
        evens=True,
        source="Pinar and Aykanat 2004, JPDC 64(8)",
        about="parametric search; exact where transfers cost nothing",
    ),
    "graphpipe": Planner(
        find=graphpipe,
        propose=shallow_cuts,
        granularity="op",
        optimises="always",
        also=("exact", "probe"),
        evens=True,
        source="arXiv 2406.17145, reconstructed: stages as a DAG",
        polishes=True,
        about="towers side by side: the least bottleneck, then the shallowest pipeline; exact, probe",
    ),
    "vpipe": Planner(
        find=vpipe,
        granularity="layer",
        optimises="always",
        source="TPDS 33(3) 2022, vPipe-like",
        about="moves layers over boundaries, treats the residuals of a layer alike",
    ),
    "pipedream": Planner(
        find=pipedream,
        granularity="module",
        keeps_caps=False,
        source="SOSP 2019, as in the paper",
        about="balances compute and transfers by modules",
    ),
    "pipedream-repo": Planner(
        find=pipedream_repo,
        granularity="module",
        keeps_caps=False,
        source="msr-fiddle/pipedream",
        about="balances compute by modules, transfers not counted",
    ),
    "pipedream-graph": Planner(
        find=no_cuts,
        arrange=pipedream_graph_layers,
        granularity="layer",
        keeps_caps=False,
        source="msr-fiddle/pipedream, over antichains",
        about="balances compute and transfers by layers of the whole graph, for a chain of stages",
    ),
    "pipedream-graph-ops": Planner(
        find=no_cuts,
        arrange=pipedream_graph_ops,
        granularity="op",
        keeps_caps=False,
        source="msr-fiddle/pipedream, over antichains",
        about="the same by ops, for small graphs",
    ),
    "piper": Planner(
        find=no_cuts,
        arrange=piper_layers,
        granularity="layer",
        source="NeurIPS 2021, over pairs of down-sets",
        about="the least compute and transfers under the caps by layers of the whole graph, for a chain",
    ),
    "piper-ops": Planner(
        find=no_cuts,
        arrange=piper_ops,
        granularity="op",
        source="NeurIPS 2021, over pairs of down-sets",
        about="the same by ops, for small graphs",
    ),
    "equal": Planner(
        find=equal,
        granularity="layer",
        keeps_caps=False,
        source="Megatron-LM, arXiv 2104.04473",
        about="as many layers in each stage as in any other",
    ),
    "balanced": Planner(
        find=balanced,
        granularity="op",
        keeps_caps=False,
        source="plain",
        about="equal compute time, memory not looked at",
    ),
}


def names() -> tuple[str, ...]:
    """All planners that `make_plan` knows.

    >>> names()  # doctest: +NORMALIZE_WHITESPACE
    ('auto', 'exact', 'dawnpiper', 'pipeoffload', 'dawnpiper-alone', 'probe', 'graphpipe', 'vpipe',
     'pipedream', 'pipedream-repo', 'pipedream-graph', 'pipedream-graph-ops', 'piper', 'piper-ops',
     'equal', 'balanced')
    """
    return tuple(PLANNERS)


def register_planner(name: str, planner: Planner) -> None:
    """Make a planner known by a name in small letters, with `-` between words.

    Raises: PlanError if the name is taken.
    """
    if name in PLANNERS:
        raise PlanError(f"a planner named {name!r} exists already", hint="choose another name")
    PLANNERS[name] = planner


def planner(name: str) -> Planner:
    """A planner by name; `_` for `-` is fine. Raises: PlanError if there is none."""
    key = name.lower().replace("_", "-")
    if key not in PLANNERS:
        near = get_close_matches(key, PLANNERS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise PlanError(
            f"no planner is named {name!r}", hint=f"{meant}the planners are {', '.join(PLANNERS)}"
        )
    return PLANNERS[key]

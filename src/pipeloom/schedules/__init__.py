"""Schedules: (stage graph, placement, micro-batches) -> the order in which each rank computes."""

from ..ir.operation import declare
from ..ir.replicas import replicate
from .language.build import Operation, Recipe, best, fastest, make, order, path_clock, phases, turns
from .language.user_files import names_own
from .placements import both_ways, loop, spread, wave
from .registry import Entry, Times, build, entry, in_flight, names, register, shape_of, usual
from .language.shape import Shape

__all__ = [
    "Entry",
    "Operation",
    "Recipe",
    "Shape",
    "Times",
    "best",
    "both_ways",
    "build",
    "declare",
    "entry",
    "fastest",
    "in_flight",
    "loop",
    "make",
    "names",
    "names_own",
    "order",
    "path_clock",
    "phases",
    "register",
    "replicate",
    "shape_of",
    "spread",
    "turns",
    "usual",
    "wave",
]

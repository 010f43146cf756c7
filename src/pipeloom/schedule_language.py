"""What a file with a schedule of one's own imports: `from pipeloom.schedule_language import *`.

Like the names of `pipeloom` itself, these are for users; docs/schedule-language.md explains them.
"""

from .ir.action import Action as Action, B as B, F as F, I as I, W as W
from .ir.costs import StageCost as StageCost, equal_costs as equal_costs
from .ir.flow import dag as dag
from .ir.operation import Operation as Operation, declare as declare
from .schedules.language.names import load_file as load_file
from .schedules.language.patterns import phases as phases, repeating as repeating, turns as turns
from .schedules.language.placements import (
    both_ways as both_ways,
    loop as loop,
    replicate as replicate,
    spread as spread,
    wave as wave,
)
from .schedules.language.recipe import Recipe as Recipe
from .schedules.language.shape import Shape as Shape, path_clock as path_clock
from .schedules.list_scheduler.choose import best as best, fastest as fastest, make as make, order as order
from .schedules.registry import (
    Entry as Entry,
    build as build,
    register as register,
    shape_of as shape_of,
)

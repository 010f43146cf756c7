from .build import options as options, timings as timings
from .patterns import phases as phases, turns as turns
from .periodic import Periodic as Periodic
from .recipe import Recipe as Recipe, per_rank as per_rank
from .repeating import repeating as repeating
from .shape import Shape as Shape, path_clock as path_clock
from .user_files import (
    LISTED as LISTED,
    load_user_schedule as load_user_schedule,
    names_user_file as names_user_file,
    split_options as split_options,
)

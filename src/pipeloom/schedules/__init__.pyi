from .aliases import ALIASES as ALIASES
from .chunks import with_chunks as with_chunks
from .copies.asked import COPY_OPTIONS as COPY_OPTIONS
from .copies.uplinks import (
    USUAL_K as USUAL_K,
    Uplinks as Uplinks,
    shared_uplinks as shared_uplinks,
    with_copies as with_copies,
)
from .formats.csv import (
    program_text as program_text,
    read_schedule as read_schedule,
    schedule_text as schedule_text,
)
from .language.build import Operation as Operation, declare as declare, order as order
from .language.patterns import phases as phases, turns as turns
from .language.recipe import Recipe as Recipe
from .language.repeating import repeating as repeating
from .language.shape import Shape as Shape, path_clock as path_clock
from .language.user_files import (
    LISTED as LISTED,
    load_file as load_file,
    names_user_file as names_user_file,
)
from .library_entry import Entry as Entry
from .list_scheduler.choose_recipe import best as best, fastest as fastest, make as make
from .placements import (
    both_ways as both_ways,
    loop as loop,
    replicate as replicate,
    spread as spread,
    wave as wave,
)
from .registry import (
    FAMILIES as FAMILIES,
    Times as Times,
    build as build,
    default_placement as default_placement,
    entry as entry,
    fits_caps as fits_caps,
    in_flight as in_flight,
    names as names,
    register as register,
    shape_of as shape_of,
)
from .search import (
    Bound as Bound,
    Progress as Progress,
    SearchOptions as SearchOptions,
    SearchProblem as SearchProblem,
    SearchResult as SearchResult,
    SearchStage as SearchStage,
    found_text as found_text,
    search_orders as search_orders,
    search_placed as search_placed,
    solver_installed as solver_installed,
)
from .steady import build_steady as build_steady

from .bounds import Bound as Bound, all_bounds as all_bounds, lower_bound as lower_bound
from .candidate import (
    Candidate as Candidate,
    Repeating as Repeating,
    one_by_one as one_by_one,
    timed as timed,
)
from .choose_ranks import search_placed as search_placed
from .engines.exact import Exact as Exact, solve as solve, solver_installed as solver_installed
from .engines.kernel import solve_period as solve_period, whole_times as whole_times
from .engines.library import fitting as fitting, library_order as library_order
from .found_file import found_text as found_text, turn_of as turn_of
from .problem import SearchProblem as SearchProblem, SearchStage as SearchStage
from .registry import ENGINES as ENGINES
from .search import (
    Progress as Progress,
    SearchOptions as SearchOptions,
    SearchResult as SearchResult,
    search_orders as search_orders,
)

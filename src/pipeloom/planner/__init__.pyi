from .ask_planners import (
    FOUND_BY as FOUND_BY,
    fastest_named as fastest_named,
    planners_asked as planners_asked,
)
from .block_costs import (
    Affine as Affine,
    BlockCosts as BlockCosts,
    PieceCost as PieceCost,
    block_costs as block_costs,
    even_costs as even_costs,
)
from .branches import (
    Block as Block,
    BranchOrdered as BranchOrdered,
    Parallel as Parallel,
    Series as Series,
    branch_orders as branch_orders,
    decompose as decompose,
)
from .candidate import Candidate as Candidate
from .choose_schedule import (
    choose_schedule as choose_schedule,
    plain_of as plain_of,
    schedule_names as schedule_names,
)
from .host_memory import (
    HostShortage as HostShortage,
    host_needs as host_needs,
    host_shortage as host_shortage,
    pair_low_with_high as pair_low_with_high,
)
from .infeasible import NoCutFits as NoCutFits, least_share as least_share, stage_needs as stage_needs
from .make_plan import (
    first_way as first_way,
    make_plan as make_plan,
)
from .microbatch_sizes import (
    ProfiledModel as ProfiledModel,
    interpolate_sample as interpolate_sample,
    largest_size as largest_size,
    shared_rows as shared_rows,
)
from .offload_ratio import (
    CopyLoad as CopyLoad,
    copy_loads as copy_loads,
    transformer_ratio as transformer_ratio,
)
from .piper_graphs import PiperGraph as PiperGraph, read_piper_graph as read_piper_graph
from .placement import place as place, stages_for as stages_for
from .plan_costs import PlanCosts as PlanCosts
from .plan_table import branch_figures as branch_figures, limits as limits, plan_rows as plan_rows
from .registry import (
    PLANNERS as PLANNERS,
    Planner as Planner,
    names as names,
    planner as planner,
    register_planner as register_planner,
)
from .request import (
    PlanOptions as PlanOptions,
    Request as Request,
    profile_of as profile_of,
)
from .search import borders as borders, layer_names as layer_names, layers as layers
from .search_order import ORDER_OF as ORDER_OF, with_searched_order as with_searched_order
from .search_watch import SearchWatch as SearchWatch
from .shape_search import (
    PIPELININGS as PIPELININGS,
    RankedShape as RankedShape,
    Shape as Shape,
    ShapeRequest as ShapeRequest,
    best_shape_closed_form as best_shape_closed_form,
    divisors as divisors,
    memory as memory,
    rank_shapes as rank_shapes,
    refuse_unlike_devices as refuse_unlike_devices,
    throughput as throughput,
)
from .stage_cost.model import CostModel as CostModel
from .stage_cost.peak_memory import CostOptions as CostOptions
from .stage_cost.readers import Readers as Readers
from .stage_cost.stage_estimate import estimate_stage as estimate_stage
from .stage_counts import TooManyStages as TooManyStages
from .what_if import Change as Change, what_if as what_if
from .wide_links import WideLinks as WideLinks, wide_links as wide_links

from .interval_sums import Array as Array, Indices as Indices
from .liveness import Sweep as Sweep
from .model import CostModel as CostModel, CostOptions as CostOptions, Footprint as Footprint
from .readers import Wiring as Wiring
from .recompute_liveness import (
    AGAIN as AGAIN,
    AT as AT,
    AWAY as AWAY,
    BACKWARD as BACKWARD,
    DROPPED as DROPPED,
    EARLIER as EARLIER,
    EDGE as EDGE,
    FIRST_AT as FIRST_AT,
    FORWARD as FORWARD,
    HELD as HELD,
    KEPT_UNTIL as KEPT_UNTIL,
    LAST_IN as LAST_IN,
    MESSAGE as MESSAGE,
    OTHERS as OTHERS,
    PENDING as PENDING,
    SAVER as SAVER,
    SEARCHED as SEARCHED,
    Moments as Moments,
    of_others as of_others,
    peak_of as peak_of,
)
from .residuals import (
    KEEP as KEEP,
    OFFLOAD as OFFLOAD,
    RECOMPUTE as RECOMPUTE,
    Residuals as Residuals,
    choice_of as choice_of,
    residuals_of as residuals_of,
)
from .simulator_costs import stage_costs as stage_costs, stage_plan as stage_plan
from .treated_stage import (
    COPIES as COPIES,
    HostCopies as HostCopies,
    Treated as Treated,
    host_copies as host_copies,
    moments_of as moments_of,
    treated as treated,
)

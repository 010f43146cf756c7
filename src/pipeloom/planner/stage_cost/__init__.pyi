from .arrays import Array as Array, Indices as Indices, Rows as Rows
from .liveness import ForwardArrays as ForwardArrays, LivenessSweep as LivenessSweep
from .model import CostModel as CostModel
from .peak_memory import (
    CostOptions as CostOptions,
    Footprint as Footprint,
    RecomputeAhead as RecomputeAhead,
    moments as moments,
    peak_bytes as peak_bytes,
    peak_terms as peak_terms,
    predict_peak_memory as predict_peak_memory,
    static_memory as static_memory,
)
from .readers import Readers as Readers
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
    RecomputeLiveness as RecomputeLiveness,
    StageArrays as StageArrays,
    of_others as of_others,
    peak_of as peak_of,
)
from .residuals import (
    KEEP as KEEP,
    OFFLOAD as OFFLOAD,
    RECOMPUTE as RECOMPUTE,
    Residuals as Residuals,
    find_residuals as find_residuals,
)
from .stage_estimate import StageEstimate as StageEstimate, estimate_stage as estimate_stage
from .treated_stage import (
    HostCopies as HostCopies,
    TreatedStage as TreatedStage,
    cost_choice as cost_choice,
    cost_treatments as cost_treatments,
    host_copies as host_copies,
    offload_all as offload_all,
)

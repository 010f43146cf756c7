from .checkpoints import choices as choices
from .choose import (
    BOTH as BOTH,
    Optimised as Optimised,
    Solver as Solver,
    optimise as optimise,
    treated_stage as treated_stage,
)
from .greedy import (
    Found as Found,
    Task as Task,
    greedy as greedy,
    plan_of as plan_of,
    seconds_of as seconds_of,
)
from .greedy_kernels import (
    LEAST as LEAST,
    OPTION as OPTION,
    PEAK as PEAK,
    least_peaks as least_peaks,
    treat as treat,
)
from .layers import by_layers as by_layers

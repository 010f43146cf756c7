from .checkpoints import choose_checkpoints as choose_checkpoints
from .choose import (
    BOTH as BOTH,
    Solver as Solver,
    TreatedStageEvaluator as TreatedStageEvaluator,
    treat_interval as treat_interval,
)
from .greedy import (
    TreatmentChoice as TreatmentChoice,
    TreatmentProblem as TreatmentProblem,
    choose_greedily as choose_greedily,
    greedy_state as greedy_state,
    seconds_of as seconds_of,
)
from .greedy_kernels import (
    LEAST as LEAST,
    OPTION as OPTION,
    PEAK as PEAK,
    least_peaks as least_peaks,
    treat as treat,
)
from .layers import choose_by_layers as choose_by_layers

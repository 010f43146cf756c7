from .forward_path import ForwardPath as ForwardPath, encode_path as encode_path
from .module_cut import (
    ModuleCut as ModuleCut,
    cut_modules as cut_modules,
    module_stage_functions as module_stage_functions,
)
from .module_functions import ModuleFunctions as ModuleFunctions
from .skeleton import Skeleton as Skeleton
from .torch_functions import READS as READS, function_name as function_name, sized_by_data as sized_by_data
from .trial import TrialParameters as TrialParameters
from .units import derive_units as derive_units, listed_units as listed_units

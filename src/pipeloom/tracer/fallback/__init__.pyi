from .capture import ModuleCut as ModuleCut, cut_modules as cut_modules, module_functions as module_functions
from .forward_path import Path as Path, encode as encode
from .python_random import python_random_kept as python_random_kept, python_state as python_state
from .stage_functions import ModuleFunctions as ModuleFunctions
from .units import derive_units as derive_units, listed_units as listed_units

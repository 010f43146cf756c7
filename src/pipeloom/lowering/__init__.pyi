from .passes import lower as lower
from .steady import SteadyRow as SteadyRow, SteadyRows as SteadyRows

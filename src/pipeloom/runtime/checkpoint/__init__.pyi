from .files import complete as complete, newest as newest
from .state import TrainState as TrainState

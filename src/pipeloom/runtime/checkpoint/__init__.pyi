from .checkpoint import load as load, save as save
from .files import complete as complete, newest as newest
from .state import TrainState as TrainState

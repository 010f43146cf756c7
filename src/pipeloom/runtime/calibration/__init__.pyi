from .link import measure_link as measure_link
from .rehearsal import ActionTimes as ActionTimes, Rehearsal as Rehearsal

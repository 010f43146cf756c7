from .calibrate import measure_link as measure_link
from .rehearsal import Rehearsal as Rehearsal, Walk as Walk

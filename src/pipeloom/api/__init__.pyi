from .clusters import (
    Detected as Detected,
    below_switches as below_switches,
    detect as detect,
    disk_speed as disk_speed,
    grouped as grouped,
    with_files as with_files,
)
from .compiling import made_beside as made_beside
from .explaining import explain_steps as explain_steps
from .forecast import Forecast as Forecast, by_stage as by_stage
from .keeping import TRIES as TRIES, keeping_caps as keeping_caps
from .largest_batch import (
    MOST as MOST,
    Take as Take,
    Taken as Taken,
    largest_below as largest_below,
    largest_plan as largest_plan,
)
from .options import Options as Options, StepReport as StepReport
from .passes import (
    capture as capture,
    estimate as estimate,
    plan as plan,
    planning as planning,
    profile as profile,
    sample as sample,
)
from .pipeline import Pipeline as Pipeline
from .plan_costs import place as place, stages_for as stages_for
from .plan_request import Planning as Planning
from .runnable import require_runnable as require_runnable, require_training as require_training
from .schedules import (
    Drawn as Drawn,
    Setting as Setting,
    csv_text as csv_text,
    draw_file as draw_file,
    draw_schedule as draw_schedule,
    explain as explain,
    library as library,
    updates_of as updates_of,
    weights as weights,
)
from .tiers import own_tier as own_tier
from .times import Work as Work
from .traced import traced_peaks as traced_peaks
from .verify import Comparison as Comparison, verify as verify

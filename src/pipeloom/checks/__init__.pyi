from .deadlock import Stuck as Stuck, deadlock as deadlock
from .operations import meeting_actions as meeting_actions
from .schedules import (
    check as check,
    check_program as check_program,
    check_shape as check_shape,
    forwards_in_order as forwards_in_order,
)
from .weight_versions import (
    StageVersions as StageVersions,
    by_rank as by_rank,
    versions as versions,
    weight_versions as weight_versions,
)

from .buffers import forwards_in_order as forwards_in_order
from .deadlock_error import Board as Board, Stuck as Stuck, deadlock as deadlock
from .memory import peak_bytes as peak_bytes, peaks as peaks
from .operations import met as met
from .programs import receives_ahead as receives_ahead
from .schedules import check as check, check_program as check_program, check_shape as check_shape
from .weight_versions import (
    StageVersions as StageVersions,
    UpdatePolicy as UpdatePolicy,
    Updates as Updates,
    by_rank as by_rank,
    versions as versions,
    weight_versions as weight_versions,
)

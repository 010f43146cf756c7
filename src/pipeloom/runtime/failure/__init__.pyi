from .ctrl_c import CtrlC as CtrlC
from .noticeboard import (
    Failure as Failure,
    LocalBoard as LocalBoard,
    StoreBoard as StoreBoard,
    local_boards as local_boards,
)
from .rank_status import FINISHED as FINISHED, RankStatus as RankStatus, who_waits as who_waits
from .store_calls import call_within as call_within
from .watch import Watch as Watch

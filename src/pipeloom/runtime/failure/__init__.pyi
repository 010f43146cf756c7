from .ctrl_c import CtrlC as CtrlC
from .noticeboard import (
    FINISHED as FINISHED,
    Failure as Failure,
    LocalBoard as LocalBoard,
    RankStatus as RankStatus,
    StoreBoard as StoreBoard,
    local_boards as local_boards,
)
from .watch import Watch as Watch, who_waits as who_waits

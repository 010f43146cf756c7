from .child import PEER_FAILED as PEER_FAILED
from .connect import NCCL_PATIENCE as NCCL_PATIENCE, connect as connect, watch_ranks as watch_ranks
from .launch import StartedRanks as StartedRanks, launch as launch
from .processes import GRACE_S as GRACE_S, POLL_S as POLL_S, TERM_S as TERM_S, Processes as Processes

from .all_reduce import all_gather_s as all_gather_s, all_reduce_s as all_reduce_s
from .idle_time.explain import explain_idle_time as explain_idle_time
from .memory_limit import check_memory_limit as check_memory_limit
from .shared_links import transfer_s as transfer_s
from .simulate import simulate as simulate
from .summary import (
    RankSummary as RankSummary,
    Summary as Summary,
    describe as describe,
    summarise as summarise,
)

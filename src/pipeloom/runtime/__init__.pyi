from .allocator import (
    give_back_freed_memory as give_back_freed_memory,
    keep_freed_memory as keep_freed_memory,
)
from .batches import (
    agree_on_layouts as agree_on_layouts,
    agree_on_refusal as agree_on_refusal,
    agree_on_shapes as agree_on_shapes,
    rows_of as rows_of,
    signature_of as signature_of,
    split_batch as split_batch,
)
from .calibration.calibrate import (
    graph_memory as graph_memory,
    stage_memory as stage_memory,
    time_clipping as time_clipping,
    time_optimizer as time_optimizer,
)
from .calibration.link import local_links as local_links, measure_link as measure_link
from .calibration.rehearsal import (
    ActionTimes as ActionTimes,
    Rehearsal as Rehearsal,
    with_times as with_times,
)
from .checkpoint.checkpoint import export_safetensors as export_safetensors
from .checkpoint.files import newest as newest, read_index as read_index, verify_sizes as verify_sizes
from .checkpoint.state import TrainState as TrainState
from .failure.watch import Watch as Watch
from .launch.connect import connect as connect, gather_text as gather_text, watch_ranks as watch_ranks
from .launch.launch import StartedRanks as StartedRanks, launch as launch
from .launch.processes import terminate_as_exit as terminate_as_exit
from .ledger import Ledger as Ledger, crossing_bytes as crossing_bytes, table as table
from .loss_scaling import (
    Round as Round,
    loss_shares as loss_shares,
    read_loss as read_loss,
    read_scalars as read_scalars,
)
from .messages import (
    ALIGNMENT as ALIGNMENT,
    BufferPool as BufferPool,
    Message as Message,
    check_tensors as check_tensors,
    pack as pack,
    unpack as unpack,
)
from .offload.open_tier import open_tier as open_tier
from .offload.tier import Tier as Tier
from .operations import OperationContext as OperationContext
from .optimizer_bytes import (
    MakeOptimizer as MakeOptimizer,
    default_optimizer as default_optimizer,
    optimizers_of as optimizers_of,
    stand_in as stand_in,
    stand_ins as stand_ins,
    update_bytes as update_bytes,
)
from .out_of_memory import out_of_memory_told as out_of_memory_told
from .posted import PendingSum as PendingSum
from .posted_channel import SMALL_BYTES as SMALL_BYTES, PostedChannel as PostedChannel
from .recorder import Clock as Clock, CudaClock as CudaClock, HostClock as HostClock, Recorder as Recorder
from .reduce_and_step import norm_group as norm_group, shared_by as shared_by
from .step_state import Microbatch as Microbatch, StepContext as StepContext, Variant as Variant
from .transports.dist_channel import DistChannel as DistChannel
from .transports.local_channel import LocalChannel as LocalChannel, local_channels as local_channels
from .transports.transport import (
    CompletedTransfer as CompletedTransfer,
    PendingTransfer as PendingTransfer,
    SumGroup as SumGroup,
)
from .weights import (
    Gradients as Gradients,
    Weights as Weights,
    clip_factor as clip_factor,
)
from .worker import Worker as Worker

from .dist_channel import DistChannel as DistChannel
from .local_channel import (
    LocalChannel as LocalChannel,
    LocalTransport as LocalTransport,
    local_channels as local_channels,
)
from .nccl import NcclTransport as NcclTransport, StreamWatchdog as StreamWatchdog
from .transport import (
    CompletedTransfer as CompletedTransfer,
    FailedTransfer as FailedTransfer,
    PendingTransfer as PendingTransfer,
    SumGroup as SumGroup,
    Transport as Transport,
)

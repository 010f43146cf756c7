from .cuda_tier import CHUNK as CHUNK, CudaTier as CudaTier
from .file_allocator import FileAllocator as FileAllocator
from .file_tier import (
    PAGE as PAGE,
    FileCopy as FileCopy,
    FileTier as FileTier,
    lies_in_memory as lies_in_memory,
)
from .handlers import (
    await_offload as await_offload,
    count_copies as count_copies,
    finish_oldest_offload as finish_oldest_offload,
    offload as offload,
    reload as reload,
    reload_bytes as reload_bytes,
    wait_reload as wait_reload,
)
from .open_tier import TIERS as TIERS, open_tier as open_tier
from .tier import AsyncCopy as AsyncCopy, Tier as Tier, TierOptions as TierOptions

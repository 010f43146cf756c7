from .cuda_tier import CHUNK as CHUNK, CudaTier as CudaTier
from .file_allocator import Places as Places
from .file_tier import (
    PAGE as PAGE,
    FileTier as FileTier,
    FileTrip as FileTrip,
    lies_in_memory as lies_in_memory,
)
from .tier import Tier as Tier, Trip as Trip

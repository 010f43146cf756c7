from .arguments import Arguments as Arguments
from .detect import detect_device as detect_device, free_memory as free_memory
from .detected import Measured as Measured, joined as joined, measured as measured
from .host_copies import (
    file_tier as file_tier,
    free_disk as free_disk,
    gpu_links as gpu_links,
    pinned_copies as pinned_copies,
    shared_uplinks as shared_uplinks,
)
from .kernel import Timer as Timer
from .measure import measure as measure
from .modules import measure_modules as measure_modules
from .reference import Reference as Reference, Sizes as Sizes, compare as compare, shares as shares
from .roofline import roofline as roofline
from .rules import RULES as RULES, UNKNOWN as UNKNOWN, base_name as base_name

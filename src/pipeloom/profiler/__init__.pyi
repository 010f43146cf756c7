from .compiled_pieces import (
    CompiledRatio as CompiledRatio,
    MeasurePiece as MeasurePiece,
    compiled_costs as compiled_costs,
    measure_piece as measure_piece,
    measure_ratios as measure_ratios,
    piece_signatures as piece_signatures,
    time_piece as time_piece,
)
from .contention import Contention as Contention, measure_contention as measure_contention
from .cores import usable_cores as usable_cores
from .detect import detect_device as detect_device, free_memory as free_memory
from .efficiency import (
    ReferenceModel as ReferenceModel,
    ReferenceSizes as ReferenceSizes,
    efficiency_by_class as efficiency_by_class,
    measure_efficiency as measure_efficiency,
)
from .host_copies import (
    file_tier as file_tier,
    free_disk as free_disk,
    gpu_links as gpu_links,
    pinned_copies as pinned_copies,
    shared_uplinks as shared_uplinks,
)
from .measure_modules import measure_modules as measure_modules
from .measure_op import Timer as Timer, torch_threads as torch_threads
from .measure_ops import measure as measure, op_signatures as op_signatures
from .measurement import (
    Measurement as Measurement,
    connected_components as connected_components,
    summarise_runs as summarise_runs,
)
from .op_arguments import OpArguments as OpArguments
from .roofline import roofline as roofline
from .rules import RULES as RULES, UNKNOWN as UNKNOWN, base_name as base_name

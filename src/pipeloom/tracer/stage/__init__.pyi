from .functions import (
    DiscardSink as DiscardSink,
    Sink as Sink,
    Slot as Slot,
    StageFunctions as StageFunctions,
    Tensors as Tensors,
    made_bytes as made_bytes,
)
from .tape import compile_graph as compile_graph, measure as measure, predict as predict
from .trace import stage_functions as stage_functions, stage_residuals as stage_residuals
from .accumulate import (
    add_gradient as add_gradient,
    add_in_place as add_in_place,
    add_product as add_product,
    add_products as add_products,
)

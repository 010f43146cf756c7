from .accumulate import (
    add_gradient as add_gradient,
    add_in_place as add_in_place,
    add_product as add_product,
    add_products as add_products,
)
from .compile_graph import (
    compile_graph as compile_graph,
    predict_memory as predict_memory,
    run_measured as run_measured,
)
from .functions import (
    DiscardSink as DiscardSink,
    Sink as Sink,
    Slot as Slot,
    StageFunctions as StageFunctions,
    Tensors as Tensors,
    activation_bytes as activation_bytes,
)
from .trace import stage_functions as stage_functions, stage_residuals as stage_residuals

from .functions import StageFunctions as StageFunctions, Tensors as Tensors, made_bytes as made_bytes
from .gradient_sink import (
    Sink as Sink,
    add_gradient as add_gradient,
    add_product as add_product,
    add_products as add_products,
)
from .in_place import add_in_place as add_in_place
from .split import Slot as Slot
from .tape import compile_graph as compile_graph, measure as measure, predict as predict
from .trace import stage_functions as stage_functions, stage_residuals as stage_residuals

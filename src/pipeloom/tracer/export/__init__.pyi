from .evaluation import (
    capture_evaluation as capture_evaluation,
    cut_alike as cut_alike,
    cut_evaluation as cut_evaluation,
)
from .op_graph import model_buffers as model_buffers, model_parameters as model_parameters
from .program import captured_from_program as captured_from_program
from .torch_export import export_program as export_program

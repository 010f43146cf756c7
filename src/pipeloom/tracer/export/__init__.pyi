from .describe import model_buffers as model_buffers, model_parameters as model_parameters
from .evaluation import capture_evaluation as capture_evaluation, cut_evaluation as cut_evaluation
from .export import export as export
from .program import from_program as from_program

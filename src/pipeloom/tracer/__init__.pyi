from .capture import capture as capture
from .captured import Captured as Captured
from .export.evaluation import capture_evaluation as capture_evaluation, cut_evaluation as cut_evaluation
from .fallback.module_functions import ModuleFunctions as ModuleFunctions
from .fallback.trial import initial_state as initial_state
from .job import Job as Job
from .job_loader import load_job as load_job
from .layout import (
    alone as alone,
    copied as copied,
    in_memory as in_memory,
    lies_so as lies_so,
    order_of as order_of,
    seen_so as seen_so,
    zeros as zeros,
)
from .loss import scalar_loss as scalar_loss
from .once import one_thread as one_thread
from .random import (
    drawn as drawn,
    end_random as end_random,
    microbatch_seed as microbatch_seed,
    seed_random as seed_random,
)
from .sample import sample_batch as sample_batch
from .stage.functions import (
    DiscardSink as DiscardSink,
    Sink as Sink,
    Slot as Slot,
    StageFunctions as StageFunctions,
    Tensors as Tensors,
    made_bytes as made_bytes,
)
from .stage.trace import stage_functions as stage_functions

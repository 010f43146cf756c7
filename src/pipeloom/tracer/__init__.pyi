from .attributes import attributes_kept as attributes_kept
from .blueprint import Blueprint as Blueprint, make_blueprint as make_blueprint
from .capture import capture as capture
from .captured import Captured as Captured
from .draws import DrawRecorder as DrawRecorder, DrawReplay as DrawReplay, OtherDraws as OtherDraws
from .export.evaluation import (
    capture_evaluation as capture_evaluation,
    cut_alike as cut_alike,
    cut_evaluation as cut_evaluation,
)
from .fallback.module_functions import ModuleFunctions as ModuleFunctions
from .fallback.trial import initial_state as initial_state
from .handover import (
    hand_over as hand_over,
    hand_over_evaluation as hand_over_evaluation,
    take_over as take_over,
    take_over_evaluation as take_over_evaluation,
)
from .job import Job as Job
from .job_calls import sample_batch as sample_batch, scalar_loss as scalar_loss
from .job_loader import load_job as load_job
from .layout import (
    copy_in_order as copy_in_order,
    ensure_unshared as ensure_unshared,
    has_order as has_order,
    memory_order as memory_order,
    permute_to_memory as permute_to_memory,
    view_in_order as view_in_order,
    zeros_like_value as zeros_like_value,
)
from .random import (
    call_seeded as call_seeded,
    end_random as end_random,
    microbatch_seed as microbatch_seed,
    seed_random as seed_random,
)
from .stage.functions import (
    DiscardSink as DiscardSink,
    Sink as Sink,
    Slot as Slot,
    StageFunctions as StageFunctions,
    Tensors as Tensors,
    activation_bytes as activation_bytes,
)
from .stage.trace import stage_functions as stage_functions, stage_residuals as stage_residuals
from .tensors import tensors_of as tensors_of
from .tracing_lock import one_thread_at_a_time as one_thread_at_a_time
from .user_code import is_user_file as is_user_file

from .benchmark import Bench as Bench, run_bench as run_bench
from .config import (
    Config as Config,
    DataConfig as DataConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    PipelineConfig as PipelineConfig,
)
from .config_text import known_keys as known_keys, read_config as read_config, write_config as write_config
from .loop import Outcome as Outcome, train as train
from .metrics import Metrics as Metrics
from .model import GPT as GPT
from .pace import (
    AFTER as AFTER,
    BEFORE as BEFORE,
    Comparison as Comparison,
    Pace as Pace,
    Window as Window,
    rehearsal_steps as rehearsal_steps,
)
from .rates import scheduler_of as scheduler_of
from .run import Request as Request, capped as capped, run as run, settle as settle
from .rundir import STARTED as STARTED, Before as Before, find_run as find_run, new_run as new_run
from .seeds import derive as derive
from .text import (
    Span as Span,
    Text as Text,
    files_of as files_of,
    split as split,
    standard_library as standard_library,
)
from .workload import (
    Workload as Workload,
    default_job as default_job,
    gpt_workload as gpt_workload,
    job_workload as job_workload,
)

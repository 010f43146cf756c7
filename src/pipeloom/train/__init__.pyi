from .benchmark import BenchSettings as BenchSettings, run_bench as run_bench
from .config import (
    Config as Config,
    DataConfig as DataConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    PipelineConfig as PipelineConfig,
)
from .config_text import known_keys as known_keys, read_config as read_config, write_config as write_config
from .early_ranks import get_ready as get_ready, ranks_for as ranks_for, start_ranks as start_ranks
from .follow_plan import follow_plan as follow_plan
from .loop import (
    LONG_STEP_S as LONG_STEP_S,
    TrainOutcome as TrainOutcome,
    train as train,
    validate as validate,
)
from .model import GPT as GPT
from .plan_rehearsal import (
    PlanRehearsal as PlanRehearsal,
    rehearse_plan as rehearse_plan,
    why_not_rehearsed as why_not_rehearsed,
)
from .rehearsals import (
    AFTER as AFTER,
    BEFORE as BEFORE,
    RehearsalComparison as RehearsalComparison,
    RehearsalWindow as RehearsalWindow,
    StepRehearsals as StepRehearsals,
    rehearsal_steps as rehearsal_steps,
)
from .run import (
    PlannedRun as PlannedRun,
    TrainRequest as TrainRequest,
    prepare_run as prepare_run,
    run as run,
    with_caps as with_caps,
)
from .run_directory import (
    STARTED as STARTED,
    DirectorySnapshot as DirectorySnapshot,
    Metrics as Metrics,
    find_run as find_run,
    new_run as new_run,
)
from .run_lock import LOCK as LOCK, RunLock as RunLock
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
    derive_seed as derive_seed,
    gpt_workload as gpt_workload,
    job_workload as job_workload,
    rate_scheduler as rate_scheduler,
)

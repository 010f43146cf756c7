from .advice import plan_with_advice as plan_with_advice
from .best_batch import best_plan as best_plan
from .captures import capture as capture
from .checkpoints import checkpoint_step as checkpoint_step, export_safetensors as export_safetensors
from .clusters import (
    BuiltIn as BuiltIn,
    Detected as Detected,
    Figure as Figure,
    below_switches as below_switches,
    built_in_devices as built_in_devices,
    cpu_cluster as cpu_cluster,
    detect as detect,
    disk_speed as disk_speed,
    find_cluster as find_cluster,
    grouped as grouped,
    pair_low_with_high as pair_low_with_high,
    save_cluster as save_cluster,
    with_files as with_files,
)
from .compiled_profiles import compiled_profile as compiled_profile, pieces_of as pieces_of
from .forecast import Forecast as Forecast, by_stage as by_stage
from .handed_model import (
    HandedModel as HandedModel,
    hand_over_model as hand_over_model,
    take_over_early as take_over_early,
    take_over_model as take_over_model,
)
from .kept_profiles import kept_profile as kept_profile
from .kernel_compilation import (
    compile_kernels_for as compile_kernels_for,
    kernels_compiled_beside as kernels_compiled_beside,
)
from .largest_batch import ModelAt as ModelAt, largest_below as largest_below, largest_plan as largest_plan
from .microbatch_times import MicrobatchTimes as MicrobatchTimes
from .options import Options as Options
from .passes import (
    Job as Job,
    captured_model as captured_model,
    estimate as estimate,
    load_job as load_job,
    make_request as make_request,
    plan as plan,
    plan_best as plan_best,
    plan_largest as plan_largest,
    plan_size as plan_size,
    profile as profile,
)
from .pipeline import Pipeline as Pipeline
from .plan_request import (
    COMPILED as COMPILED,
    LARGEST_MICROBATCH as LARGEST_MICROBATCH,
    PLANNERS as PLANNERS,
    CapturedModel as CapturedModel,
    Change as Change,
    PlanCosts as PlanCosts,
    PlanRequest as PlanRequest,
    ProfiledModel as ProfiledModel,
    branch_figures as branch_figures,
    limits as limits,
    place as place,
    plan_rows as plan_rows,
    stages_for as stages_for,
    times_of as times_of,
)
from .rank_contention import beside_ranks as beside_ranks, contention as contention
from .rank_stages import (
    EvaluationVariants as EvaluationVariants,
    RankStages as RankStages,
    TrainingVariants as TrainingVariants,
)
from .ranks import (
    connect as connect,
    launch as launch,
    rank_device as rank_device,
    result_of_rank_0 as result_of_rank_0,
    terminate_as_exit as terminate_as_exit,
)
from .reports import (
    Comparison as Comparison,
    SizeUnit as SizeUnit,
    StageEdge as StageEdge,
    StageRow as StageRow,
    explain_steps as explain_steps,
    fold as fold,
    gantt as gantt,
    merged as merged,
    peak_of as peak_of,
    print_report as print_report,
    sources as sources,
    stage_edges as stage_edges,
    stage_rows as stage_rows,
    write_report as write_report,
    write_trace as write_trace,
)
from .runnable import (
    names_to_plan_by as names_to_plan_by,
    require_runnable as require_runnable,
    require_runnable_plan as require_runnable_plan,
    require_training as require_training,
)
from .schedule_search import (
    FoundSchedule as FoundSchedule,
    SearchOptions as SearchOptions,
    SearchProgress as SearchProgress,
    prove_search as prove_search,
    search_schedule as search_schedule,
)
from .schedule_tuning import (
    Cause as Cause,
    Divergence as Divergence,
    Sensitivity as Sensitivity,
    divergences as divergences,
    idle_side_by_side as idle_side_by_side,
    sensitivity as sensitivity,
    why as why,
)
from .schedules import (
    UNIT as UNIT,
    Scenario as Scenario,
    SimulatedSchedule as SimulatedSchedule,
    csv_text as csv_text,
    explain as explain,
    library as library,
    simulate_file as simulate_file,
    simulate_schedule as simulate_schedule,
    updates_of as updates_of,
    weights as weights,
)
from .shape_plan import ShapedPlan as ShapedPlan, plan_shape as plan_shape
from .shape_search import (
    RankedShape as RankedShape,
    closed_form_shapes as closed_form_shapes,
    pipelining_of as pipelining_of,
    sampled_models as sampled_models,
    shape_request as shape_request,
)
from .simulation import simulate as simulate
from .started_ranks import StartedRanks as StartedRanks, build_once as build_once
from .steady_run import SteadyRun as SteadyRun
from .step_reports import StepReport as StepReport
from .verify import Verification as Verification, verify as verify
from .verify_caps import TRIES as TRIES, plan_within_caps as plan_within_caps, traced_peaks as traced_peaks

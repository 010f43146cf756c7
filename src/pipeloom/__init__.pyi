from .ir.cluster import Cluster as Cluster, Device as Device, Link as Link
from .ir.errors import PipeloomError as PipeloomError
from .ir.plan import Plan as Plan, load_plan as load_plan
from .pipeline import Pipeline as Pipeline
from .plan_settings import PlanSettings as PlanSettings
from .planning import capture as capture, plan as plan, profile as profile, simulate as simulate
from .run_options import Options as Options
from .schedules.search.search_schedule import search_schedule as search_schedule
from .torch_engine import torch_stages as torch_stages
from .tracer.job import Job as Job
from .verification import verify as verify

__version__: str

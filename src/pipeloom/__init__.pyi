from .api.captures import capture as capture
from .api.options import Options as Options
from .api.passes import plan as plan
from .api.pipeline import Pipeline as Pipeline
from .api.profiles import profile as profile
from .api.schedule_search import search_schedule as search_schedule
from .api.simulation import simulate as simulate
from .api.verify import verify as verify
from .ir.cluster import Cluster as Cluster, Device as Device, Link as Link
from .ir.errors import PipeloomError as PipeloomError
from .ir.plan import Plan as Plan, load_plan as load_plan
from .tracer.job import Job as Job

__version__: str

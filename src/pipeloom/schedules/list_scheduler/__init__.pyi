from .choose import best as best, fastest as fastest, lower_bound_s as lower_bound_s, make as make
from .stretch import stretched as stretched
from .tables import as_lists as as_lists, columns_in as columns_in, tables_of as tables_of
from .task import EPS as EPS, Outcome as Outcome
from .tasks_of_recipe import assemble as assemble

from .choose_recipe import best as best, fastest as fastest, lower_bound_s as lower_bound_s, make as make
from .posted_receives import step_with_posted_receives as step_with_posted_receives
from .problem import EPS as EPS, Outcome as Outcome, ScheduledRecipe as ScheduledRecipe
from .recipe_problem import make_problem as make_problem
from .stretch import stretched as stretched
from .tables import as_lists as as_lists, columns_in as columns_in, tables_of as tables_of

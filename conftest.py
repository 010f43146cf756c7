"""How Hypothesis chooses examples: the same ones every time, unless a run is asked to search.

This file lies at the root, not in tests/, since a profile has to be known for whatever paths pytest is given.
`@settings(...)` of a test inherits the profile in force, so no test sets `derandomize` or `database` itself.
"""

from hypothesis import HealthCheck, settings

# How fast the machine is decides nothing: no deadline for an example, no complaint about slow strategies.
STEADY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("quick", derandomize=True, database=None, **STEADY)
settings.register_profile("search", derandomize=False, **STEADY)
settings.load_profile("quick")  # `--hypothesis-profile=search` loads the other one after this

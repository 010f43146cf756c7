"""What must not depend on who runs the tests: the examples that Hypothesis draws, and whether Ctrl-C counts.

This file lies at the root, not in tests/, since a profile has to be known for whatever paths pytest is given.
`@settings(...)` of a test inherits the profile in force, so no test sets `derandomize` or `database` itself.
"""

import os
import signal
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# How fast the machine is decides nothing: no deadline for an example, no complaint about slow strategies.
STEADY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("quick", derandomize=True, database=None, **STEADY)
settings.register_profile("search", derandomize=False, **STEADY)
settings.load_profile("quick")  # `--hypothesis-profile=search` loads the other one after this

# Tests make hundreds of pipelines; those of the comparison with plain PyTorch turn it on.
os.environ.setdefault("PIPELOOM_COMPARE", "0")
os.environ.setdefault("PIPELOOM_CONTENTION", "1")  # a test that measures it says so
os.environ.setdefault("PIPELOOM_KEEP_PROFILES", "0")

# What a script starts in the background ignores Ctrl-C, and so does all that it starts in turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Doctests import what they look through, and this imports an optional extra.
needs_lightning = ["src/pipeloom/integrations/lightning.py", "tests/integrations/lightning_script.py"]
collect_ignore = [] if find_spec("lightning") else needs_lightning

"""A rank of bench/gpu_check.py on the stand-in. Prints what it has trained."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import gpu_check
import standin

if __name__ == "__main__":
    print(json.dumps(gpu_check.train_rank(standin.NAME, asdict(gpu_check.SMALL), sys.argv[1])))

"""A run of a tiny GPT as `pipeloom train` has it: its config, a plan without measuring, and its losses."""

import json
import sys
from pathlib import Path
from typing import Any

from pipeloom.clusters.names import cpu_cluster
from pipeloom.planning import plan
from pipeloom.train.config import read_config, write_config
from pipeloom.train.workload import job_of

TRAIN = [sys.executable, "-m", "pipeloom", "train"]
MODEL = {"layers": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
USUAL = {"name": "tiny", "validation_batches": 1, "checkpoint_every": 2, "pipeline.plan": "plan.json"}
USUAL |= {f"model.{key}": value for key, value in MODEL.items()}


def prepare(folder: Path, settings: dict[str, object], *, replicas: int = 1, **how: object) -> Path:
    """With config.toml and a plan for two ranks of each pipeline. settings: by dotted key."""
    config = read_config(None, list((USUAL | settings).items()))
    (folder / "config.toml").write_text(write_config(config))
    how = {
        "planner": "exact",
        "microbatches": 2,
        "microbatch_size": 1,
        "cluster": cpu_cluster(2 * replicas),
    } | how
    plan(job_of(config), ranks=2, replicas=replicas, **how).save(folder / "plan.json")
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    """Of its metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run) if "loss" in line}

"""Random models planned under random caps: the plan fits as simulated, and when it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import runs
from hypothesis import HealthCheck, Phase, event, given, strategies as st
from joint_cases import PLANNERS_OF_ONE
from programs import Step, job_of
from trials import examples

from pipeloom import Job, Pipeline, Plan, plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.planner.planners import PLANNERS

ROWS, MICROBATCHES = 64, 6
KINDS = ("linear", "gelu", "tanh", "layer_norm", "add", "matmul", "view", "halves", "dropout")
FREEING = [name for name in PLANNERS_OF_ONE if PLANNERS[name].optimises != "never"]


def cluster_of(stages: int, cap: int) -> Cluster:
    """Processors with a disk to offload to."""
    ranks, disk = cpu_cluster(stages, memory=cap), Link(bandwidth_bytes_per_s=1e9)
    return replace(
        ranks, devices=(replace(ranks.devices[0], host_link=disk, host_memory_bytes=1 << 30),) * stages
    )


def run(job: Job, made: Plan, folder: Path) -> list[int]:
    """Two steps under the plan's caps; the peak of each rank in bytes."""

    def work(pipeline: Pipeline) -> int:
        for seed in range(2):
            pipeline.step(job.batch(seed, MICROBATCHES * ROWS))
        return pipeline.ledger.peak

    return runs.each_rank(job, made, work, offload_dir=folder)


CASES = st.builds(
    dict,
    steps=st.lists(
        st.builds(Step, st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=12
    ),
    ranks=st.integers(1, 3),
    share=st.floats(0.7, 1.0),  # of what the fullest device needs with everything kept
    planner=st.sampled_from(FREEING),
    treatments=st.sampled_from([("recompute",), ("offload",), ("recompute", "offload")]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
HOW = {
    "phases": [Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@examples(2, 20, **HOW)
@given(case=CASES)
def test_a_plan_fits_its_cap_when_it_runs(tmp_path: Path, case: dict[str, Any]) -> None:
    ranks, share, schedule = (case[name] for name in ("ranks", "share", "schedule"))
    treated = {name: case[name] for name in ("planner", "treatments")}
    job = job_of(case["steps"])
    how = {"ranks": ranks, "microbatches": MICROBATCHES, "microbatch_size": ROWS, "schedule": schedule}
    how["captured"] = runs.capture_of(job, ROWS)
    free = plan(job, **how, cluster=cluster_of(ranks, 1 << 30))
    cap = int(share * max(free.peaks))
    try:
        made = plan(job, **how, cluster=cluster_of(ranks, cap), **treated)
    except InfeasibleError:
        event("nothing fits")
        return
    event(f"{treated['planner']}, {'treated' if any(made.memory.stages) else 'kept'}")
    assert max(made.peaks) <= cap and made.caps == (cap,) * ranks
    assert max(run(job, made, tmp_path)) <= cap

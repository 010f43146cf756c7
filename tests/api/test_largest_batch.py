"""The largest micro-batch: a plan for it fits its caps, and for one row more there is none."""

import pytest
import zoo

from pipeloom import plan, planning
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.errors import InfeasibleError


def largest(name: str, memory: str, **more):
    more.setdefault("cluster", cpu_cluster(2))
    how = planning.make_request(
        zoo.job(name), ranks=2, microbatches=2, microbatch_size=2, memory=memory, **more
    )
    return planning.plan_largest(how, zoo.job(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skips", pytest.param("convnet", marks=pytest.mark.slow)])
def test_one_row_more_is_refused(name: str) -> None:
    how = {"ranks": 2, "microbatches": 2, "cluster": cpu_cluster(2)}
    few = plan(zoo.job(name), microbatch_size=2, **how)
    how["memory"] = f"{2 * max(stage.memory.total for stage in few.stages)}B"
    found, sample = largest(name, how["memory"])
    size = found.microbatch_size
    assert size == sample.size > 2
    assert all(s.memory.total <= cap for s, cap in zip(found.stages, found.caps, strict=True))
    assert plan(zoo.job(name), microbatch_size=size, **how).caps == found.caps
    with pytest.raises(InfeasibleError) as refused:
        plan(zoo.job(name), microbatch_size=size + 1, **how)
    assert f"{size} row" in str(refused.value.hint)


@pytest.mark.slow
def test_treatments_allow_larger_ones() -> None:
    sizes = [
        largest("gpt2", "6MiB", cluster=find_cluster("2 x a100-40"), treatments=treatments)[0].microbatch_size
        for treatments in ((), ("recompute", "offload"))
    ]
    assert sizes[0] < sizes[1]

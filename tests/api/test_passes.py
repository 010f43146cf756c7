"""The passes before training, joined."""

from dataclasses import replace

import zoo
from runs import capture_of

from pipeloom import plan
from pipeloom.clusters import cpu_cluster

MiB = 1024**2


def test_a_plan_has_the_caps_of_the_devices_that_it_was_made_for() -> None:
    """They were dropped when a cluster was given, so such a plan ran without caps."""
    job = zoo.job("skips")
    how = {"stages": 2, "microbatches": 2, "microbatch_size": 2, "captured": capture_of(job)}
    first, second = cpu_cluster(2).devices
    devices = (replace(first, memory_bytes=64 * MiB), replace(second, memory_bytes=32 * MiB))
    cluster = replace(cpu_cluster(2), devices=devices)
    assert plan(job, cluster=cluster, **how).caps == (64 * MiB, 32 * MiB)
    assert plan(job, cluster=cluster, memory="48MiB", **how).caps == (48 * MiB,) * 2
    assert plan(job, memory="48MiB", **how).caps == (48 * MiB,) * 2
    assert plan(job, **how).caps == ()

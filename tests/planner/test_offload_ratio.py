"""k: the ratio of copying to computing, by hand."""

from dataclasses import replace

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.planner.plan_table import plan_rows

ALONE = Device(name="card", memory_bytes=1, host_link=Link(bandwidth_bytes_per_s=10.0))
WITHIN = Link(bandwidth_bytes_per_s=1.0)
SHARED = {"s": Link(bandwidth_bytes_per_s=10.0)}


def loads(*bytes_per_stage: int, devices: tuple[Device, ...]) -> list[tuple[float | None, ...]]:
    """Of each stage k, use of the link, and stages of its rank that may leave whole."""
    stages = tuple(
        StagePlan(ops=(f"op{n}",), forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, kept_bytes=size)
        for n, size in enumerate(bytes_per_stage)
    )
    how = {"graph": "g", "planner": "hand", "schedule": "", "schedule_rows": (), "microbatches": 1}
    placement = tuple(n % len(devices) for n in range(len(stages)))
    rows = plan_rows(
        Plan(stages=stages, placement=placement, **how),  # type: ignore[arg-type]
        cluster=Cluster(devices=devices, within_node=WITHIN, switches=SHARED),
    )
    return [(row.offload_ratio, row.link_use, row.offloadable_stages) for row in rows]


def test_a_link_of_its_own_is_used_half_of_k_and_one_shared_by_two_all_of_it() -> None:
    """3 s and 4 s of copies beside 6 s of work: one stage of each rank may leave."""
    assert loads(30, 30, devices=(ALONE,) * 2) == [(2.0, 1.0, 1)] * 2
    found = loads(15, 15, 20, 20, devices=(replace(ALONE, switch="s"),) * 2)
    assert found == [(1.0, 1.0, 1)] * 2 + [pytest.approx((4 / 3, 4 / 3, 1))] * 2


def test_directions_may_differ_and_a_device_without_a_link_has_no_ratio() -> None:
    slow_back = replace(ALONE, host_link_back=Link(bandwidth_bytes_per_s=5.0))
    found = loads(15, 15, devices=(slow_back, replace(ALONE, host_link=None)))
    assert found == [(1.5, 1.0, 1), (None, None, None)]

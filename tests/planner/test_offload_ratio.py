"""k: the ratio of copying to computing, against the paper's table and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.planner.plan_table import copy_loads, plan_rows, transformer_ratio

PAPER = {  # PipeOffload, arXiv 2503.01328, figure 1: hidden -> k at 4k, 8k, 16k, 32k tokens
    4096: (1.70, 1.46, 1.15, 0.80),
    5120: (1.40, 1.23, 1.00, 0.72),
    6144: (1.19, 1.07, 0.88, 0.66),
    7168: (1.03, 0.94, 0.80, 0.61),
    8192: (0.92, 0.84, 0.72, 0.56),
    10240: (0.74, 0.69, 0.61, 0.49),
}


@pytest.mark.parametrize("hidden", PAPER)
def test_plain_transformers_have_the_ratio_of_the_paper(hidden: int) -> None:
    ours = [transformer_ratio(hidden, 1024 * tokens) for tokens in (4, 8, 16, 32)]
    assert ours[0] == pytest.approx(PAPER[hidden][0], abs=0.01)
    assert ours == pytest.approx(PAPER[hidden], rel=0.07)


def test_a_ratio_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 0"):
        transformer_ratio(4096, 0)


def plan_of(*bytes_per_stage: int, ranks: int) -> Plan:
    stages = tuple(
        StagePlan(ops=(f"op{n}",), forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, kept_bytes=size)
        for n, size in enumerate(bytes_per_stage)
    )
    placement = tuple(n % ranks for n in range(len(stages)))
    return Plan(
        graph="g",
        planner="hand",
        stages=stages,
        placement=placement,
        schedule="",
        schedule_rows=(),
        microbatches=1,
    )


ALONE = Device(name="card", memory_bytes=1, host_link=Link(bandwidth_bytes_per_s=10.0))
WITHIN = Link(bandwidth_bytes_per_s=1.0)


def test_a_link_of_its_own_is_used_half_of_k() -> None:
    loads = copy_loads(plan_of(30, 30, ranks=2), Cluster(devices=(ALONE,) * 2, within_node=WITHIN))
    assert [(load.ratio, load.utilisation, load.offloadable) for load in loads if load] == [(2.0, 1.0, 1)] * 2


def test_two_that_share_an_uplink_use_it_for_all_of_k() -> None:
    shared = replace(ALONE, switch="s")
    cluster = Cluster(
        devices=(shared,) * 2, within_node=WITHIN, switches={"s": Link(bandwidth_bytes_per_s=10.0)}
    )
    loads = copy_loads(plan_of(15, 15, 20, 20, ranks=2), cluster)
    assert [(load.ratio, load.utilisation) for load in loads if load] == [
        (1.0, 1.0),
        (1.0, 1.0),
        pytest.approx((4 / 3, 4 / 3)),
        pytest.approx((4 / 3, 4 / 3)),
    ]
    assert [load.offloadable for load in loads if load] == [1] * 4, "3 s and 4 s of copies beside 6 s of work"


def test_directions_may_differ_and_a_device_without_a_link_has_no_ratio() -> None:
    slow_back = replace(ALONE, host_link_back=Link(bandwidth_bytes_per_s=5.0))
    bare = replace(ALONE, host_link=None)
    cluster = Cluster(devices=(slow_back, bare), within_node=WITHIN)
    first, second = copy_loads(plan_of(15, 15, ranks=2), cluster)
    assert first is not None and (first.ratio, first.utilisation) == (1.5, 1.0) and second is None
    rows = plan_rows(plan_of(15, 15, ranks=2), cluster=cluster)
    assert [row.offload_ratio for row in rows] == [1.5, None]
    assert [row.offloadable_stages for row in rows] == [1, None]

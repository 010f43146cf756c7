"""Clusters: which link joins two devices, what devices share, and what is refused."""

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import ConfigError

SLOW, FAST, FAR = (Link(bandwidth_bytes_per_s=rate) for rate in (10e9, 100e9, 1e9))


def card(**fields) -> Device:
    return Device(name="card", memory_bytes=1, **fields)


def test_the_link_is_that_of_the_group_then_of_the_node_then_between_nodes():
    pairs = tuple(card(group=group, node=node) for group, node in zip("aabb.", (0, 0, 0, 0, 1), strict=True))
    groups = {"a": FAST, "b": FAST, ".": FAST}
    cluster = Cluster(devices=pairs, within_node=SLOW, between_nodes=FAR, groups=groups)
    assert [cluster.link(0, to) for to in range(1, 5)] == [FAST, SLOW, SLOW, FAR]
    assert cluster.link(2, 3) == FAST and cluster.link(4, 3) == FAR
    alone = Cluster(devices=(card(), card()), within_node=SLOW, groups={"a": FAST})
    assert alone.link(0, 1) == SLOW


def test_the_way_back_from_the_host_is_the_way_there_unless_it_differs():
    assert card().reload_link is None
    assert card(host_link=SLOW).reload_link == SLOW
    assert card(host_link=SLOW, host_link_back=FAST).reload_link == FAST
    with pytest.raises(ConfigError, match="a link from the host's memory but none to it"):
        card(host_link_back=FAST)


@pytest.mark.parametrize(
    ("devices", "fields", "words"),
    [
        ((card(switch="left"),), {"switches": {"lefft": SLOW}}, "did you mean lefft"),
        ((card(switch="a"),), {}, "switch 'a'"),
        ((card(group="pair"),), {}, "group 'pair'"),
        ((card(switch="a"), card(switch="a", node=1)), {"switches": {"a": SLOW}}, "in node 0 and in node 1"),
        ((), {}, "no device"),
    ],
)
def test_what_is_refused(devices, fields, words):
    with pytest.raises(ConfigError, match=words):
        Cluster(devices=devices, within_node=SLOW, **fields)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_no_number_would_make_times_meaningless(bad):
    rates = ["flops_per_s", "efficiency"]
    sizes = ["memory_bytes_per_s", "launch_s", "host_memory_bytes", "memory_bytes"]
    for make, field, value in (
        *((Link, field, bad) for field in ("latency_s", "overhead_s", "overhead_s_per_byte")),
        *((Device, field, bad) for field in sizes),
        *((Device, field, {"float32": bad}) for field in rates),
        (Device, "efficiency", {"matmul": 0.0}),
        *([(Link, "bandwidth_bytes_per_s", bad)] if bad != float("inf") else []),
    ):
        fields = {"bandwidth_bytes_per_s": 1e9} if make is Link else {"name": "card", "memory_bytes": 1}
        with pytest.raises(ConfigError, match="0.0" if value == {"matmul": 0.0} else str(bad)):
            make(**(fields | {field: value}))
    assert Link(bandwidth_bytes_per_s=float("inf")).transfer_s(10**9) == 0.0

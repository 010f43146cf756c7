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


def test_devices_without_a_group_are_in_none():
    cluster = Cluster(devices=(card(), card()), within_node=SLOW, groups={"a": FAST})
    assert cluster.link(0, 1) == SLOW


def test_the_way_back_from_the_host_is_the_way_there_unless_it_differs():
    assert card().reload_link is None
    assert card(host_link=SLOW).reload_link == SLOW
    assert card(host_link=SLOW, host_link_back=FAST).reload_link == FAST
    with pytest.raises(ConfigError, match="a link from the host's memory but none to it"):
        card(host_link_back=FAST)


@pytest.mark.parametrize(
    ("devices", "fields", "words"),
    [
        ((card(switch="left"),), {"switches": {"lefft": SLOW}}, "switch 'left'.*\nhint: did you mean lefft"),
        ((card(switch="a"),), {}, "names the switch 'a', which the cluster does not have\nhint: give that"),
        ((card(group="pair"),), {}, "names the group 'pair'"),
        ((card(switch="a"), card(switch="a", node=1)), {"switches": {"a": SLOW}}, "in node 0 and in node 1"),
        ((), {}, "no device"),
    ],
)
def test_what_is_refused(devices, fields, words):
    with pytest.raises(ConfigError, match=words):
        Cluster(devices=devices, within_node=SLOW, **fields)


def test_an_efficiency_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="a share of 0.0 of its peak in matmul"):
        card(efficiency={"matmul": 0.0})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
@pytest.mark.parametrize("field", ["latency_s", "overhead_s", "overhead_s_per_byte", "bandwidth_bytes_per_s"])
def test_a_link_has_no_number_that_would_make_times_meaningless(field, bad):
    fields = {"bandwidth_bytes_per_s": 1e9, field: bad}
    if fields["bandwidth_bytes_per_s"] == INF:
        assert Link(**fields).transfer_s(10**9) == 0.0
        return
    with pytest.raises(ConfigError, match=str(bad)):
        Link(**fields)


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
@pytest.mark.parametrize("field", ["memory_bytes_per_s", "launch_s", "host_memory_bytes", "memory_bytes"])
def test_a_device_has_finite_numbers(field, bad):
    with pytest.raises(ConfigError, match=str(bad)):
        Device(**{"name": "card", "memory_bytes": 1, field: bad})


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
@pytest.mark.parametrize("field", ["flops_per_s", "efficiency"])
def test_a_device_has_finite_rates(field, bad):
    with pytest.raises(ConfigError, match=str(bad)):
        card(**{field: {"float32": bad}})

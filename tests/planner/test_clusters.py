"""Cluster files: what is read, and what is refused with which words."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pipeloom.clusters.files import load_cluster, save_cluster
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import OP_CLASSES, Cluster, Device, GiB, Link
from pipeloom.ir.errors import ConfigError

GOOD = """
[[device]]
name = "card"
count = 2
memory = "24GiB"
flops_per_s = { float32 = 35e12, bfloat16 = 71e12 }
memory_bytes_per_s = 936e9
efficiency = { matmul = 0.7 }
launch_s = 5e-6
host_link = { bandwidth = "12GB", latency_s = 1e-5 }
host_memory = "64GiB"
[[device]]
name = "small"
memory = "11GiB"
node = 1
[within_node]
bandwidth = "12GB"
latency_s = 1e-5
[between_nodes]
bandwidth = 3e9
"""


def test_a_whole_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    cluster = load_cluster(path)
    assert [d.name for d in cluster.devices] == ["card", "card", "small"]
    card, small = cluster.devices[0], cluster.devices[2]
    assert (card.memory_bytes, small.memory_bytes) == (24 * GiB, 11 * GiB)
    assert card.host_link == Link(bandwidth_bytes_per_s=12e9, latency_s=1e-5)
    assert (card.host_memory_bytes, card.launch_s, card.flops_per_s["bfloat16"]) == (64 * GiB, 5e-6, 71e12)
    assert cluster.link(0, 1) == Link(bandwidth_bytes_per_s=12e9, latency_s=1e-5)
    assert cluster.link(1, 2) == Link(bandwidth_bytes_per_s=3e9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (('memory = "24GiB"', 'memroy = "24GiB"'), "unknown key 'memroy'\nhint: did you mean memory?"),
        (("[within_node]", "[within_nodes]"), "unknown key 'within_nodes'\nhint: did you mean within_node?"),
        (("bandwidth = 3e9", "bandwith = 3e9"), "between_nodes has the unknown key 'bandwith'"),
        (("matmul = 0.7", "matmull = 0.7"), "efficiency of device 1 has the unknown key 'matmull'"),
        (("bfloat16 = 71e12", "bf16 = 71e12"), "flops_per_s of device 1 has the unknown key 'bf16'"),
        (("24GiB", "24 GIB"), "device 1: '24 GIB' has the unknown unit 'GIB'"),
        (("24GiB", "0GiB"), "device 1: '0GiB' is no size above 0"),
        (("count = 2", "count = 0"), "device 1 has count 0"),
        (("count = 2", "count = 1.5"), "device 1: count is 1.5"),
        (("launch_s = 5e-6", "launch_s = -1"), "device 1: launch_s is -1"),
        (('name = "small"', "node = 2"), "is not valid TOML"),
        (("[[device]]", "[device]"), "is not valid TOML"),
    ],
)
def test_what_is_refused(tmp_path, wrong, words):
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(*wrong))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_missing_parts(tmp_path):
    path = tmp_path / "cluster.toml"
    with pytest.raises(ConfigError, match="cannot read cluster"):
        load_cluster(path)
    path.write_text('[within_node]\nbandwidth = "1GB"\n')
    with pytest.raises(ConfigError, match="no \\[\\[device\\]\\] table"):
        load_cluster(path)
    path.write_text('[[device]]\nname = "a"\nmemory = "1GB"\n')
    with pytest.raises(ConfigError, match="no \\[within_node\\] table"):
        load_cluster(path)
    path.write_text('[[device]]\nmemory = "1GB"\n[within_node]\nbandwidth = "1GB"\n')
    with pytest.raises(ConfigError, match="device 1 has no name"):
        load_cluster(path)


def test_processes_on_this_machine():
    cluster = cpu_cluster(3, memory="300MiB")
    assert [d.memory_bytes for d in cluster.devices] == [300 * 2**20] * 3
    assert cpu_cluster(2).devices[0].memory_bytes > 2**20
    with pytest.raises(ConfigError, match="a cluster of 0 devices"):
        cpu_cluster(0)


EVERYTHING = """
[[device]]
name = "card"
memory = "24GiB"
group = "pair"
switch = "left"
host_link = { bandwidth = "12GB", latency_s = 1e-5, overhead_s = 1e-6, overhead_s_per_byte = 1e-12 }
host_link_back = { bandwidth = "11GB" }
[[device]]
name = "card"
memory = "24GiB"
group = "pair"
[within_node]
bandwidth = "12GB"
[groups]
pair = { bandwidth = "50GB" }
[switches]
left = { bandwidth = "13GB" }
[node_link]
bandwidth = "10GB"
"""


def test_a_file_with_all_that_is_shared(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(EVERYTHING)
    cluster = load_cluster(path)
    first, second = cluster.devices
    assert (first.group, first.switch, second.switch) == ("pair", "left", None)
    assert first.host_link == Link(
        bandwidth_bytes_per_s=12e9, latency_s=1e-5, overhead_s=1e-6, overhead_s_per_byte=1e-12
    )
    assert first.reload_link == Link(bandwidth_bytes_per_s=11e9)
    assert cluster.link(0, 1) == Link(bandwidth_bytes_per_s=50e9)
    assert cluster.switches == {"left": Link(bandwidth_bytes_per_s=13e9)}
    assert cluster.node_link == Link(bandwidth_bytes_per_s=10e9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (('switch = "left"', 'switch = "leftt"'), "names the switch 'leftt'"),
        (('switch = "left"', 'switch = "leftt"'), "did you mean left?"),
        (('switch = "left"', "switch = 1"), "device 1: switch is 1"),
        (("[switches]", "[switchs]"), "unknown key 'switchs'\nhint: did you mean switches?"),
        (("left = { bandwidth", "left = { bandwidt"), "left of switches has the unknown key 'bandwidt'"),
        (('left = { bandwidth = "13GB" }', "left = 13"), "left of switches is not a table"),
        (('"12GB", latency', "-1.0, latency"), "host_link of device 1: link has bandwidth -1.0 B/s"),
        (("host_link = {", "host_lnk = {"), "did you mean host_link?"),
        (("host_link_back = {", "host_link = {"), "is not valid TOML"),
    ],
)
def test_what_is_refused_of_shared_links(tmp_path, wrong, words):
    path = tmp_path / "cluster.toml"
    path.write_text(EVERYTHING.replace(*wrong))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert words in str(caught.value)


RATES = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)
LINKS = st.builds(
    Link,
    bandwidth_bytes_per_s=RATES,
    latency_s=RATES,
    overhead_s=st.just(0.0) | RATES,
    overhead_s_per_byte=st.just(0.0) | RATES,
)
DEVICES = st.builds(
    Device,
    name=st.text(min_size=1),
    memory_bytes=st.integers(1, 2**40),
    flops_per_s=st.dictionaries(st.sampled_from(["float32", "bfloat16"]), RATES),
    memory_bytes_per_s=RATES,
    efficiency=st.dictionaries(st.sampled_from(OP_CLASSES), RATES),
    launch_s=RATES,
    node=st.just(0),
    group=st.sampled_from([None, "a", "b"]),
    switch=st.sampled_from([None, "left", "right"]),
    host_link=LINKS,
    host_link_back=st.none() | LINKS,
    host_memory_bytes=st.integers(0, 2**40),
)
CLUSTERS = st.builds(
    Cluster,
    devices=st.lists(DEVICES, min_size=1, max_size=4).flatmap(
        lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=6).map(tuple)
    ),
    within_node=LINKS,
    between_nodes=st.none() | LINKS,
    node_link=st.none() | LINKS,
    groups=st.fixed_dictionaries({"a": LINKS, "b": LINKS}),
    switches=st.fixed_dictionaries({"left": LINKS, "right": LINKS}),
)


@given(cluster=CLUSTERS, note=st.sampled_from(["", "measured here\n\ntwice"]))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_as_the_same_cluster(tmp_path, cluster, note):
    path = tmp_path / "cluster.toml"
    save_cluster(cluster, path, note=note)
    assert load_cluster(path) == cluster


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot write .*: No such file"):
        save_cluster(cpu_cluster(1), tmp_path / "missing" / "cluster.toml")

"""Cluster files, and devices and clusters by name: what is read, what is refused, where figures are from."""

import re
import tomllib
import tracemalloc
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import nets
import pytest
from commands import bad
from hypothesis import HealthCheck, given, strategies as st
from refusals import refused
from trials import examples

from pipeloom import plan
from pipeloom.clusters import names
from pipeloom.clusters.devices import built_in, built_in_devices
from pipeloom.clusters.files import load_cluster, save_cluster
from pipeloom.clusters.names import cpu_cluster, find_cluster, machine_memory
from pipeloom.ir.cluster import OP_CLASSES, Cluster, Device, GiB, Link
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.ir.graph import DTYPE_BYTES
from pipeloom.machine import detect

GOOD = """
[[device]]
name = "card"
count = 2
memory = "24GiB"
flops_per_s = { float32 = 35e12, bfloat16 = 71e12 }
memory_bytes_per_s = 936e9
efficiency = { matmul = 0.7 }
launch_s = 5e-6
group = "pair"
switch = "left"
host_link = { bandwidth = "12GB", latency_s = 1e-5, overhead_s = 1e-6, overhead_s_per_byte = 1e-12 }
host_link_back = { bandwidth = "11GB" }
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
[groups]
pair = { bandwidth = "50GB" }
[switches]
left = { bandwidth = "13GB" }
[node_link]
bandwidth = "10GB"
"""


def link(rate: float, latency_s: float = 0.0, **overhead: float) -> Link:
    return Link(bandwidth_bytes_per_s=rate, latency_s=latency_s, **overhead)


def file_of(folder: Path, text: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text)
    return file


def test_a_whole_file(tmp_path):
    cluster = load_cluster(file_of(tmp_path, GOOD))
    assert [d.name for d in cluster.devices] == ["card", "card", "small"]
    card, small = cluster.devices[0], cluster.devices[2]
    assert (card.memory_bytes, small.memory_bytes) == (24 * GiB, 11 * GiB)
    assert card.host_link == link(12e9, 1e-5, overhead_s=1e-6, overhead_s_per_byte=1e-12)
    assert (card.reload_link, card.host_memory_bytes, card.launch_s) == (link(11e9), 64 * GiB, 5e-6)
    assert (card.flops_per_s["bfloat16"], card.group) == (71e12, "pair")
    assert (card.switch, small.switch) == ("left", None)
    assert (cluster.link(0, 1), cluster.link(1, 2)) == (link(50e9), link(3e9))
    assert (cluster.within_node, cluster.node_link) == (link(12e9, 1e-5), link(10e9))
    assert cluster.switches == {"left": link(13e9)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('memory = "24GiB"', 'memroy = "24GiB"', "did you mean memory?"),
        ("[within_node]", "[within_nodes]", "did you mean within_node?"),
        ("bandwidth = 3e9", "bandwith = 3e9", "between_nodes has the unknown key 'bandwith'"),
        ("matmul = 0.7", "matmull = 0.7", "efficiency of device 1"),
        ("bfloat16 = 71e12", "bf16 = 71e12", "flops_per_s of device 1"),
        ("24GiB", "24 GIB", "device 1: '24 GIB'"),
        ("count = 2", "count = 0", "device 1 has count 0"),
        ("count = 2", "count = 1.5", "device 1: count is 1.5"),
        ("launch_s = 5e-6", "launch_s = -1", "device 1: launch_s is -1"),
        ('name = "small"', "node = 2", "TOML"),
        ('name = "small"', "", "device 2 has no name"),
        ("[[device]]", "[device]", "TOML"),
        ('switch = "left"', 'switch = "leftt"', "did you mean left?"),
        ('switch = "left"', "switch = 1", "device 1: switch is 1"),
        ("left = { bandwidth", "left = { bandwidt", "left of switches"),
        ('left = { bandwidth = "13GB" }', "left = 13", "not a table"),
        ('"12GB", latency', "-1.0, latency", "host_link of device 1"),
        (GOOD, "[within_node]\nbandwidth = 1", "no [[device]]"),
        (GOOD, "[[device]]\nname = 'a'\nmemory = 1", "no [within_node]"),
    ],
)
def test_what_is_refused(tmp_path, old, new, words):
    path = file_of(tmp_path, GOOD.replace(old, new))
    said = refused(ConfigError, load_cluster, path)
    assert words in said and str(path) in said


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
@examples(10, 25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_as_the_same_cluster(tmp_path, cluster, note):
    path = tmp_path / "cluster.toml"
    save_cluster(cluster, path, note=note)
    assert load_cluster(path) == cluster
    with pytest.raises(ConfigError, match="cannot write"):
        save_cluster(cluster, tmp_path / "missing" / "cluster.toml")


NAMES = list(built_in_devices())


def test_every_figure_has_a_source_that_says_what_it_is():
    kinds = ("NVIDIA", "Leadtek, ", "measured: ", "derived from", "assumption", "arithmetic: ")
    for name in NAMES:
        for figure in built_in(name).figures.values():
            assert figure.source.startswith(kinds), f"{name} {figure.name}: {figure.source}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu"])
def test_gpus_have_all_that_planning_needs(name):
    device = find_cluster(name).devices[0]
    assert {"float16", "float32", "float64"} <= set(device.flops_per_s) <= set(DTYPE_BYTES)
    assert set(device.efficiency) == set(OP_CLASSES) and all(0 < x < 1 for x in device.efficiency.values())
    assert device.host_link and device.host_link_back and device.host_memory_bytes and device.launch_s
    assert 5e9 < device.host_link.bandwidth_bytes_per_s < 64e9  # PCIe 3.0 to 5.0, 16 lanes
    assert device.memory_bytes_per_s > 100 * device.host_link.bandwidth_bytes_per_s / 3
    assert all(built_in(name).link(figure) for figure in ("within_node", "between_nodes", "node_link"))


def test_no_source_is_left_over_and_no_device_is_defined_twice():
    """A source that no figure names is a figure whose source was mistyped, or debris."""

    def named_in(figures: dict) -> set[str]:
        if "source" in figures:
            return {figures["source"]}
        return {name for row in figures.values() for name in named_in(row)}

    for file in (files("pipeloom.clusters") / "catalogue").iterdir():
        table = tomllib.loads(file.read_text())
        assert file.name == f"{table['name']}.toml"
        assert set(table.get("sources", {})) <= named_in(table["figures"]), file.name
    everyone = [n for entry in built_in_devices().values() for n in (entry.name, *entry.aliases)]
    assert len(everyone) == len(set(everyone))
    promised = "v100-16 v100-32 a100-40 a100-80 a100-40-pcie a100-80-pcie h100 h100-pcie h200 rtx-2080ti cpu"
    assert {built_in(name).name for name in promised.split()} <= set(NAMES)


def test_machines_by_name():
    cluster = find_cluster("8 x a100-40")
    assert [d.name for d in cluster.devices] == ["a100-40-sxm"] * 8
    assert cluster.devices[0].memory_bytes == 39 * GiB  # one is left to CUDA
    assert cluster.devices[0].flops_per_s["bfloat16"] == 312e12
    assert [d.switch for d in cluster.devices[:4]] == ["switch-0-0"] * 2 + ["switch-0-1"] * 2
    assert not cluster.groups and cluster.between_nodes is None and cluster.node_link is None
    assert built_in("v100-16").figures["switch"].link == Link(bandwidth_bytes_per_s=12.1e9)
    assert built_in("v100-16").figures["switch"].size == 2


@pytest.mark.parametrize(
    ("name", "of", "values", "links"),
    [
        # Two machines share a network; cards in pairs have a link of their own; machines may be unequal.
        ("2 nodes of 8 x h100-sxm", "node", [0] * 8 + [1] * 8, [(0, 7), (7, 8)]),
        ("4 x a100-80-pcie", "group", ["group-0-0"] * 2 + ["group-0-1"] * 2, [(0, 1), (1, 2)]),
        ("4 x v100-32 + 4 x rtx-2080ti", "node", [0] * 4 + [1] * 4, [(0, 3), (4, 7), (3, 4)]),
        ("4 x v100-32 + 4 x rtx-2080ti", "name", ["v100-32-sxm"] * 4 + ["rtx-2080ti"] * 4, []),
    ],
)
def test_near_links_are_faster_than_far_ones(name, of, values, links):
    cluster = find_cluster(name)
    assert [getattr(device, of) for device in cluster.devices] == values
    assert (cluster.node_link is not None) == (max(d.node for d in cluster.devices) > 0)
    rates = [cluster.link(*pair).bandwidth_bytes_per_s for pair in links]
    assert all(near > far for near, far in pairwise(rates))


def test_links_within_a_node_do_not_depend_on_the_nodes_beside_it() -> None:
    alone, beside = find_cluster("8 x v100-32"), find_cluster("8 x v100-32 + 2 x rtx-2080ti")
    assert all(alone.link(0, rank) == beside.link(0, rank) for rank in range(1, 8))
    assert beside.link(8, 9) == find_cluster("2 x rtx-2080ti").link(0, 1)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("A100-40", "1 x a100-40-sxm"),
        ("8xa100-40", "8 x a100-40"),
        ("8 × RTX 2080 Ti", "8 x rtx-2080ti"),
        (" 2 nodes  of 4 x h100 ", "4 x h100 + 4 x h100"),
        ("1 node of 2 x h200", "2 x h200"),
    ],
)
def test_ways_to_write_the_same(text, same):
    assert find_cluster(text) == find_cluster(same)


def test_less_memory_than_the_device_has():
    assert [d.memory_bytes for d in find_cluster("2 x a100-40 with 20GiB").devices] == [20 * GiB] * 2
    assert find_cluster("3 x cpu with 300MiB") == cpu_cluster(3, memory="300MiB")
    assert [d.memory_bytes for d in cpu_cluster(3, memory="300MiB").devices] == [300 * 2**20] * 3
    assert find_cluster("2 x cpu") == cpu_cluster(2) and cpu_cluster(2).devices[0].memory_bytes > 2**20
    with pytest.raises(ConfigError, match="0 devices"):
        cpu_cluster(0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8 x a100-41", "did you mean a100-40"),
        ("4 x rtx2080", "did you mean rtx-2080ti"),
        ("0 x h100", "no device"),
        ("2 nodes of", "'2 nodes of'"),
        ("h100 + ", "cannot read ''"),
        ("2 x h100 with 3 lots", "'lots'"),
        ("2 x a100-40 with 400GiB", "has 40.0 GiB"),
        ("missing.toml", "cannot read cluster missing.toml"),
        ("some/folder", "cannot read cluster some/folder"),
    ],
)
def test_names_that_are_refused(text, words):
    assert words in refused(ConfigError, find_cluster, text)


def test_a_path_is_a_file_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2 nodes of 4 x v100-16 + 2 x a100-40-pcie", *(f"2 nodes of 4 x {name}" for name in NAMES)):
        wanted = find_cluster(name)
        save_cluster(wanted, Path("mine"))
        assert find_cluster("mine") == load_cluster(Path("mine")) == wanted


# Numbers of devices, and of digits, that nobody means.


MANY = 10**10
HUGE = 10**400
CARD = '[[device]]\nname = "card"\nmemory = "1GiB"\n'
LINK = '[within_node]\nbandwidth = "12GB"\n'


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What is refused before it is made takes next to none."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MANY} x a100-40", "10000000000 devices"),
        (f"{MANY} nodes of 8 x h100", "80000000000 devices"),
        ("60000 x a100-40 + 60000 x v100-32", "120000 devices"),
        (f"{HUGE} x a100-40", "401 digits"),
        (f"{'9' * 5000} nodes of 2 x a100-40", "5000 digits"),
        (f"2 x a100-40 with {HUGE}GiB", "too large for a size"),
        (f"2 x a100-40 with {'9' * 1_000_001}", "too large for a size"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_clusters_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_cluster(text)
    assert len(str(caught.value)) < 200
    assert str(caught.value.hint) in ("describe at most 100000", "sizes are below 1e30 bytes")


def test_a_container_may_use_less_than_the_machine_has(tmp_path, monkeypatch):
    whole, unlimited, tight = machine_memory(), file_of(tmp_path, "max\n"), tmp_path / "limit"
    tight.write_text("67108864\n")
    monkeypatch.setattr(names, "CONTAINER_LIMITS", (tmp_path / "absent", unlimited))
    assert machine_memory() >= whole
    monkeypatch.setattr(names, "CONTAINER_LIMITS", (unlimited, tight))
    assert cpu_cluster(2).devices[0].memory_bytes == 32 * 1024**2


@pytest.mark.parametrize("count", [MANY, HUGE, 10**5000], ids=["11", "401", "5001"])
@pytest.mark.usefixtures("little_memory")
def test_processes_of_this_machine(count: int) -> None:
    for make in (cpu_cluster, lambda n: cpu_cluster(n, memory="1GiB"), lambda n: detect(devices=n)):
        with pytest.raises(ConfigError, match="at most 100000"):
            make(count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("words", [["plan"], ["plan", "--cluster", "2 x a100-40"], ["verify"]])
def test_ranks_on_the_command_line(schedule: str, words: list[str]) -> None:
    said = bad(2, *words, "--ranks", MANY, "-s", schedule)
    assert "10000000000" in said and ("to 100000" in said or words == ["verify"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_as_many_stages_as_devices_may_be(schedule: str) -> None:
    with pytest.raises(PlanError, match="100000"):
        plan(nets.job("skips"), ranks=100_000, microbatch_size=2, cluster="2 x cpu", schedule=schedule)


def test_counts_of_several_tables(tmp_path: Path) -> None:
    file = file_of(tmp_path, (CARD + "count = 60000\n") * 2 + LINK)
    with pytest.raises(ConfigError, match="120000 devices"):
        load_cluster(file)
    file.write_text((CARD + "count = 50000\n") * 2 + LINK)
    assert len(load_cluster(file).devices) == 100_000


@pytest.mark.parametrize("value", [f"{HUGE}", "0x" + "f" * 5000], ids=["decimal", "hexadecimal"])
@pytest.mark.parametrize(
    "row",
    [
        "memory = VALUE",
        "host_memory = [VALUE]",
        "launch_s = VALUE",
        "node = VALUE",
        "group = VALUE",
        "flops_per_s = { float32 = VALUE }",
        "host_link = { bandwidth = VALUE }",
        "host_link = { bandwidth = 1, latency_s = VALUE }",
    ],
)
def test_numbers_of_hundreds_of_digits_in_files(tmp_path: Path, row: str, value: str) -> None:
    """The file, the device and the key are named, and the number in a few characters."""
    device = CARD.replace('memory = "1GiB"\n', "") if row.startswith("memory =") else CARD
    file = file_of(tmp_path, f"{device}{row.replace('VALUE', value)}\n{LINK}")
    with pytest.raises(ConfigError, match=re.escape(f"{file}: ")) as caught:
        load_cluster(file)
    said = caught.value.message
    assert "device 1" in said and row.partition(" ")[0] in said and caught.value.hint
    assert re.search(r"\d\.\d\de\+\d{3}|1000000\.\.\.0000000", said) and len(said) < len(str(file)) + 120


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{CARD}launch_s = {'9' * 5000}\n{LINK}", "thousands of digits"),
        (f"{'9' * 6000} = 1", "cluster.toml"),
        (f'[[device]]\nname = "a"\n[{"n" * 6000}]\nx = 1', "cluster.toml"),
    ],
    ids=["number", "key", "table"],
)
def test_what_is_thousands_of_characters_long_is_cut_short(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_cluster(str(file_of(tmp_path, text)))
    assert len(str(caught.value)) < 1000


def test_figures_beyond_all_measure_are_refused() -> None:
    """A device that computes at no rate, and a latency that no clock can show."""
    with pytest.raises(ConfigError, match=r"flops_per_s\[float32\] = 0"):
        Device(name="card", memory_bytes=1, flops_per_s={"float32": 0.0})
    with pytest.raises(ConfigError, match=r"latency_s = 1e\+308"):
        Link(bandwidth_bytes_per_s=1.0, latency_s=1e308)

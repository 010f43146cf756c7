"""Built-in devices and clusters by name: what they are made of, and where each figure is from."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from pipeloom.clusters.devices import built_in, built_in_devices
from pipeloom.clusters.files import load_cluster, save_cluster
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import OP_CLASSES, GiB, Link
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.graph import DTYPE_BYTES

ROOT = Path(__file__).parents[2]
NAMES = list(built_in_devices())
GPUS = [name for name in NAMES if name != "cpu"]
LINKS = ("host_link", "host_link_back", "switch", "group", "within_node", "between_nodes", "node_link")


def tables() -> dict[str, dict]:
    folder = files("pipeloom.clusters") / "catalogue"
    return {file.name: tomllib.loads(file.read_text()) for file in folder.iterdir()}


def test_the_devices_that_were_promised_are_there():
    promised = "v100-16 v100-32 a100-40 a100-80 a100-40-pcie a100-80-pcie h100 h100-pcie h200 rtx-2080ti"
    assert {built_in(name).name for name in (*promised.split(), "rtx-4090", "cpu")} <= set(NAMES)


KINDS_OF_SOURCE = ("NVIDIA", "Leadtek, ", "measured: ", "derived from", "assumption", "arithmetic: ")


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_that_says_what_it_is(name):
    for figure in built_in(name).figures.values():
        assert figure.source.startswith(KINDS_OF_SOURCE), f"{name} {figure.name}: {figure.source}"


@pytest.mark.parametrize("name", GPUS)
def test_gpus_have_all_that_planning_needs(name):
    device = find_cluster(name).devices[0]
    assert {"float16", "float32", "float64"} <= set(device.flops_per_s) <= set(DTYPE_BYTES)
    assert set(device.efficiency) == set(OP_CLASSES) and all(0 < x < 1 for x in device.efficiency.values())
    assert device.host_link and device.host_link_back and device.host_memory_bytes and device.launch_s
    assert 5e9 < device.host_link.bandwidth_bytes_per_s < 64e9  # PCIe 3.0 to 5.0, 16 lanes
    assert device.memory_bytes_per_s > 100 * device.host_link.bandwidth_bytes_per_s / 3
    for figure in ("within_node", "between_nodes", "node_link"):
        assert built_in(name).link(figure) is not None


def test_no_source_is_left_over_and_no_device_is_defined_twice():
    """A source that no figure names is a figure whose source was mistyped, or debris."""
    for file, table in tables().items():
        assert file == f"{table['name']}.toml"
        unused = set(table.get("sources", {})) - _named_in(table["figures"])
        assert not unused, f"{file}: no figure names {unused}"
    everyone = [n for entry in built_in_devices().values() for n in (entry.name, *entry.aliases)]
    assert len(everyone) == len(set(everyone))


def _named_in(figures: dict) -> set[str]:
    if "source" in figures:
        return {figures["source"]}
    return {name for row in figures.values() for name in _named_in(row)}


def test_a_machine_of_eight():
    cluster = find_cluster("8 x a100-40")
    assert [d.name for d in cluster.devices] == ["a100-40-sxm"] * 8
    assert cluster.devices[0].memory_bytes == 39 * GiB  # one is left to CUDA
    assert cluster.devices[0].flops_per_s["bfloat16"] == 312e12
    assert [d.switch for d in cluster.devices[:4]] == ["switch-0-0"] * 2 + ["switch-0-1"] * 2
    assert not cluster.groups and cluster.between_nodes is None and cluster.node_link is None


def test_two_machines_share_a_network():
    cluster = find_cluster("2 nodes of 8 x h100-sxm")
    assert [d.node for d in cluster.devices] == [0] * 8 + [1] * 8
    assert cluster.link(0, 7).bandwidth_bytes_per_s > 5 * cluster.link(7, 8).bandwidth_bytes_per_s
    assert cluster.node_link is not None and not cluster.switches


def test_cards_in_pairs_have_a_link_of_their_own():
    cluster = find_cluster("4 x a100-80-pcie")
    assert [d.group for d in cluster.devices] == ["group-0-0"] * 2 + ["group-0-1"] * 2
    assert cluster.link(0, 1).bandwidth_bytes_per_s > 10 * cluster.link(1, 2).bandwidth_bytes_per_s


def test_unequal_machines():
    cluster = find_cluster("4 x v100-32 + 4 x rtx-2080ti")
    assert [d.name for d in cluster.devices] == ["v100-32-sxm"] * 4 + ["rtx-2080ti"] * 4
    fast, slow, network = (cluster.link(*pair).bandwidth_bytes_per_s for pair in ((0, 3), (4, 7), (3, 4)))
    assert fast > slow > network
    assert cluster.devices[4].node == 1 and cluster.devices[4].switch is None


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
    assert find_cluster("2 x cpu") == cpu_cluster(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "8 x a100-41",
            "no built-in device is called 'a100-41', and no file '8 x a100-41' exists\n"
            "hint: did you mean a100-40",
        ),
        ("4 x rtx2080", "did you mean rtx-2080ti"),
        ("0 x h100", "'0 x h100' has no device"),
        ("2 nodes of", "no built-in device is called '2 nodes of'"),
        ("h100 + ", "cannot read '' as a part of a cluster\nhint: write it as"),
        ("", "cannot read ''"),
        ("2 x h100 with 3 lots", "'3 lots' has the unknown unit 'lots'"),
        ("missing.toml", "cannot read cluster missing.toml"),
        ("some/folder", "cannot read cluster some/folder"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        find_cluster(text)
    assert words in str(caught.value)


def test_a_path_is_a_file_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = find_cluster("2 nodes of 4 x v100-16 + 2 x a100-40-pcie")
    save_cluster(wanted, Path("mine"))
    assert find_cluster("mine") == load_cluster(Path("mine")) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_devices_go_through_a_file_unchanged(name, tmp_path):
    wanted = find_cluster(f"2 nodes of 4 x {name}")
    save_cluster(wanted, tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml") == wanted


def test_a_link_that_is_shared_is_a_plain_link():
    assert built_in("v100-16").figures["switch"].link == Link(bandwidth_bytes_per_s=12.1e9)
    assert built_in("v100-16").figures["switch"].size == 2


@pytest.mark.slow
def test_the_catalogue_is_in_the_wheel(tmp_path):
    source = tmp_path / "source"  # building leaves folders behind
    shutil.copytree(ROOT / "src" / "pipeloom", source / "src" / "pipeloom")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([sys.executable, *command, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {f"pipeloom/clusters/catalogue/{name}.toml" for name in NAMES} <= set(inside)

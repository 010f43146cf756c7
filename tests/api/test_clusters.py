"""Clusters from measurements: which GPUs share what, and a whole measurement of this machine's processor."""

import json

import pytest
import torch
from click.testing import CliRunner

from pipeloom.cli import main
from pipeloom.clusters.files import load_cluster
from pipeloom.ir.cluster import Device, Link
from pipeloom.ir.errors import ConfigError
from pipeloom.machine import below_switches, detect, grouped

DEVICE = Device(name="card", memory_bytes=1)


def link(rate: float) -> Link:
    return Link(bandwidth_bytes_per_s=rate * 1e9)


def pairs(rates: dict[tuple[int, int], float], count: int, rest: float) -> dict[tuple[int, int], Link]:
    return {(a, b): link(rates.get((a, b), rest)) for a in range(count) for b in range(a + 1, count)}


def test_gpus_that_are_all_joined_alike_need_no_group():
    within, groups, names = grouped(pairs({(0, 1): 12.0}, 4, rest=10.0), 4)
    assert (within, groups, names) == (link(10), {}, [None] * 4)


def test_bridges_between_two_make_groups_of_two():
    within, groups, names = grouped(pairs({(0, 2): 90.0, (1, 3): 95.0}, 4, rest=10.0), 4)
    assert within == link(10)
    assert groups == {"group-0": link(90), "group-1": link(95)}
    assert names == ["group-0", "group-1", "group-0", "group-1"]


def test_a_chain_of_fast_links_is_no_group():
    """Its ends are joined slowly."""
    within, groups, names = grouped(pairs({(0, 1): 90.0, (1, 2): 90.0}, 3, rest=10.0), 3)
    assert not groups and names == [None] * 3 and within == link(10)


def test_a_single_gpu_has_no_link():
    assert grouped({}, 1) == (None, {}, [None])


def test_only_shared_uplinks_are_switches():
    devices, switches = below_switches([DEVICE] * 3, [0, 0, 2], [25e9, 25e9, 24e9])
    assert [d.switch for d in devices] == ["switch-0", "switch-0", None]
    assert switches == {"switch-0": link(25)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_gpus_that_are_not_there():
    with pytest.raises(ConfigError, match="1 GPUs to measure, and this machine has 0\nhint: measure"):
        detect("cuda")


def test_no_device_at_all():
    with pytest.raises(ConfigError, match="0 devices to measure"):
        detect(devices=0)


@pytest.mark.slow
def test_measuring_this_machine(tmp_path):
    """The command's file is the cluster that it describes, and can be planned for."""
    file = tmp_path / "here.toml"
    wanted = ["--devices", "2", "--directory", str(tmp_path), "-o", str(file), "--json"]
    result = CliRunner().invoke(main, ["cluster", "detect", *wanted], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    cluster = load_cluster(file)
    assert len(cluster.devices) == len(found["devices"]) == 2
    device = cluster.devices[0]
    assert device.flops_per_s == found["devices"][0]["flops_per_s"] and device.switch == "disk"
    assert device.flops_per_s["float32"] > 1e8 and device.host_link and device.host_link_back
    assert cluster.within_node.bandwidth_bytes_per_s > 1e6
    names = {row["name"] for row in found["measured"]}
    assert {"memory_bytes_per_s", "launch_s", "efficiency.matmul", "host_link"} <= names
    assert "within_node.latency_s" in names
    assert "Measured by" in file.read_text()
    planned = CliRunner().invoke(main, ["plan", "--cluster", str(file), "--json"], catch_exceptions=False)
    assert planned.exit_code == 0, planned.output

"""Clusters from measurements: which GPUs share what, and a whole measurement of this machine's processor."""

from itertools import combinations

import pytest
import torch
from commands import figures, good
from refusals import refused

from pipeloom.clusters.files import load_cluster
from pipeloom.ir.cluster import Device, Link
from pipeloom.ir.errors import ConfigError
from pipeloom.machine import below_switches, detect, grouped

DEVICE = Device(name="card", memory_bytes=1)


def link(rate: float) -> Link:
    return Link(bandwidth_bytes_per_s=rate * 1e9)


@pytest.mark.parametrize(
    ("rates", "groups", "names"),
    [
        ({(0, 1): 12.0}, {}, [None] * 4),  # all are joined alike
        (
            {(0, 2): 90.0, (1, 3): 95.0},
            {"group-0": link(90), "group-1": link(95)},
            ["group-0", "group-1"] * 2,
        ),
        ({(0, 1): 90.0, (1, 2): 90.0}, {}, [None] * 3),  # the ends of a chain are joined slowly
    ],
)
def test_gpus_that_are_joined_faster_than_others_are_a_group(rates, groups, names):
    pairs = combinations(range(len(names)), 2)
    links = {pair: link(rates.get(pair, 10.0)) for pair in pairs}
    assert grouped(links, len(names)) == (link(10), groups, names)


def test_only_shared_uplinks_are_switches():
    devices, switches = below_switches([DEVICE] * 3, [0, 0, 2], [25e9, 25e9, 24e9])
    assert [d.switch for d in devices] == ["switch-0", "switch-0", None]
    assert switches == {"switch-0": link(25)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cpu", 0)])
def test_what_is_not_there(device, count):
    assert "to measure" in refused(ConfigError, detect, device, devices=count)


@pytest.mark.slow
def test_measuring_this_machine(folder):
    """The command's file is the cluster that it describes, and can be planned for."""
    found = figures("cluster", "detect", "--devices", "2", "--directory", folder, "-o", "here.toml")
    cluster = load_cluster(folder / "here.toml")
    assert len(cluster.devices) == len(found["devices"]) == 2
    device = cluster.devices[0]
    assert device.flops_per_s == found["devices"][0]["flops_per_s"] and device.switch == "disk"
    assert device.flops_per_s["float32"] > 1e8 and device.host_link and device.host_link_back
    assert cluster.within_node.bandwidth_bytes_per_s > 1e6
    names = {row["name"] for row in found["measured"]}
    assert {"memory_bytes_per_s", "launch_s", "efficiency.matmul", "host_link"} <= names
    assert "within_node.latency_s" in names
    assert "Measured by" in (folder / "here.toml").read_text()
    good("plan", "mine.py:job", "--cluster", "here.toml")

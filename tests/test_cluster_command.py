"""pipeloom cluster: what is listed and shown, and clusters by name for the other commands."""

import json

import pytest
from click.testing import CliRunner, Result

import pipeloom
from pipeloom.cli import main
from pipeloom.clusters.devices import built_in, built_in_devices
from pipeloom.clusters.files import load_cluster
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import ConfigError
from pipeloom.train.config import Config
from pipeloom.train.workload import job_of


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cluster", *arguments], catch_exceptions=False)


def test_the_list_has_all_devices():
    result = run("list")
    assert result.exit_code == 0
    assert all(name in result.output for name in built_in_devices())


def test_the_list_as_json():
    devices = json.loads(run("list", "--json").output)["devices"]
    assert [d["name"] for d in devices] == list(built_in_devices())
    card = next(d for d in devices if d["name"] == "a100-40-sxm")
    assert card["flops_per_s"]["bfloat16"] == 312e12 and "a100-40" in card["aliases"]


def test_every_figure_is_shown_with_its_source():
    result = run("show", "8 x v100-32")
    assert result.exit_code == 0
    shown = "".join(result.output.split())
    for figure in built_in("v100-32").figures.values():
        assert figure.name in shown and "".join(figure.source.split())[:25] in shown
    assert "group-0-1: 47.9 GB/s" in result.output


def test_what_is_shown_as_json():
    found = json.loads(run("show", "2 nodes of 2 x a100-80-pcie", "--json").output)
    assert [d["node"] for d in found["devices"]] == [0, 0, 1, 1]
    assert found["links"]["within_node"]["bandwidth_bytes_per_s"] == 270e9  # each node is one bridged pair
    source = found["sources"]["a100-80-pcie"]["memory_bytes_per_s"]
    assert source["value"] == 1935e9 and source["source"].startswith("NVIDIA")


def test_a_built_in_cluster_as_a_file_to_be_changed(tmp_path):
    file = tmp_path / "mine.toml"
    assert run("show", "4 x rtx-4090", "-o", str(file)).exit_code == 0
    assert load_cluster(file) == find_cluster("4 x rtx-4090")
    assert "rtx-4090" in run("show", str(file)).output


def test_an_unknown_name_is_a_sentence():
    result = run("show", "8 x a100-41")
    assert result.exit_code == 2
    assert result.output.startswith("error: no built-in device is called 'a100-41'")


@pytest.mark.slow
def test_profile_takes_a_cluster_by_name():
    result = CliRunner().invoke(
        main, ["profile", "--cluster", "2 x a100-40", "--json"], catch_exceptions=False
    )
    found = json.loads(result.output)
    assert (found["device"], found["source"]) == ("a100-40-sxm", "roofline")


@pytest.mark.slow
def test_a_plan_for_devices_by_name_keeps_to_their_memory():
    job = job_of(Config())
    made = pipeloom.plan(job, ranks=2, microbatch_size=1, cluster="2 x rtx-2080ti with 1GiB")
    assert made.caps == (2**30, 2**30)
    with pytest.raises(ConfigError, match="no built-in device is called 'rtx-2081'"):
        pipeloom.plan(job, ranks=2, microbatch_size=1, cluster="2 x rtx-2081")

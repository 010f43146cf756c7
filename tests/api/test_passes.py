"""The passes before training, joined: what plans have, and mistakes told in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import zoo
from runs import capture_of
from torch import nn

from pipeloom import plan, planning
from pipeloom.clusters.files import load_cluster
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.errors import ConfigError, InfeasibleError, PlanError

MiB = 1024**2

HOW = {"ranks": 2, "microbatches": 2, "microbatch_size": 2}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"weights": "2b"}, "weights is '2b'"),
        ({"treatments": ("recomp",)}, "treatments is 'recomp'"),
        ({"microbatch_size": 0}, "microbatch_size is 0"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"microbatch_size": 4}, "micro-batches of 2 rows, the plan is for 4"),
    ],
)
def test_nonsense_is_refused(more: dict, said: str) -> None:
    job = zoo.job("skips")
    with pytest.raises((PlanError, ConfigError), match=said):
        plan(job, cluster=cpu_cluster(2), captured=capture_of(job), **HOW | more)


def test_a_profile_of_another_size_is_refused() -> None:
    job, cluster = zoo.job("skips"), cpu_cluster(2)
    large = planning.capture(job, 8)
    profile = planning.estimate(large.graph, cluster)["cpu"]
    with pytest.raises(PlanError, match=r"the profile is of micro-batches .*\[8"):
        plan(job, cluster=cluster, captured=capture_of(job), profiled=profile, **HOW)
    made = plan(job, cluster=cluster, captured=capture_of(job), **HOW)
    with pytest.raises(PlanError, match=r"the profile is of micro-batches .*\[8"):
        planning.simulate(made, capture_of(job).graph, profile, cluster)


def test_one_profile_stands_for_one_kind_of_device() -> None:
    job, mixed = zoo.job("skips"), find_cluster("1 x a100-40 + 1 x v100-32")
    graph = capture_of(job).graph
    profile = planning.estimate(graph, mixed)[mixed.devices[0].name]
    with pytest.raises(PlanError, match="for the kinds a100-40-sxm, v100-32"):
        plan(job, cluster=mixed, captured=capture_of(job), profiled=profile, **HOW)


def test_devices_of_one_name_compute_alike() -> None:
    graph = capture_of(zoo.job("skips")).graph
    two = cpu_cluster(2)
    first, second = two.devices
    other = replace(two, devices=(first, replace(second, memory_bytes_per_s=1e9)))
    with pytest.raises(ConfigError, match="named cpu that compute at different rates"):
        planning.estimate(graph, other)
    unequal = replace(two, devices=(first, replace(second, memory_bytes=1)))
    assert list(planning.estimate(graph, unequal)) == ["cpu"]


def test_a_plan_for_more_devices_than_there_are() -> None:
    job = zoo.job("skips")
    made = plan(job, cluster=cpu_cluster(2), captured=capture_of(job), **HOW)
    graph = capture_of(job).graph
    with pytest.raises(PlanError, match="the plan is for 2 devices, the cluster has 1"):
        planning.simulate(made, graph, planning.estimate(graph, cpu_cluster(1)), cpu_cluster(1))
    with pytest.raises(PlanError, match="no profile for device cpu"):
        planning.simulate(
            made, graph, {"gpu": planning.estimate(graph, cpu_cluster(1))["cpu"]}, cpu_cluster(2)
        )


def test_a_long_text_names_no_cluster() -> None:
    with pytest.raises(ConfigError):
        find_cluster("8 x a100-40 and " * 40)


def test_nodes_need_a_link_between_them(tmp_path) -> None:
    rows = "".join(f'[[device]]\nname = "any"\nmemory = "1GiB"\nnode = {node}\n' for node in (0, 1))
    file = tmp_path / "cluster.toml"
    file.write_text(f'{rows}[within_node]\nbandwidth = "12GB"\n')
    with pytest.raises(ConfigError, match=r"2 nodes and there is no \[between_nodes\] table"):
        load_cluster(file)


def test_a_plan_makes_its_optimizer_once_for_the_devices_that_it_is_for() -> None:
    """It was made at the capture for CPUs, and again for the devices."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(params))
        return made[-1]

    job = replace(zoo.job("skips"), optimizer=optimizer)
    for cluster, together in ((cpu_cluster(2), False), (find_cluster("2 x a100-40"), True)):
        made.clear()
        graph = planning.captured_model(job, 2, cluster).graph
        updates = [p.given_update for p in graph.parameters if p.trainable]
        assert len(made) == 1 and {u is not None and u.together for u in updates} == {together}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "more", [{}, {"replicas": 2, "shard_optimizer": True}, {"weights": "2bw", "clips": True}]
)
def test_a_graph_without_an_optimizer_is_simulated_with_the_state_of_the_plan(
    momentum: float, more: dict
) -> None:
    """Adam's was counted."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    job, cluster = replace(zoo.job("gpt"), optimizer=sgd), cpu_cluster(2 * more.get("replicas", 1))
    unknown = capture_of(job)
    graph = planning.with_updates(unknown.graph, job)
    assert not any(p.given_update for p in unknown.graph.parameters)
    made, costs = (
        plan(job, cluster=cluster, captured=unknown, **HOW | more),
        planning.estimate(graph, cluster),
    )
    known, guessed = (planning.simulate(made, g, costs, cluster).peaks for g in (graph, unknown.graph))
    assert [p["optimizer"] for p in guessed] == [p["optimizer"] for p in known]


@pytest.mark.slow
def test_stages_of_one_rank_share_its_memory() -> None:
    job = zoo.job("gpt")
    with pytest.raises(InfeasibleError, match="no cut of .* ops into 4 stages fits"):
        plan(job, cluster=cpu_cluster(2), memory="100KiB", schedule="zb_v", captured=capture_of(job), **HOW)


def test_a_split_backward_is_split_wherever_the_stages_are_placed() -> None:
    job = zoo.job("gpt")
    made = planning.plan(
        job,
        cluster=cpu_cluster(2),
        schedule="interleaved_1f1b",
        split_backward=True,
        captured=capture_of(job),
        **HOW,
    )
    rows = " ".join(made.schedule_rows)
    assert "I0" in rows and "B" not in rows


def test_a_plan_has_the_caps_of_the_devices_that_it_was_made_for() -> None:
    """They were dropped when a cluster was given, so such a plan ran without caps."""
    job = zoo.job("skips")
    how = {"ranks": 2, "microbatches": 2, "microbatch_size": 2, "captured": capture_of(job)}
    first, second = cpu_cluster(2).devices
    devices = (replace(first, memory_bytes=64 * MiB), replace(second, memory_bytes=32 * MiB))
    cluster = replace(cpu_cluster(2), devices=devices)
    assert plan(job, cluster=cluster, **how).caps == (64 * MiB, 32 * MiB)
    assert plan(job, cluster=cluster, memory="48MiB", **how).caps == (48 * MiB,) * 2
    assert plan(job, memory="48MiB", **how).caps == (48 * MiB,) * 2
    assert plan(job, **how).caps == ()

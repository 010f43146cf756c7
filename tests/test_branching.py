"""The models of `bench/graphpipe.py`: what they compute, how they are captured, and that cuts keep it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import graphpipe
import pytest
import torch
import zoo
from branching_ranks import small_job, train_each
from runs import capture_of, plain, plan_for, shared_captures

from pipeloom import Job, Plan, verify
from pipeloom.ir.graph import OpGraph
from pipeloom.planning import plan
from pipeloom.runtime.launch import launch

TOLERANCE = 1e-5


def branches(graph: OpGraph) -> dict[str, int]:
    """A stage for the ops of each input, and one for those that depend on several: a tower each, and a join.

    What reads no input, such as a table of positions, goes where it is used.
    """
    read: dict[str, frozenset[str]] = {value.name: frozenset([value.name]) for value in graph.inputs}
    for op in graph.ops:
        inputs = frozenset().union(*(read[name] for name in op.inputs)) - {"target"}
        read |= {value.name: inputs for value in op.outputs}
    for op in reversed(graph.ops):
        users = [graph.op[user] for value in op.outputs for user in graph.consumers[value.name]]
        if users and not read[op.outputs[0].name]:
            read |= {value.name: read[users[0].outputs[0].name] for value in op.outputs}
    sources = [value.name for value in graph.inputs if value.name != "target"]
    stage = {frozenset([name]): number for number, name in enumerate(sources)}
    return {op.name: stage.get(read[op.outputs[0].name], len(sources)) for op in graph.ops if not op.cheap}


def halves(stage_of: dict[str, int]) -> dict[str, int]:
    """Each stage but the last in two."""
    last = max(stage_of.values())
    own: list[list[str]] = [[op for op, s in stage_of.items() if s == stage] for stage in range(last)]
    second = {op for ops in own for op in ops[len(ops) // 2 :]}
    return {op: 2 * s + (op in second) if s < last else 2 * last for op, s in stage_of.items()}


def by_hand(job: Job, name: str) -> Plan:
    """Towers side by side, in two stages each where there are two of them."""
    graph = capture_of(job).graph
    stage_of = branches(graph)
    return plan_for(
        capture_of(job),
        halves(stage_of) if max(stage_of.values()) == 2 else stage_of,
        microbatches=4,
        schedule="zb_h1" if name in ("mmt", "clip") else "1f1b",
        split=name not in ("mmt", "clip") and name != "dlrm",
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "candle" else pytest.mark.slow)
        for name in graphpipe.SMALL
        if name != "unet"
    ],
)
def test_towers_side_by_side_give_what_one_process_gives(name: str) -> None:
    job = graphpipe.SMALL[name]()
    with shared_captures():
        made = by_hand(job, name)
        assert len(made.stages) == 5
        verify(job, made, tolerance=TOLERANCE).require()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stages"), [("exact", 4), *(("graphpipe", n) for n in (3, 4, 5, 6))])
@pytest.mark.parametrize("name", [*graphpipe.SMALL, "t5"])
def test_planned_stages_give_what_one_process_gives(name: str, strategy: str, stages: int) -> None:
    """The layers of T5's decoder all read what its encoder makes: one block of nearly all ops."""
    job = zoo.job("t5") if name == "t5" else graphpipe.SMALL[name]()
    with shared_captures():
        made = planned(job, stages, strategy)
        assert len(made.stages) == stages
        verify(job, made, tolerance=TOLERANCE).require()


RANKS, STEPS = 4, 3


def planned(job: Job, stages: int, strategy: str) -> Plan:
    how = {"cluster": f"{stages} x v100-16", "planner": strategy, "captured": capture_of(job)}
    return plan(job, ranks=stages, microbatches=4, microbatch_size=2, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of each small model, trained on processes over gloo by a plan of `graphpipe`."""
    plans = {name: planned(small_job(name), RANKS, "graphpipe") for name in graphpipe.SMALL}
    file = tmp_path_factory.mktemp("gloo") / "losses.json"
    assert launch(train_each, RANKS, args=(plans, STEPS, file)) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(graphpipe.SMALL))
def test_planned_stages_on_real_processes_train_as_one_process(
    name: str, trained: dict[str, list[float]]
) -> None:
    job = small_job(name)
    batches = [job.batch(seed, 8) for seed in range(STEPS)]
    assert trained[name] == pytest.approx(plain(job, batches, 4).losses, rel=TOLERANCE)
    assert len(set(trained[name])) == STEPS


def test_the_order_in_which_towers_run_changes_nothing() -> None:
    losses = []
    for name in ("mmt", "mmt_in_turn"):
        job = graphpipe.SMALL[name]()
        torch.manual_seed(0)
        losses.append(job.model()(**job.batch(1, 3))["loss"].item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", list(graphpipe.SMALL))
def test_data_follow_the_seed_and_fit_the_model(name: str) -> None:
    job = graphpipe.SMALL[name]()
    one, same, other = job.batch(1, 3), job.batch(1, 3), job.batch(2, 3)
    assert all(len(x) == 3 and torch.equal(x, same[key]) for key, x in one.items())
    assert any(not torch.equal(x, other[key]) for key, x in one.items())
    assert torch.isfinite(job.model()(**one)["loss"])


MEASURE = """
import graphpipe
from pipeloom import capture
for name, make in graphpipe.PUBLISHED.items():
    graph = capture(make(), 1).graph
    print(name, sum(p.bytes for p in graph.parameters), bool(graph.fallback))
# Not ru_maxrss, which begins with what the process held that started this one.
print("peak", next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_published_sizes_are_captured_without_their_weights() -> None:
    """In a process of its own, whose peak memory is far below the weights' 5 GB of the largest model."""
    paths = os.pathsep.join([str(Path(graphpipe.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    *models, (_, peak) = [line.split() for line in done.stdout.splitlines()]
    sizes = {name: int(size) for name, size, _ in models}
    assert set(sizes) == set(graphpipe.PUBLISHED) and all(fallback == "False" for *_, fallback in models)
    assert max(sizes.values()) == sizes["dlrm"] > 5e9 and int(peak) * 1024 < 1e9
    # 12 d^2 + 13 d parameters in a layer: four matrices of attention and two of 4 d, norms and biases.
    assert sizes["mmt"] == 4 * (32 * (12 * 1024**2 + 13 * 1024) + 4096 * 1000 + 1000)

"""The op graph of a model that is cut between its modules."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from odd.case import CLASSES, WIDTH, Block, job
from odd.decisions import (
    JOBS,
    Branches,
    BranchInBlock,
    Dropping,
    LeavesOutByPython,
    LeftInAList,
    PartlyFrozen,
    PlainTensors,
)
from runs import capture_of
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir import json_codec
from pipeloom.ir.errors import CaptureError, CutError, PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.stages import cut
from pipeloom.planner.make_plan import make_plan
from pipeloom.profiler.roofline import roofline
from pipeloom.tracer.capture import capture
from pipeloom.tracer.fallback.trial import TrialParameters


def picture(graph: OpGraph) -> str:
    """One line per op: what it reads -> what it makes."""
    rows = [f"{op.name}: {' '.join(op.inputs)} -> {' '.join(v.name for v in op.outputs)}" for op in graph.ops]
    return "\n".join(rows)


def test_the_reason_is_kept_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        captured = capture(JOBS["branch in blocks"], 2)
    (record,) = [r for r in caplog.records if r.name == "pipeloom"]
    assert record.getMessage() == f"{captured.graph.fallback}; cutting between its modules instead"
    assert captured.graph.fallback.startswith(
        "torch.export cannot capture BranchInBlock: GuardOnDataDependentSymNode: Could not guard on data"
    )
    assert captured.cut is not None and not captured.module.graph.find_nodes(op="placeholder")


def test_a_failed_export_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    capture(JOBS["branch in blocks"], 2)
    out, err = capfd.readouterr()
    assert out == "" and "def forward" not in err


def test_residual_sums_belong_to_the_module_they_follow() -> None:
    assert (
        picture(capture_of(JOBS["tied in glue"]).graph)
        == """\
embed: ids -> embed/0
blocks.0: embed/0 -> blocks.0/2
blocks.1: blocks.0/2 -> blocks.1/2
blocks.2: blocks.1/2 -> blocks.2/2
blocks.3: blocks.2/2 -> blocks.3/2
norm: blocks.3/2 labels -> =loss"""
    )
    graph = capture_of(JOBS["tied in glue"]).graph
    assert graph.op["embed"].params == ("position", "embed.weight")
    assert set(graph.op["norm"].params) == {"embed.weight", "scale", "norm.weight", "norm.bias"}
    assert graph.op["embed"].target == "module:embed" and graph.op["embed"].module == "embed"


def test_values_skip_over_modules_and_a_module_called_twice_is_two_ops() -> None:
    graph = capture_of(JOBS["skips"]).graph
    assert (
        picture(graph)
        == """\
inlet: x -> inlet inlet/1
shared: inlet -> shared
blocks.0: shared -> blocks.0
blocks.1: blocks.0 -> blocks.1
blocks.2: blocks.1 -> blocks.2
shared#1: blocks.2 inlet/1 -> shared#1/0
mix: inlet shared#1/0 -> mix/0
head: mix/0 y -> =loss"""
    )
    assert graph.op["shared"].params == graph.op["shared#1"].params == ("shared.weight", "shared.bias")
    assert not graph.value["inlet/1"].needs_grad and graph.value["inlet/1"].dtype == "int64"
    stages = cut(graph, {op.name: index // 4 for index, op in enumerate(graph.ops)})
    assert stages.tied == {"shared.weight": (0, 1), "shared.bias": (0, 1)}


def test_independent_branches_stay_independent() -> None:
    assert (
        picture(capture_of(job(Branches)).graph)
        == """\
a: x -> a
b: x -> b
c: b -> c
head: c a y -> =loss"""
    )


def test_decisions_between_modules_go_along() -> None:
    graph = capture_of(JOBS["branch between blocks"]).graph
    assert (
        picture(graph)
        == """\
first: x -> first/2 path:first
positive: first/2 path:first -> positive path:positive
last: positive path:positive -> last path:last
head: last y path:last -> =loss"""
    )
    assert not graph.value["path:first"].needs_grad
    positive = graph.op["positive"]
    assert {"positive.norm.weight", "negative.norm.weight"} <= set(positive.params)  # not called: goes along
    assert positive.target == "modules:positive,negative"


def test_buffers_and_random_modules_are_marked() -> None:
    graph = capture_of(JOBS["batch norm"]).graph
    updates = {op.name: op.updates for op in graph.ops if op.updates}
    assert updates == {
        "body.1": ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
        "body.4": ("body.4.running_mean", "body.4.running_var", "body.4.num_batches_tracked"),
        "body.5": ("seen",),
    }
    random = [op.name for op in capture_of(job(Dropping)).graph.ops if op.random]
    assert random == ["layers.0.1", "layers.1.1", "layers.3.1"]  # a third layer was left out


def test_plain_tensors_are_buffers_without_a_place_in_checkpoints() -> None:
    graph = capture_of(job(PlainTensors)).graph
    kept = {b.name: b.persistent for b in graph.buffers}
    assert kept == {"mask": False, "slope": False, "table.0": False, "table.1": False}


def test_parameters_that_get_no_gradient_are_not_trained() -> None:
    graph = capture_of(job(PartlyFrozen)).graph
    trained = {p.name.split(".")[0] + p.name.split(".")[1] for p in graph.parameters if p.trainable}
    assert trained == {"blocks2", "headweight", "headbias"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
def test_graphs_serialise_and_are_the_same_every_time(name: str) -> None:
    graph = capture_of(JOBS[name]).graph
    assert json_codec.from_json(json_codec.to_json(graph), OpGraph, what="graph") == graph
    assert capture(replace(JOBS[name]), 2).graph == graph


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
def test_another_batch_size_gives_the_same_structure(name: str) -> None:
    captured = capture_of(JOBS[name])
    other = capture(JOBS[name], 3, like=captured)
    assert other.graph.fingerprint == captured.graph.fingerprint
    assert other.graph.fallback == captured.graph.fallback


def test_planners_work_on_modules() -> None:
    graph = capture_of(JOBS["branch in blocks"]).graph
    cluster = cpu_cluster(2)
    plan = make_plan(
        graph, roofline(graph, cluster.devices[0]), cluster, ranks=2, schedule="1f1b", microbatches=4
    )
    assert [op for stage in plan.stages for op in stage.ops] == [op.name for op in graph.ops]
    with pytest.raises(PlanError, match="6 stages for 5 ops"):
        make_plan(
            graph, roofline(graph, cluster.devices[0]), cluster, ranks=6, schedule="1f1b", microbatches=4
        )


def test_lists_of_modules_fix_the_cut() -> None:
    lists = [["blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "head"]]
    graph = capture(job(BranchInBlock, modules=lists), 2).graph
    assert (
        picture(graph)
        == """\
blocks.0: x -> blocks.0
blocks.1+blocks.2: blocks.0 -> blocks.2
blocks.3+head: blocks.2 y -> =loss"""
    )
    assert graph.fallback == "Job.modules says where to cut"


def test_modules_outside_all_lists_run_where_they_are_called() -> None:
    graph = capture(job(BranchInBlock, modules=[["blocks.1"], ["head"]]), 2).graph
    assert {p.split(".")[1] for p in graph.op["blocks.1"].params} == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            [["blocks.0", "blocks.2"], ["blocks.1", "blocks.3", "head"]],
            "blocks.0+blocks.2 reads blocks.1, which a later list of Job.modules makes",
        ),
        (
            [["blocks"], ["head"], ["unused"]],
            "the forward calls none of unused, which Job.modules puts into one stage",
        ),
    ],
)
def test_lists_that_cannot_be(lists: list[list[str]], message: str) -> None:
    class Model(BranchInBlock):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    with pytest.raises(CutError) as caught:
        capture(job(Model, modules=lists), 2)
    assert caught.value.message == message


def test_lists_that_tear_apart_what_other_stages_cannot_see() -> None:
    lists = [["inlet", "blocks.0"], ["blocks.1", "blocks.2", "head"]]
    with pytest.raises(CutError) as caught:
        capture(job(LeftInAList, modules=lists), 2)
    assert caught.value.message == (
        "Job.modules puts blocks.0 and blocks.1 into two stages, but the forward uses a tensor that blocks.0 "
        "neither returns nor keeps as an attribute"
    )


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH + 1, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(x), y)}


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x)


def test_a_forward_that_fails_is_reported_with_both_reasons() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(job(Broken), 2)
    assert "torch.export cannot capture Broken: RuntimeError" in caught.value.message
    assert "; and as modules: the forward of Broken fails: RuntimeError: mat1 and" in caught.value.message
    assert "in plain PyTorch" in str(caught.value.hint)


def test_a_missing_loss_is_reported_once() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(job(NoLoss), 2)
    assert caught.value.message == "the loss of NoLoss must be a scalar tensor, got NoneType"


def test_a_few_modules_at_a_time_are_made_for_a_recorded_run() -> None:
    """Modules that look at data are recorded on real parameters, and never on all of them at once."""
    module_cut = capture(JOBS["branch in blocks"], 2).cut
    assert module_cut is not None
    skeleton = module_cut.skeleton
    whole = sum(skeleton.resting(name).nbytes for name in skeleton.params)
    parameters = TrialParameters(skeleton, torch.device("cpu"), limit_bytes=4 * 300)
    sizes = []
    for unit in skeleton.units:
        parameters.state(skeleton.below(unit))
        sizes.append(parameters.loaded_bytes)
    assert len(set(sizes)) > 1 and 0 < max(sizes) < whole * 0.7


def test_a_model_that_never_looks_at_data_is_recorded_on_fake_tensors() -> None:
    """A model of 40 GB is captured as modules without memory."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(50_000, 50_000, bias=False) for _ in range(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return (x - y).square().mean()

    def batch(seed: int, size: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(size, 50_000), "y": torch.zeros(size, 50_000)}

    large = Job(model=Large, batch=batch, modules=[["layers.0", "layers.1"], ["layers.2", "layers.3"]])
    graph = capture(large, 1).graph
    assert sum(p.bytes for p in graph.parameters) == 4 * 50_000**2 * 4
    assert [len(op.params) for op in graph.ops] == [2, 2]


def test_random_numbers_of_python_are_not_frozen() -> None:
    """Export would leave out the same layers in every step."""

    class Exportable(LeavesOutByPython):
        block = Block

    graph = capture(job(Exportable), 2).graph
    assert graph.fallback == "the forward of Exportable draws random numbers that export would freeze"

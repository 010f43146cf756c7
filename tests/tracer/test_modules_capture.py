"""The op graph of a model that is cut between its modules, and between which."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from odd.case import Between, Deciding, job
from odd.control_flow import JOBS, Branches, LeavesOut, LeftInAList, PartlyFrozen, PlainTensors
from runs import capture_of
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.errors import CutError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.stages import cut
from pipeloom.ir.text import from_json, to_json
from pipeloom.tracer.capture import capture
from pipeloom.tracer.modules.skeleton import TrialParameters
from pipeloom.tracer.modules.units import derive_units, listed_units


def picture(graph: OpGraph) -> str:
    """One line per op: what it reads -> what it makes."""
    made = {op.name: " ".join(value.name for value in op.outputs) for op in graph.ops}
    return "".join(f"{op.name}: {' '.join(op.inputs)} -> {made[op.name]}\n" for op in graph.ops)


def test_the_reason_is_kept_and_logged_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is printed."""
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        captured = capture(JOBS["branch in blocks"], 2)
        capture(JOBS["branch in blocks"], 2)
    (record,) = [r for r in caplog.records if r.name == "pipeloom"]
    assert record.getMessage() == f"{captured.graph.fallback}; cutting between its modules instead"
    assert "Between: GuardOnDataDependentSymNode" in captured.graph.fallback
    out, err = capfd.readouterr()
    assert out == "" and "def forward" not in err
    assert captured.cut is not None and not captured.module.graph.find_nodes(op="placeholder")


PICTURES = {
    "tied in glue": """\
inlet: ids -> blocks.0<0
blocks.0: blocks.0<0 -> blocks.1<0
blocks.1: blocks.1<0 -> blocks.2<0
blocks.2: blocks.2<0 -> head<0
head: head<0 labels -> =loss
""",
    "skips": """\
inlet: x -> shared<0 inlet
shared: shared<0 -> blocks.0<0
blocks.0: blocks.0<0 -> blocks.1<0
blocks.1: blocks.1<0 -> blocks.2<0
blocks.2: blocks.2<0 -> shared#1<0
shared#1: shared#1<0 inlet -> mix<0
mix: shared<0 mix<0 -> head<0
head: head<0 y -> =loss
""",
    "branch between blocks": """\
inlet: x -> blocks.1<0 path:inlet
blocks.1: blocks.1<0 path:inlet -> blocks.2<0 path:blocks.1
blocks.2: blocks.2<0 path:blocks.1 -> head<0 path:blocks.2
head: head<0 y path:blocks.2 -> =loss
""",
    "independent branches": """\
inlet: x -> blocks.0<0
blocks.0: blocks.0<0 -> blocks.0
blocks.1: blocks.0<0 -> blocks.2<0
blocks.2: blocks.2<0 -> blocks.2
head: blocks.0 blocks.2 y -> =loss
""",
    "lists of modules": """\
inlet: x -> blocks.0<0
blocks.0+blocks.1: blocks.0<0 -> blocks.2<0
blocks.2+head: blocks.2<0 y -> =loss
""",
}
"""Sums belong to the module that they follow, values skip over modules, a module that is called twice is two
ops, branches stay independent, and decisions between modules go along."""

LISTS = [["inlet"], ["blocks.0", "blocks.1"], ["blocks.2", "head"]]
FURTHER = {"independent branches": job(Branches), "lists of modules": job(Between, modules=LISTS)}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    assert picture(capture_of((JOBS | FURTHER)[name]).graph) == PICTURES[name]


def test_parameters_belong_to_the_op_that_reads_them() -> None:
    graph = capture_of(JOBS["tied in glue"]).graph
    inlet = graph.op["inlet"]
    assert set(inlet.params) == {"position", "inlet.weight"}
    assert set(graph.op["head"].params) == {"inlet.weight", "scale", "head.weight", "head.bias"}
    assert inlet.target == "module:inlet" and inlet.module == "inlet"
    graph = capture_of(JOBS["skips"]).graph
    assert graph.op["shared"].params == graph.op["shared#1"].params == ("shared.weight", "shared.bias")
    stages = cut(graph, {op.name: index // 4 for index, op in enumerate(graph.ops)})
    assert stages.tied == {"shared.weight": (0, 1), "shared.bias": (0, 1)}


def test_buffers_and_random_modules_are_marked() -> None:
    graph = capture_of(JOBS["batch norm"]).graph
    updates = {op.name: op.updates for op in graph.ops if op.updates}
    assert updates == {
        "body.1": ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
        "body.4": ("body.4.running_mean", "body.4.running_var", "body.4.num_batches_tracked"),
        "body.5": ("seen",),
    }
    random = [op.name for op in capture_of(job(LeavesOut)).graph.ops if op.random]
    assert random == ["inlet", "blocks.2.1"]  # the other blocks were left out


class Observes(Between):
    """Its blocks count in evaluation mode, too, as observers of a quantized model do."""

    class block(Deciding):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)


def test_buffers_that_evaluation_leaves_as_they_are_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        capture(JOBS["batch norm"], 2)  # which does not
        assert "evaluation" not in caplog.text
        capture(job(Observes), 2)
    assert "blocks.0.seen and 2 more in evaluation mode" in caplog.text


def test_plain_tensors_are_buffers_without_a_place_in_checkpoints() -> None:
    graph = capture_of(job(PlainTensors)).graph
    kept = {b.name: b.persistent for b in graph.buffers}
    assert kept == {"mask": False, "slope": False, "table.0": False, "table.1": False}


def test_parameters_that_get_no_gradient_are_not_trained() -> None:
    graph = capture_of(job(PartlyFrozen)).graph
    trained = {p.name.split(".")[0] + p.name.split(".")[1] for p in graph.parameters if p.trainable}
    assert trained == {"blocks2", "headweight", "headbias"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOBS)
def test_graphs_serialise_and_are_the_same_every_time(name: str) -> None:
    """And with another batch size."""
    captured = capture_of(JOBS[name])
    graph, other = captured.graph, capture(JOBS[name], 3, like=captured).graph
    assert from_json(to_json(graph), OpGraph, what="graph") == graph
    assert capture(replace(JOBS[name]), 2).graph == graph
    assert (other.fingerprint, other.fallback) == (graph.fingerprint, graph.fallback)


def test_modules_outside_all_lists_run_where_they_are_called() -> None:
    graph = capture(job(Between, modules=[["blocks.1"], ["head"]]), 2).graph
    apart = {f"blocks.{n}.norm.weight" for n in range(3)}
    assert {"inlet.weight", *apart} <= {*graph.op["blocks.1"].params}
    assert graph.fallback == "Job.modules says where to cut"


class WithUnused(Between):
    def prepare(self) -> None:
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "lists", "words"),
    [
        (
            WithUnused,
            [["inlet", "blocks.0", "blocks.2"], ["blocks.1", "head"]],
            r"inlet\+.*blocks.2 reads what blocks.1 makes, which is in a later",
        ),
        (WithUnused, [["inlet", "blocks"], ["head"], ["unused"]], "calls none of unused"),
        # Other stages cannot see what a module leaves in a list.
        (
            LeftInAList,
            [["inlet", "blocks.0"], ["blocks.1", "blocks.2", "head"]],
            "blocks.0 and blocks.1 into two stages",
        ),
    ],
)
def test_lists_that_cannot_be(model: type[nn.Module], lists: list[list[str]], words: str) -> None:
    with pytest.raises(CutError, match=words):
        capture(job(model, modules=lists), 2)


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
        sizes.append(sum(tensor.nbytes for tensor in parameters._loaded.values()))
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


def small() -> nn.Module:
    model = nn.Module()
    model.stem = model.again = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.trunk = nn.Module()
    model.trunk.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    model.trunk.more = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.trunk.norm = nn.LayerNorm(4)
    model.neck = nn.Module()
    model.neck.parts = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model.heads = nn.ModuleDict({"left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})
    model.empty = nn.ModuleList()
    return model


def test_containers_are_replaced_by_their_items_and_large_trunks_opened() -> None:
    assert derive_units(small()) == (
        "stem.0",
        "stem.1",
        "trunk.layers.0",
        "trunk.layers.1",
        "trunk.more.0",
        "trunk.more.1",
        "trunk.norm",
        "neck",
        "heads.left",
        "heads.right",
        "empty",
    )
    assert "trunk" in derive_units(small(), frozenset({"trunk"}))


def test_lists_may_name_containers() -> None:
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    assert listed_units(Between(), [["inlet", "blocks"], ["head"]]) == (("inlet", *blocks), ("head",))


@pytest.mark.parametrize(
    ("lists", "word"),
    [
        ([["blocks.0", "block.1"], ["head"]], "did you mean blocks.1?"),
        ([["blocks.0", "blocks.0"], ["head"]], "blocks.0 twice"),
        ([["blocks.0", "blocks.0.net"], ["head"]], "inside it, blocks.0.net"),
        ([[], ["head"]], "list 0 .* names no module"),
    ],
)
def test_wrong_lists_are_refused(lists: Sequence[Sequence[str]], word: str) -> None:
    with pytest.raises(CutError, match=word) as caught:
        listed_units(Between(), lists)
    assert caught.value.hint

"""The captured graph as data: names, wiring, flags, and the same text everywhere."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace

import nets
import pytest
import torch
from odd.case import CLASSES, WIDTH, Deciding, Scores, Stack, job, vectors
from odd.values import AlphaDropout
from processes import output
from runs import capture_of, even, plan_for
from torch import Tensor, nn

from pipeloom import Job, Pipeline
from pipeloom.ir.errors import CaptureError, CutError
from pipeloom.ir.graph import OpGraph, tensor_bytes
from pipeloom.ir.stages import cut
from pipeloom.ir.text import from_json, to_json
from pipeloom.tracer.capture import capture
from pipeloom.tracer.evaluation import capture_evaluation, cut_alike
from pipeloom.tracer.guards import attributes_kept
from pipeloom.tracer.job_calls import evaluation_mode, scalar_loss

QUICK = ("gpt", "frozen", "no_grad_branch", "tied_thrice", "counting", "convnet")


def graph_of(name: str) -> OpGraph:
    return capture_of(nets.job(name)).graph


@pytest.mark.sampled(*QUICK)
@pytest.mark.parametrize("name", nets.NAMES)
def test_wiring_is_whole(name: str) -> None:
    """Ops are in an order in which they can run, and everything they name exists. What is cheap has no
    history of gradients, parameters or chance."""
    graph = graph_of(name)
    assert from_json(to_json(graph), OpGraph, what="text") == graph and not graph.fallback
    updated = {b for op in graph.ops for b in op.updates}
    known = {value.name for value in graph.inputs}
    for op in graph.ops:
        assert known.issuperset(op.inputs), op.name
        assert {p.name for p in graph.parameters}.issuperset(op.params)
        assert {b.name for b in graph.buffers}.issuperset({*op.buffers, *op.updates})
        known |= {value.name for value in op.outputs}
        if op.cheap:
            assert not op.params and not op.random and not updated.intersection(op.buffers)
            assert not any(value.needs_grad for value in op.outputs)
            assert all(graph.op[graph.producer[n]].cheap for n in op.inputs if n in graph.producer)
    assert graph.loss in known and graph.value[graph.loss].shape == ()
    assert len(known) == len(graph.inputs) + sum(len(op.outputs) for op in graph.ops)


@pytest.mark.sampled(*QUICK)
@pytest.mark.parametrize("name", nets.NAMES)
def test_names_and_gradients_are_those_of_the_module(name: str) -> None:
    graph, model = graph_of(name), nets.job(name).model()
    own, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    assert [(p.name, p.shape) for p in graph.parameters] == [(n, tuple(p.shape)) for n, p in own.items()]
    named = {n: own[p.name] for p in graph.parameters for n in (p.name, *p.aliases)}
    assert named.keys() == every.keys() and all(named[n] is p for n, p in every.items())
    assert {b.name for b in graph.buffers if b.persistent} == model.state_dict().keys() - every.keys()
    assert {op.module for op in graph.ops} <= {n for n, _ in model.named_modules()} | {""}
    scalar_loss(nets.job(name), model(**nets.job(name).batch(0, 2)), {}).backward()
    reached = {n for n, p in own.items() if p.grad is not None}
    assert {p.name for p in graph.parameters if p.trainable} == reached


@pytest.mark.sampled("two_encoders")
@pytest.mark.parametrize("name", nets.NAMES)
def test_the_fingerprint_does_not_depend_on_the_batch(name: str) -> None:
    job = nets.job(name)
    assert capture_of(job, 3).graph.fingerprint == graph_of(name).fingerprint
    if name in ("gpt", "gpt2", "bert", "llama", "mixtral"):
        longer = nets.token_batch(0, 2, length=nets.LENGTH + 4)
        assert capture(job, 2, batch=longer).graph.fingerprint == graph_of(name).fingerprint


IN_ANOTHER_PROCESS = """
import sys, nets
from pipeloom.tracer.capture import capture
from pipeloom.ir.text import to_json
for name in sys.argv[1:]:
    print(to_json(capture(nets.job(name), 2).graph, indent=0))
"""


@pytest.mark.slow
def test_every_process_captures_the_same_text() -> None:
    expected = [to_json(graph_of(name), indent=0) for name in nets.NAMES]
    said = output("-c", IN_ANOTHER_PROCESS, *nets.NAMES, env={"PYTHONHASHSEED": "77"})
    assert said.splitlines()[-len(nets.NAMES) :] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "mixtral"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_masks_and_rotary_tables_never_cross(name: str, stages: int) -> None:
    """What needs no gradient and is cheap is made again in each stage."""
    graph = graph_of(name)
    crossing = {c.value.name: c.value for c in cut(graph, even(graph, stages)).crossings}
    idle = [n for n, value in crossing.items() if not value.needs_grad]
    # what is left: indices that were computed from activations, as the choice of experts
    assert all(any(graph.op[graph.producer[n]].inputs for n in idle) for n in idle)
    if name != "mixtral":
        assert idle == []


def test_random_ops_are_marked() -> None:
    with_dropout = capture_of(nets.with_dropout("gpt")).graph
    assert sum(op.random for op in with_dropout.ops) == 6  # attention and MLP of three blocks
    assert not any(op.random for op in graph_of("gpt").ops)


def shared(chunks: Callable[[Tensor], Sequence[Tensor]]) -> nn.Module:
    """Its first two blocks have weights that are parts of one tensor."""
    model = Stack()
    parts = chunks(torch.randn(2 * WIDTH, 2 * WIDTH))
    for block, part in zip(model.blocks, parts, strict=False):
        block.net[2].weight = nn.Parameter(part)
    return model


def with_a_view() -> nn.Module:
    model = Stack()
    model.register_buffer("first", model.head.weight.detach()[0])
    return model


def with_views(inside: Callable[[Tensor], object]) -> nn.Module:
    model = Stack()
    model.views = inside(model.head.weight.detach())
    return model


def unrowed(seed: int, size: int) -> dict[str, Tensor]:
    return {"x": torch.tensor(1.0), "y": torch.zeros(size)}


def untensored(seed: int, size: int) -> dict[str, object]:
    return {"input_ids": [1, 2], "labels": None}


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nets.GPT, untensored, "'input_ids' is a list"),
        (lambda: nets.Skips().requires_grad_(False), nets.vector_batch, "no parameter .* gradient"),
        (Stack, unrowed, "'x' is a tensor without rows"),
        (
            partial(shared, lambda t: (t[:8], t[:8])),
            vectors,
            "blocks.0.net.2.weight and blocks.1.net.2.weight",
        ),
        (partial(shared, lambda t: (t[:8], t[7:15])), vectors, "same memory"),
        (with_a_view, vectors, "head.weight and first"),
        (partial(with_views, lambda view: view), vectors, "head.weight and views"),
        (partial(with_views, lambda view: {"rows": [view[:3]]}), vectors, "head.weight and views"),
    ],
)
def test_tensors_and_something_to_train_are_needed(model, batch, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Job(model=model, batch=batch), 2)


def test_a_module_with_a_view_is_refused_before_its_copy_has_none() -> None:
    with pytest.raises(CaptureError, match="head.weight and views"):
        Pipeline(with_views(lambda view: [view]), example=vectors(0, 2))


def test_weights_that_pytorch_makes_anew_may_be_views(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    nn.utils.spectral_norm(model.head)
    model.eval()
    capture(Job(model=lambda: copy.deepcopy(model), batch=vectors), 2)
    assert "is in evaluation mode" in caplog.text


def in_one_buffer() -> nn.Module:
    """Parameters and numbers of another size, one behind the other."""
    model, base = Stack(), torch.zeros(2 * WIDTH)
    model.blocks[0].net[2].bias = nn.Parameter(base[:WIDTH])
    model.register_buffer("counts", base[WIDTH:].view(torch.int16))
    return model


@pytest.mark.parametrize(
    "model", [partial(shared, lambda t: t.view(8, 32).chunk(2, 1)), in_one_buffer], ids=["columns", "sizes"]
)
def test_parameters_may_be_parts_of_one_tensor(model: Callable[[], nn.Module]) -> None:
    assert not capture(job(model), 2).graph.fallback


# Parameters that are not the model's.


def copies_of(net: nn.Module, loss: nn.Module) -> Job:
    """As `Pipeline` does with a module."""
    return Job(
        model=lambda: copy.deepcopy(net),
        batch=lambda seed, rows: {"x": torch.ones(rows, WIDTH)},
        loss=lambda output, batch: loss(output).square().mean(),
    )


def test_parameters_that_nothing_trains_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    net, teacher = Scores(), nn.Linear(WIDTH, WIDTH)
    net.blocks[0].register_forward_hook(lambda module, given, output: output + teacher(output.detach()))
    teacher.requires_grad_(False)
    capture(copies_of(net, nn.Softmax(1)), 2)
    assert "pipeloom" not in {record.name for record in caplog.records}
    teacher.requires_grad_(True)
    for each in (copies_of(net, nn.Softmax(1)), copies_of(Scores(), nn.Linear(CLASSES, 1))):
        caplog.clear()
        assert capture(each, 2).graph.fallback == ""
        assert "nothing trains them" in caplog.text and "test_capture.py" in caplog.text


def test_a_forward_that_uses_none_of_the_copy_is_refused() -> None:
    net = Scores()
    forward = net.forward
    net.forward = lambda x: forward(x) * 2
    with pytest.raises(CaptureError, match="no gradient for any parameter"):
        capture(copies_of(net, nn.Softmax(1)), 2)


# evaluate() is model.eval(): another capture, cut where training is.


def test_evaluation_updates_nothing_and_leaves_the_training_mode() -> None:
    counting = nets.job("counting")
    captured = capture(counting, 2)
    evaluated = capture_evaluation(counting, captured, counting.batch(0, 2))
    assert captured.blueprint.model.training and captured.blueprint.model.norm.training
    assert not any(op.updates for op in evaluated.graph.ops)
    assert not any(value.needs_grad for value in evaluated.graph.value.values())


class CountsEvaluations(Stack):
    def prepare(self) -> None:
        self.evaluations = 0

    def run(self, h: Tensor) -> Tensor:
        if not self.training:
            self.evaluations += 1
            h = h * self.evaluations
        return super().run(h)


class DrawsInEvaluation(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h if self.training else h * random.random())


class Merges(Stack):
    """As layers with adapters do, to evaluate faster."""

    def prepare(self) -> None:
        self.adapter = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        if self.merged == mode:
            self.inlet.weight.data += (-1 if mode else 1) * self.adapter.data
            self.merged = not mode
        return super().train(mode)

    def run(self, h: Tensor) -> Tensor:
        return super().run(h if self.merged else h + h @ self.adapter)


class MergesBetween(Merges):
    block = Deciding


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "word"),
    [(CountsEvaluations, "evaluations"), (DrawsInEvaluation, "random"), (Merges, r"inlet\.weight")],
)
def test_what_evaluation_alone_hands_on_is_refused(model: type[nn.Module], word: str) -> None:
    evaluated = job(model)
    captured = capture(evaluated, 2)
    with pytest.raises(CaptureError, match=word):
        capture_evaluation(evaluated, captured, evaluated.batch(0, 2))
    assert captured.blueprint.model.training


def test_weights_that_change_with_the_mode_are_refused_between_modules() -> None:
    with pytest.raises(CaptureError, match=r"inlet\.weight"):
        capture(job(MergesBetween), 2)


def test_what_a_mode_of_the_users_own_sets_is_set_back() -> None:
    class Scales(Stack):
        def train(self, mode: bool = True) -> nn.Module:
            self.scale = 2.0 if mode else 1.0
            return super().train(mode)

    model = Scales()
    with evaluation_mode(model):
        assert model.scale == 1.0
    assert model.scale == 2.0 and model.training


class CountsInEitherMode(Stack):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def run(self, h: Tensor) -> Tensor:
        self.count += 1
        return super().run(h - self.count)


def test_updates_that_evaluation_leaves_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    counts = job(CountsInEitherMode)
    capture_evaluation(counts, capture(counts, 2), counts.batch(0, 2))
    assert "changes count in evaluation mode" in caplog.text


def test_a_stage_that_only_trains() -> None:
    """There is no evaluation cut for a plan with a stage of dropout alone; it says which stage."""
    dropping = job(AlphaDropout)
    captured = capture(dropping, 2)
    evaluated = capture_evaluation(dropping, captured, dropping.batch(0, 2))
    names = [op.name for op in captured.graph.ops if not op.cheap]
    norm = names.index("layer_norm")
    stage_of = {name: min(at, 1) + (at >= norm) for at, name in enumerate(names)}
    stages = plan_for(captured, stage_of, microbatches=1, schedule="gpipe").stage_graph(captured.graph)
    with pytest.raises(CutError, match="stage 1 has nothing to do"):
        cut_alike(evaluated.graph, captured.graph, stages)


# Attributes of modules are put back after the forwards of a capture.


def test_attributes_are_put_back() -> None:
    layer = nn.Linear(2, 2)
    held = {"items": [1, {2}], "drawn": random.Random(0), "layer": layer}
    # Python's stack is less.
    layer.chain = reduce(lambda chain, _: SimpleNamespace(next=chain), range(400), None)
    layer.held, layer.name = held, "before"
    state = held["drawn"].getstate()
    with attributes_kept(layer):
        held["items"][1].add(3)
        held["items"].append(4)
        held["drawn"].random()
        held["more"] = layer.more = 5
        layer.name = "after"
    assert layer.held is held and held == {"items": [1, {2}], "drawn": held["drawn"], "layer": layer}
    assert held["drawn"].getstate() == state and layer.name == "before" and not hasattr(layer, "more")


# Whose a line of code is.


ASK = """
import torch
from pipeloom.ir.user_code import is_user_file
print(is_user_file(torch.__file__), is_user_file("a.py"))
"""


@pytest.mark.slow
def test_files_of_torch_are_not_the_users(tmp_path: Path) -> None:
    """In an environment behind a symbolic link, lines of torch were named as the user's."""
    (tmp_path / "packages").symlink_to(Path(torch.__file__).parents[1])
    path = os.pathsep.join([str(tmp_path / "packages"), *sys.path])
    assert output("-c", ASK, env={"PYTHONPATH": path}).split() == ["False", "True"]


def test_a_dtype_whose_bytes_are_not_known_is_said() -> None:
    with pytest.raises(CaptureError, match="quint4x2"):
        tensor_bytes((4, 8), "quint4x2")


class Listed(Stack):
    """Uses its weights by a list of them, too."""

    def prepare(self) -> None:
        self.listed = [self.head.weight]

    def run(self, h: Tensor) -> Tensor:
        return super().run(h * self.listed[0].sum())


def test_weights_in_a_list_of_a_given_module_are_the_models() -> None:
    with Pipeline(Listed(), example=vectors(0, 4), microbatches=2) as pipeline:
        before = pipeline.state_dict()["head.weight"]
        pipeline.step(vectors(0, 4))
        assert not torch.equal(before, pipeline.state_dict()["head.weight"])

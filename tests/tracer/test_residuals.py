"""What a stage keeps for its backward is, byte for byte, what eager autograd saves, and has the names that a
planner derives from graph and profile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import nets
import pytest
import torch
from batches import normal
from odd.control_flow import JOBS as ODD
from runs import capture_of, even
from torch import nn

from pipeloom import Job
from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import Treatment, residual_names
from pipeloom.ir.profile import Profile
from pipeloom.ir.stages import Stage, cut
from pipeloom.profiler.measure_ops import measure
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.job_calls import scalar_loss
from pipeloom.tracer.stage.trace import stage_functions


def eager(job: Job, batch: nets.Batch) -> Counter[int]:
    """Sizes of the storages that autograd saves, parameters, buffers and the batch left out."""
    torch.manual_seed(0)
    model = job.model()
    given = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *batch.values())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            found[storage._cdata] = storage  # alive, so that its number stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scalar_loss(job, model(**batch), batch)
    return Counter(storage.nbytes() for storage in found.values())


def ours(job: Job) -> Counter[int]:
    captured = capture_of(job)
    stages = cut(captured.graph, even(captured.graph, 1))
    return Counter(stage_functions(captured, stages, 0).residual_bytes.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*nets.OWN, "convnet"])
def test_the_same_tensors_are_kept(name: str) -> None:
    job = nets.job(name)
    assert ours(job) == eager(job, job.batch(0, 2))


@pytest.mark.sampled("tied modules")
@pytest.mark.parametrize("name", sorted(ODD.keys() - {"batch norm"}))
def test_stages_of_modules_keep_as_many_bytes(name: str) -> None:
    job = ODD[name]
    assert sum(ours(job).elements()) == sum(eager(job, job.batch(0, 2)).elements())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mixtral", "t5"])
def test_the_same_tensors_are_kept_with_padding(name: str) -> None:
    """Without padding Hugging Face leaves the mask out in eager mode, but not when traced: that would be
    a difference of theirs. Two masks of T5 are equal, and found so."""
    job = replace(nets.job(name), batch=nets.masked_token_batch)
    assert ours(job) + Counter([144] * (name == "t5")) == eager(job, job.batch(0, 2))


def test_dropout_of_probability_zero_keeps_nothing() -> None:
    def kept(between: nn.Module) -> Counter[int]:
        model = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), between, nn.Linear(8, 8))  # noqa: E731
        return ours(Job(model=model, batch=normal(input=(8,)), loss=lambda output, _: output.square().mean()))

    assert kept(nn.Dropout(0.0)) == kept(nn.Identity())


Sizes = dict[str, int]

NOT_SAID = {"mixtral": ("aten.cumsum.default",)}
"""Ops whose results are kept though no profile says so: a custom autograd function's own choice."""


def derived(captured: Captured, profile: Profile, stage: Stage) -> tuple[Sizes, Sizes]:
    """Residuals that are values, and the bytes of all further tensors of each op."""
    names = residual_names(captured.graph)
    inside = {*stage.ops, *stage.clones}
    values, further = {}, {}
    for op in (captured.graph.op[name] for name in inside):
        cost = profile.costs[op.name]
        for saved in cost.saves:
            if captured.graph.producer.get(saved) in inside and saved in names:
                values[names[saved]] = captured.graph.value[saved].bytes
        if cost.extra_saved_bytes:
            further[op.name] = cost.extra_saved_bytes
    return values, further


def excused(captured: Captured, residual: str, more: tuple[str, ...]) -> bool:
    """Whether it depends on the cut how this is named, so that no planner does: it is always kept."""
    graph = captured.graph
    op = graph.op[residual]
    read_by = (graph.op[reader].target for v in op.outputs for reader in graph.consumers[v.name])
    return op.target in ("aten.reshape.default", *more) or "aten.broadcast_tensors.default" in read_by


@pytest.mark.sampled("gpt")
@pytest.mark.parametrize("name", [*nets.OWN, *nets.FAMILIES])
def test_a_planner_names_what_the_stages_keep(name: str) -> None:
    captured = capture_of(nets.job(name))
    profile = measure(captured, budget_s=0.0)
    for count in (1, 3):
        graph = cut(captured.graph, even(captured.graph, count))
        for index, stage in enumerate(graph.stages):
            kept = stage_functions(captured, graph, index).residual_bytes
            values, further = derived(captured, profile, stage)
            assert values.items() <= kept.items()
            found: Counter[str] = Counter()
            for residual in kept.keys() - values.keys():
                op, _, number = residual.partition(".")
                if number and int(number) >= len(captured.graph.op[op].outputs):
                    found[op] += kept[residual]
                else:
                    assert excused(captured, residual, NOT_SAID.get(name, ())), residual
            assert found == further


def test_a_plan_may_name_what_another_devices_kernel_keeps() -> None:
    """Attention keeps the random state on some devices: one more result of the op, which is not here."""
    captured = capture_of(nets.job("gpt"))
    stages = cut(captured.graph, even(captured.graph, 1))
    names = stage_functions(captured, stages, 0).residual_bytes
    attention = next(name for name in names if name.startswith("scaled_dot_product_attention"))
    treatments: dict[str, Treatment] = {attention: "offload", f"{attention.partition('.')[0]}.7": "offload"}
    functions = stage_functions(captured, stages, 0, treatments=treatments)
    assert functions.offloaded >= {attention} and functions.residual_bytes == names
    for other in ("no_such_op", "no_such_op.7"):
        with pytest.raises(PlanError, match="name"):
            stage_functions(captured, stages, 0, treatments={other: "offload"})

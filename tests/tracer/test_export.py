"""What torch.export is asked for, and what it must leave as it was."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import nets
import pytest
import torch
from odd.case import WIDTH, Deciding, Stack, job
from odd.gradients import CheckpointedInside, FullBackwardHook, OwnGradient, Signed, tripled
from odd.state import NormTwice
from runs import assert_same, even_plan, pipelined, plain
from small import built
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.checks.schedules import forwards_in_order
from pipeloom.ir.errors import CutError, ScheduleError
from pipeloom.ir.stages import cut
from pipeloom.schedules import registry
from pipeloom.tracer.capture import capture
from pipeloom.tracer.evaluation import capture_evaluation


def test_what_is_watched_for_in_autograd_is_put_back() -> None:
    watched = torch.autograd.grad, Signed.apply
    assert "the gradient of Signed" in capture(job(OwnGradient), 2).graph.fallback
    assert (torch.autograd.grad, Signed.apply) == watched and Signed.apply(torch.ones(1)).item() == 2.0


KEPT: dict[str, Tensor | None] = {"late": None}


@cache
def scale() -> Tensor:
    return torch.linspace(0.5, 1.0, WIDTH)


class KeepsElsewhere(Stack):
    """In a function with a cache, and in a dictionary of its file."""

    def run(self, h: Tensor) -> Tensor:
        if KEPT["late"] is None:
            KEPT["late"] = torch.ones(WIDTH)
        return super().run(h * scale() + KEPT.setdefault("early", torch.ones(WIDTH)) + KEPT["late"])


class KeepsElsewhereBetween(KeepsElsewhere):
    block = Deciding


@pytest.mark.parametrize("model", [KeepsElsewhere, KeepsElsewhereBetween])
def test_tracing_leaves_no_tensors_in_caches(model: type[nn.Module]) -> None:
    """What a forward kept outside the model had no data in the next run: each ended in a traceback."""
    first = capture(job(model), 2)
    if not first.graph.fallback:  # between modules real tensors may stay
        assert KEPT == {"late": None} and not scale.cache_info().currsize
        capture_evaluation(job(model), first, job(model).batch(0, 2))
    assert capture(job(model), 2).graph.fingerprint == first.graph.fingerprint
    model()(**job(model).batch(0, 2))["loss"].backward()
    KEPT.update(late=None)
    del KEPT["early"]
    scale.cache_clear()


def test_a_capture_that_fails_in_a_checkpoint_leaves_no_hooks() -> None:
    """The next backward of the process then ran the failed capture's forward again (seen with torch 2.11)."""
    assert capture(job(CheckpointedInside), 2).graph.fallback
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Uncast(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inlet(h.float())


class UncastAndStopped(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            factor = self.inlet(h.float())
        return h * factor


class AsksForAutocast(Stack):
    def run(self, h: Tensor) -> Tensor:
        return h * 2 if torch.is_autocast_enabled("cpu") else h


@pytest.mark.sampled(2)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "made",
    [*map(job, (Uncast, UncastAndStopped, AsksForAutocast)), nets.job("frozen")],
    ids=lambda made: made.name,
)
def test_autocast_switched_off_or_asked_for(made: Job, autocast: torch.dtype | None) -> None:
    """Export knew nothing of the autocast around it, and forgets `no_grad` inside one; a stage without
    gradients ran without autocast."""
    batches = [made.batch(1, 4)]
    stages = 99 if made.name == "frozen" else 1  # that is, one for each op
    plan = even_plan(made, stages, microbatches=2, autocast=autocast)
    found = pipelined(made, plan, batches, autocast=autocast)
    assert_same(found, plain(made, batches, 2, autocast=autocast), tolerance=1e-6)


# Hooks on modules, where a cut goes. Those of the zoo are in `tests/support/odd/gradients.py`.


def test_a_cut_through_a_module_with_a_hook_is_refused() -> None:
    lists = [["inlet", "blocks.0", "blocks.1.norm"], ["blocks.1.net", "blocks.2", "head"]]
    with pytest.raises(CutError, match="cuts blocks.1, which has a hook by register_full_backward_hook"):
        capture(replace(job(FullBackwardHook), modules=lists), 2)


@pytest.fixture
def hook_on_all_modules() -> Iterator[None]:
    def scaled(module: nn.Module, inner: Any, outer: Any) -> Any:
        return tripled(inner)

    handle = nn.modules.module.register_module_full_backward_hook(scaled)
    yield
    handle.remove()


def test_a_hook_for_all_modules_leaves_the_model_whole(hook_on_all_modules: None) -> None:
    captured = capture(job(Stack), 2)
    assert [op.name for op in captured.graph.ops] == ["model"]
    assert "register_module_full_backward_hook" in captured.graph.fallback


# Buffers that the forward changes: where a model can be cut, and in which order its forwards may run.


TWICE = job(NormTwice)


def test_a_norm_used_twice_cannot_be_torn_apart() -> None:
    graph = capture(TWICE, 2).graph
    names = [op.name for op in graph.ops if not op.cheap]
    with pytest.raises(CutError, match="buffer norm.* is updated"):
        cut(graph, {name: index * 3 // len(names) for index, name in enumerate(names)})


def test_micro_batches_in_another_order_are_refused_where_a_forward_updates_buffers() -> None:
    plan = even_plan(TWICE, 1, microbatches=2, schedule="gpipe")
    swapped = replace(plan, schedule_rows=("0F1 0F0 0B0 0B1",))
    with pytest.raises(ScheduleError, match="0F0 after 0F1, but stage 0 updates norm.") as caught:
        pipelined(TWICE, swapped, [TWICE.batch(0, 4)])
    assert "in the order of their micro-batches" in str(caught.value.hint)


def test_all_schedules_of_the_library_run_forwards_in_order() -> None:
    for name in registry.names():
        made = built(name, 4, 8)
        forwards_in_order(made, dict.fromkeys(range(made.stages), "buffer"))

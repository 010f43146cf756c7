"""The functions of a stage of modules: pure to the outside, exact in memory, loud when they cannot be."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from odd.case import Between, Deciding, job
from odd.control_flow import JOBS, LeavesOut
from runs import Sums, capture_of, even, even_plan, pipelined
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.errors import CaptureError, CutError
from pipeloom.ir.graph import Value
from pipeloom.ir.stages import cut
from pipeloom.tracer.capture import capture
from pipeloom.tracer.modules.functions import ModuleFunctions
from pipeloom.tracer.modules.path import ForwardPath, encode_path
from pipeloom.tracer.stage.functions import activation_bytes
from pipeloom.tracer.stage.trace import stage_functions


def stages_of(made: Job, count: int) -> tuple[list[ModuleFunctions], dict[str, Tensor]]:
    captured = capture_of(made)
    stages = cut(captured.graph, even(captured.graph, count))
    functions = [stage_functions(captured, stages, index) for index in range(count)]
    assert all(isinstance(f, ModuleFunctions) for f in functions)
    names = {n for f in functions for n in (*f.params, *f.buffers)} - captured.constants.keys()
    return functions, captured.blueprint.materialise(0, sorted(names)) | dict(captured.constants)  # type: ignore[return-value]


def chain(
    functions: Sequence[ModuleFunctions], state: dict[str, Tensor], batch: dict[str, Tensor], seed: int = 0
) -> tuple[dict[str, Tensor], list[Any]]:
    values, residuals = dict(batch), []
    for stage in functions:
        outputs, kept = stage.forward(state, values, seed)
        values |= outputs
        residuals.append(kept)
    return values, residuals


def storages(tensors: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors}


def test_residuals_are_freed_by_the_backward() -> None:
    made = JOBS["tied modules"]
    functions, state = stages_of(made, 2)
    values, (first, last) = chain(functions, state, made.batch(0, 2))
    for stage, kept in zip(functions, (first, last), strict=True):  # known before the first step
        assert sum(stage.residual_bytes.values()) == activation_bytes(kept)
    gc.collect()
    gc.disable()  # nothing may depend on the collector
    try:
        alive = [weakref.ref(t.untyped_storage()) for slot, t in last.items() if slot.kind == "residual"]
        grads = functions[1].backward(state, last, {functions[1].loss or "": torch.ones(())}, Sums())
        values.clear()
        assert not last and not any(ref() for ref in alive)
        alive = [weakref.ref(t.untyped_storage()) for slot, t in first.items() if slot.kind == "residual"]
        _, carried = functions[0].backward_input(state, first, grads)
        assert not first and activation_bytes(carried) > 0
        functions[0].backward_weight(state, carried, Sums())
        assert not carried and not any(ref() for ref in alive)
    finally:
        gc.enable()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
def test_nothing_given_is_changed_and_nothing_made_is_shared(name: str) -> None:
    made = JOBS[name]
    functions, state = stages_of(made, 2)
    values = made.batch(1, 2)
    for stage in functions:
        given = {**state, **values}
        before = {n: t.clone() for n, t in given.items()}
        outputs, residuals = stage.forward(state, values, 0)
        evaluated = stage.evaluate(state, values)
        assert all(torch.equal(t, before[n]) for n, t in given.items())
        for made_here in (outputs, evaluated):
            sent = [t for n, t in made_here.items() if not n.startswith("buffer:")]
            assert not storages(sent) & storages(given.values()) and len(storages(sent)) == len(sent)
            assert all(t.is_contiguous() and not t.requires_grad for t in made_here.values())
        assert not any(n.startswith("buffer:") for n in evaluated)
        values = values | {n: t for n, t in outputs.items() if not n.startswith("buffer:")}
        residuals.clear()


def test_evaluation_leaves_every_module_in_its_mode() -> None:
    class Mixed(LeavesOut):
        def prepare(self) -> None:
            self.blocks[1].eval()

    made = job(Mixed)
    functions, state = stages_of(made, 2)
    model = functions[0].skeleton.model
    modes = [module.training for module in model.modules()]
    values = made.batch(0, 2)
    for stage in functions:
        values |= stage.evaluate(state, values)
    assert [module.training for module in model.modules()] == modes and not all(modes) and any(modes)


def test_random_numbers_come_from_the_seed_alone() -> None:
    made = job(LeavesOut)
    functions, state = stages_of(made, 2)
    loss = functions[1].loss or ""
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    losses = [float(chain(functions, state, made.batch(0, 2), seed)[0][loss]) for seed in (1, 1, 2, 3)]
    assert torch.equal(torch.get_rng_state(), untouched)
    assert losses[0] == losses[1] and len(set(losses)) == 3


class Shortens(Between):
    """The size of what a module returns depends on data."""

    class block(Deciding):
        def forward(self, x: Tensor) -> Tensor:
            rows = 1 + int(x[0, 0].abs().item() * 1000) % x.shape[0]
            return super().forward(x)[:rows]

    def run(self, h: Tensor) -> Tensor:
        return super().run(h).mean(0, keepdim=True).expand(h.shape[0], -1)


class Secretive(Between):
    """Which block is called depends on what a module remembers."""

    class block(Deciding):
        second = False

        def forward(self, x: Tensor) -> Tensor:
            self.second = not self.second
            return super().forward(x)

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        return self.blocks[1](h) if self.blocks[0].second else self.blocks[2](h)


def run(model: Callable[[], nn.Module], stages: int) -> None:
    made = job(model)
    pipelined(made, even_plan(made, stages, microbatches=4), [made.batch(seed, 8) for seed in range(3)])


def test_a_value_whose_size_depends_on_data_cannot_cross() -> None:
    run(Shortens, 1)
    with pytest.raises(CutError) as caught:
        run(Shortens, 3)
    assert " is float32[" in caught.value.message
    assert "when captured: a tensor whose size depends on data cannot be sent" in caught.value.message


def test_decisions_that_only_one_stage_knows_are_refused() -> None:
    refused = r"blocks.0 \(block\) changes its attribute second, and code between modules reads it \(.*:\d+\)"
    with pytest.raises(CaptureError, match=refused):
        capture(job(Secretive), 2)


def test_too_many_decisions_for_the_plan() -> None:
    value = Value(name="path:a", shape=(4,), dtype="float64")
    with pytest.raises(CutError, match="took 2 decisions and 1 calls between modules, the plan has room for"):
        encode_path(ForwardPath([0.0, 1.0], [3]), value, torch.device("cpu"))


def test_a_tensor_changed_before_its_backward_is_noticed() -> None:
    """Hooks on saved tensors switch PyTorch's own check off."""

    class Careless(Between):
        def run(self, h: Tensor) -> Tensor:
            h = self.blocks[0](h).sigmoid()
            kept = self.blocks[1](h)
            h.mul_(2)
            return self.blocks[2](kept)

    with pytest.raises(RuntimeError, match="that the backward needs was changed in place"):
        run(Careless, 1)

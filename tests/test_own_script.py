"""A pipeline as a training script makes one: from a model, a batch of its loader, a loss and an optimizer."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pipeloom
from pipeloom.ir.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ConfigError,
    NumbersError,
    PipeloomError,
    PlanError,
)
from pipeloom.pipeline_request import pipeline_settings
from pipeloom.run_options import Options
from pipeloom.runtime.channel import run_threads
from pipeloom.tracer.evaluation import capture_evaluation
from pipeloom.tracer.example import job_of

ROWS = 8
TWO = {"ranks": 2, "microbatches": 4, "microbatch_size": 2, "cluster": "2 x a100-40"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.hidden, self.leave = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = torch.tanh(self.hidden(self.norm(self.enter(x))))
        return {"logits": self.leave(hidden) * scale, "hidden": hidden, "norm": hidden.norm()}


class Shares(Net):
    """One buffer lies in another; a normalisation is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.ones(16))
        self.register_buffer("some", self.all[:6])
        self.first = nn.BatchNorm1d(6)
        self.second = self.first

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(self.second(self.first(x).tanh()) * self.some, scale=self.all.mean())


class Squeezes(Net):
    """One output has rows in micro-batches of several rows only; and an attribute that a loss may read."""

    extra = 0.0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        outputs = super().forward(x)
        self.extra = outputs["hidden"].square().mean()
        return {**outputs, "norm": outputs["logits"][:, :1].squeeze()}


class Attributes(Net):
    """Its outputs are attributes, as of a dataclass."""

    def forward(self, x: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(**super().forward(x))


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)["logits"]


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return kind()


NET = net()
"""What pipelines have copies of: it is captured once."""


@cache
def named() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    return {"x": x, "y": torch.arange(ROWS) % 3, "nothing": None}


def of_named(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], batch["y"])


def decayed(named_parameters: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    matrices = {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.3}
    return torch.optim.SGD([matrices, {"params": [p for n, p in named if "norm" in n]}], lr=0.5, momentum=0.5)


def alone(model: nn.Module = NET, **how: Any) -> pipeloom.Pipeline:
    usual = {"example": named(), "loss": of_named, "microbatches": 2, "compare": False}
    return pipeloom.Pipeline(model, **usual | how)


def on_two_ranks(work, model, example, *, optimizer=decayed, loss=of_named, **how) -> list[Any]:
    job, _ = job_of(model, example, loss=loss, optimizer=optimizer)
    plan = pipeloom.plan(job, **TWO)

    def rank(number: int, channel: Any) -> Any:
        given = {"example": example, "loss": loss, "optimizer": optimizer, "channel": channel} | how
        with pipeloom.Pipeline(model, plan, compare=False, **given) as pipe:
            return work(pipe)

    return run_threads(2, rank)


def plain_losses(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> list[float]:
    losses, optimizer = [], decayed(model.named_parameters())
    for batch in batches:
        loss = of_named(model(batch["x"]), batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_module_with_its_weights_trains_as_in_one_process() -> None:
    """The optimizer groups parameters by name; `y` is the loss's, as the forward has no such argument."""
    pipes = on_two_ranks(lambda pipe: [pipe.step(named()) for _ in range(3)], NET, named())
    assert pipes[0] == pipes[1] == pytest.approx(plain_losses(net(), [named()] * 3), rel=1e-5)


class OwnSGD(torch.optim.SGD):
    """Tried with small parameters, as any class that is not PyTorch's."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
def test_the_optimizer_made_last_is_the_one_that_steps(kind: type[torch.optim.Optimizer]) -> None:
    """So a script can hold it, to change its learning rate between steps."""
    made: dict[int, torch.optim.Optimizer] = {}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[get_ident()] = kind(parameters, lr=0.5)
        return made[get_ident()]

    def work(pipe: pipeloom.Pipeline) -> float:
        scheduler = torch.optim.lr_scheduler.StepLR(made[get_ident()], step_size=1, gamma=0.5)
        pipe.step(named())
        scheduler.step()
        return pipe.lr

    assert on_two_ranks(work, NET, named(), optimizer=optimizer) == [0.25, 0.25]


def test_the_last_parts_of_a_tuple_or_list_are_those_of_the_loss() -> None:
    example, loss = (named()["x"], named()["y"]), nn.functional.cross_entropy
    losses = on_two_ranks(lambda pipe: pipe.step([*example]), net(Plain), example, loss=loss)
    assert losses[0] == pytest.approx(plain_losses(net(), [named()])[0], rel=1e-5)


def test_rank_0_alone_has_the_batches() -> None:
    """Also one of another size, and one that is none: all ranks refuse it, and it can be replaced."""
    fewer = {name: named()[name][: ROWS // 2] for name in ("x", "y")}

    def work(pipe: pipeloom.Pipeline) -> list[float]:
        first = pipe.rank == 0
        losses = [pipe.step(named() if first else None)]
        losses += [report.loss for report in pipe.steps([named(), named()] if first else [])]
        with pytest.raises(BatchError, match="text"):
            pipe.step({"x": named()["x"], "text": "no tensor"} if first else None)
        assert "rank 0" in refused(BatchError, pipe.step)
        losses.append(pipe.evaluate(named() if first else None))
        return [*losses, pipe.step(fewer if first else None)]

    mine, others = on_two_ranks(work, NET, named(), data="first")
    module = net()
    expected = plain_losses(module, [named()] * 3)
    expected.append(float(of_named(module(named()["x"]), named()).detach()))
    assert mine == others == pytest.approx(expected + plain_losses(module, [fewer]), rel=1e-5)


@pytest.mark.parametrize("data", ["every", "first"])
def test_a_step_may_have_several_batches_each_split_by_itself(data: str) -> None:
    """Counted alike, so that a micro-batch with rows of two of them gave another loss."""
    parts = [{name: named()[name][rows] for name in ("x", "y")} for rows in (slice(0, 6), slice(6, 8))]
    module = net()
    mean = sum(float(of_named(module(part["x"]), part).detach()) for part in parts) / 2

    def work(pipe: pipeloom.Pipeline) -> list[float]:
        given = data == "every" or pipe.rank == 0
        found = [pipe.evaluate(parts if given else None), pipe.step(parts if given else None)]
        with pytest.raises(BatchError, match="2 micro-batches"):
            pipe.step([parts[0], {name: tensor[:1] for name, tensor in parts[1].items()}] if given else None)
        assert "5 batches" in refused(BatchError, pipe.step, [parts[0]] * 5 if given else None)
        return found

    # Of four micro-batches two are of each batch.
    losses = on_two_ranks(work, NET, named(), data=data, weight=lambda batch: 1.0)
    assert losses[0] == losses[1] == pytest.approx([mean, mean], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "loss"), [(Net, of_named), (Attributes, lambda made, batch: of_named(vars(made), batch))]
)
def test_outputs_are_those_of_the_model_for_the_whole_batch(kind: type[Net], loss: Any) -> None:
    expected = net().eval()(named()["x"])
    for value, outputs in on_two_ranks(lambda pipe: pipe.outputs(named()), net(kind), named(), loss=loss):
        assert outputs.keys() == {"logits", "hidden"}  # the norm has no rows
        torch.testing.assert_close(outputs["logits"], expected["logits"].detach())
        torch.testing.assert_close(outputs["hidden"], expected["hidden"].detach())
        assert value == pytest.approx(float(of_named(expected, named()).detach()))


def test_outputs_with_a_row_for_each_in_some_micro_batches_only_are_refused() -> None:
    few = {name: tensor[:5] for name, tensor in named().items() if tensor is not None}
    with alone(net(Squeezes), microbatches=4) as pipe:
        assert pipe.outputs(named())[1]["norm"].shape == (ROWS,)
        assert "norm" in refused(BatchError, pipe.outputs, few)


def test_parameters_of_a_group_may_be_in_any_order() -> None:
    with alone(net(), optimizer=lambda params: torch.optim.SGD(sorted(params, key=id), lr=0.1)) as pipe:
        assert pipe.step(named()) > 0


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (lambda p, own: id(p) not in own, lambda p, own: id(p) in own, "leave."),
        (lambda p, _: p.ndim > 1, lambda p, _: hasattr(p, "marked"), "norm.weight"),
    ],
)
def test_groups_that_only_the_models_own_parameters_have_are_refused(first, second, word):
    model = net()
    own = {id(p) for p in model.leave.parameters()}
    model.norm.weight.marked = True

    def make(params: Any) -> torch.optim.Optimizer:
        groups = [[p for p in params if belongs(p, own)] for belongs in (first, second)]
        return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)

    assert word in refused(PlanError, alone, model, optimizer=make)


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (lambda model: sum(p.square().sum() for p in model.parameters()), "parameters"),
        (lambda model: model.leave.weight.square().sum(), "weight"),
        (lambda model: model.extra, "extra"),
    ],
)
def test_a_loss_may_not_read_what_is_trained_or_changed_in_the_module_that_was_given(read, word):
    model = net(Squeezes)
    model.extra = 0.0
    model.weights = torch.ones(3)  # which it may read

    def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], batch["y"], model.weights) + read(model)

    kinds = [type(module) for module in model.modules()]
    assert word in refused(CaptureError, pipeloom.Pipeline, model, example=named(), loss=loss)
    assert [type(module) for module in model.modules()] == kinds


def test_autocast_around_a_pipeline_is_refused() -> None:
    with alone() as pipe, torch.autocast("cpu", torch.bfloat16):
        for call in (pipe.step, pipe.evaluate, lambda _: alone()):
            assert "autocast" in refused(ConfigError, call, named())
    with alone(autocast=torch.bfloat16) as pipe:
        loss = pipe.evaluate(named())
        with torch.autocast("cpu", torch.bfloat16):
            assert pipe.evaluate(named()) == loss


def test_training_goes_on_after_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a batch of one rank that is refused by all, evaluations without a plan or a graph, and one in
    inference mode."""

    def no_outputs(*args: Any, with_outputs: bool, **how: Any) -> Any:
        if with_outputs:
            raise CaptureError("no outputs on Sundays", hint="wait a day")
        return capture_evaluation(*args, with_outputs=with_outputs, **how)

    def work(pipe: pipeloom.Pipeline) -> list[float]:
        assert "list" in refused(BatchError, pipe.step, named() if pipe.rank == 0 else [1, 2])
        assert "fit the plan" in refused(BatchError, pipe.evaluate, named() | {"x": torch.ones(ROWS, 7)})
        assert "Sundays" in refused(CaptureError, pipe.outputs, named())
        with torch.inference_mode():
            before = pipe.evaluate(named())
        losses = [pipe.step(named()) for _ in range(2)]
        assert losses[0] == pytest.approx(before)
        return losses

    monkeypatch.setattr("pipeloom.rank_stages.capture_evaluation", no_outputs)
    assert on_two_ranks(work, NET, named())[0] == pytest.approx(plain_losses(net(), [named()] * 2))


def test_weights_go_in_and_out_by_the_models_own_names(tmp_path: Path) -> None:
    def work(pipe: pipeloom.Pipeline) -> dict[str, Tensor]:
        before = pipe.state_dict()
        file = pipe.export(tmp_path / "model.safetensors")
        loss = pipe.step(named())
        trained = pipe.state_dict()
        pipe.load_state_dict(before)
        assert pipe.step(named()) == pytest.approx(loss)
        pipe.load_weights(file.parent)
        assert pipe.evaluate(named()) == pytest.approx(loss)
        with pytest.raises(CheckpointError, match=r"enter\.weight"):
            pipe.load_state_dict({name: t for name, t in before.items() if name != "enter.weight"})
        with pytest.raises(CheckpointError, match="ndarray"):
            pipe.load_state_dict({name: t.numpy() for name, t in before.items()})  # type: ignore[misc]
        assert pipe.evaluate(named()) == pytest.approx(loss)
        return trained

    module = net()
    plain_losses(module, [named()])
    for trained in on_two_ranks(work, NET, named()):
        assert list(trained) == list(module.state_dict())
        torch.testing.assert_close(dict(trained), dict(module.state_dict()))


class Adapted(nn.Module):
    """A frozen model with an adapter of low rank beside one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net().requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.base.norm(self.base.enter(x))
        return {"logits": self.base.leave(torch.tanh(self.base.hidden(hidden) + self.up(self.down(hidden))))}


def base_name(name: str) -> str | None:
    return name.removeprefix("base.") if name.startswith("base.") else None


def test_adapters_alone_are_trained_on_frozen_weights_from_a_folder_of_shards(tmp_path: Path) -> None:
    pretrained = Net().state_dict()
    names = list(pretrained)
    for number in (1, 2):
        file = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({name: pretrained[name] for name in names[number - 1 :: 2]}, file)
    torch.manual_seed(5)
    plain = Adapted()
    plain.base.load_state_dict(pretrained)

    def work(pipe: pipeloom.Pipeline) -> tuple[list[float], dict[str, Tensor], set[str]]:
        assert "missing" in refused(CheckpointError, pipe.load_weights, tmp_path)
        pipe.load_weights(tmp_path, named=base_name)
        losses = [pipe.step(named()) for _ in range(2)]
        state = pipe.weights.optimizer.state
        return losses, pipe.state_dict(), {n for n, p in pipe.weights.params.items() if p in state}

    torch.manual_seed(5)
    ranks = on_two_ranks(work, Adapted(), named())
    losses = plain_losses(plain, [named()] * 2)
    assert {name for _, _, held in ranks for name in held} == {"down.weight", "up.weight"}
    for ours, state, _ in ranks:
        assert ours == pytest.approx(losses, rel=1e-5)
        assert list(state) == list(plain.state_dict())
        torch.testing.assert_close(dict(state), dict(plain.state_dict()))
        for name in names:
            assert torch.equal(state[f"base.{name}"], pretrained[name])


def test_the_first_number_that_is_not_finite_is_found_with_its_op() -> None:
    class Root(Net):
        """Of the -inf of its masks a softmax makes zeros."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0] * 8 + [-torch.inf] * 8))

        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            hidden = self.enter(x)
            hidden = hidden * (hidden + self.mask).masked_fill(hidden > 2, -torch.inf).softmax(1)
            return super().forward(hidden.sum(1, keepdim=True).sub(1e6).sqrt().expand(-1, 6))

    with pytest.raises(NumbersError, match="sqrt"):
        on_two_ranks(lambda pipe: pipe.step(named()), net(Root), named(), find_nan=True)


def test_a_hook_sees_what_each_action_makes() -> None:
    seen: list[tuple[str, set[str]]] = []
    note = {"on_action": lambda text, made: seen.append((text, set(made)))}
    on_two_ranks(lambda pipe: pipe.step(named()), NET, named(), **note)
    assert sorted({text for text, _ in seen}) == sorted(
        f"{stage}{kind}{number}" for stage in (0, 1) for kind in "FB" for number in range(4)
    )
    assert all("gradient of leave.weight" in made for text, made in seen if text.startswith("1B"))


def test_alone_it_plans_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="pipeloom")
    with alone() as pipe:
        assert (pipe.plan.microbatches, pipe.plan.microbatch_size, pipe.ranks) == (2, 4, 1)
        assert pipe.lr == 1e-3 and pipe.grad_norm is None
        assert "give the batch 'x'" in refused(BatchError, pipe.step, {"y": named()["y"]})
    assert sum("planning" in record.message for record in caplog.records) == 1
    with alone(microbatches=None, microbatch_size=3) as pipe:
        assert (pipe.plan.microbatches, pipe.plan.microbatch_size) == (3, 3)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"micro_batches": 2}, "microbatches"),
        ({"ranks": 3}, "started"),
        ({"microbatches": 16}, "rows"),
        ({"data": "frist"}, "frist"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "Plateau"),
        ({"scheduler": lambda optimizer: None}, "scheduler"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_settings_that_cannot_be_are_refused(how: dict[str, Any], word: str) -> None:
    assert word in refused(ConfigError, alone, **how)


def test_what_would_not_be_trained_is_refused() -> None:
    model = net()
    with alone(model) as pipe:
        assert "detach" in refused(
            BatchError, pipe.step, named() | {"x": torch.randn(ROWS, 6).requires_grad_()}
        )
        model.enter.requires_grad_(False)
        assert "requires_grad" in refused(ConfigError, pipe.step, named())


def test_what_a_checkpoint_cannot_hold_is_told_before_the_first_step(tmp_path: Path) -> None:
    class Keeps(torch.optim.lr_scheduler.ConstantLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.made_by = lambda: optimizer

    with pytest.warns(UserWarning, match="Keeps"), alone(scheduler=Keeps) as pipe:
        assert "Keeps" in refused(CheckpointError, pipe.save, tmp_path)
        assert "keep" in refused(ConfigError, pipe.save, tmp_path, keep=1.5)


def test_a_one_cycle_that_is_over_refuses_a_step_and_the_pipeline_can_be_saved(tmp_path: Path) -> None:
    def warm_up_and_one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        after = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1)
        in_turn = [torch.optim.lr_scheduler.ConstantLR(optimizer), after]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, in_turn, milestones=[1])

    with alone(scheduler=warm_up_and_one_cycle) as pipe:
        list(pipe.steps([named(), named()]))
        assert "OneCycleLR" in refused(PipeloomError, pipe.step, named())
        pipe.save(tmp_path)
        assert pipe.steps_done == 2


def test_buffers_that_share_their_memory_are_exported_and_one_of_several_modules_has_all_its_names(tmp_path):
    model = net(Shares)
    with alone(model) as pipe:
        assert pipe.state_dict().keys() == model.state_dict().keys()
        written = load_file(pipe.export(tmp_path / "model.safetensors"))
        assert torch.equal(written["some"], torch.ones(6)) and torch.equal(written["all"], torch.ones(16))
        assert written.keys() < model.state_dict().keys()


def test_rates_that_are_tensors_are_saved(tmp_path: Path) -> None:
    def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(1e-3))

    rates = []
    for resumes in (False, True):
        with alone(optimizer=adamw, scheduler=falling) as pipe:
            if resumes:
                pipe.load(tmp_path)
            pipe.step(named())
            pipe.save(tmp_path)
            rates.append(float(pipe.lr))
    assert rates == pytest.approx([5e-4, 2.5e-4])


@pytest.mark.parametrize(("given", "rows", "count"), [({}, 7, 6), ({}, 9, 8), ({"microbatch_size": 3}, 9, 4)])
def test_replicas_share_micro_batches_evenly(given: dict[str, int], rows: int, count: int) -> None:
    asked = pipeline_settings(Options(), {"replicas": 2, **given})
    assert asked.settings(ranks=2, rows=rows).microbatches == count


def test_options_reach_the_plan_and_none_is_the_default() -> None:
    given = {"ranks": None, "global_batch": None, "compile": True}
    settings = pipeline_settings(Options(offload_dir="d"), given).settings(ranks=2, rows=4)
    assert (settings.ranks, settings.microbatches, settings.microbatch_size) == (2, 4, 1)
    assert (settings.compile, settings.offload_dir) == (True, "d")
    none = dict.fromkeys(("compile", "master_weights", "seed", "compare", "clip_norm"))
    assert pipeline_settings(Options(seed=3, clip_norm=1.0), none).options == Options(seed=3)


def test_a_job_has_no_second_loss_and_a_plan_no_second_size() -> None:
    job, _ = job_of(NET, named(), loss=of_named)
    plan = pipeloom.plan(job, ranks=1, microbatches=2, microbatch_size=4, cluster="a100-40")
    assert "loss" in refused(ConfigError, pipeloom.Pipeline, job, plan, loss=of_named)
    assert "microbatches" in refused(ConfigError, pipeloom.Pipeline, job, plan, microbatches=4)


@pytest.mark.parametrize("word", ["rank 1", "clip_norm"])
def test_modules_that_ranks_have_drawn_otherwise_and_other_settings_are_refused(word: str) -> None:
    plan = pipeloom.plan(job_of(NET, named(), loss=of_named)[0], **TWO)

    def rank(number: int, channel: Any) -> None:
        model, norm = (NET, 1.0 + number) if word == "clip_norm" else (Net() if number else NET, None)
        pipeloom.Pipeline(model, plan, example=named(), loss=of_named, channel=channel, clip_norm=norm)

    assert word in refused(ConfigError, run_threads, 2, rank)


@pytest.mark.parametrize(
    ("example", "word"),
    [
        (None, "a dictionary of tensors, a tuple"),
        (SimpleNamespace(x=torch.ones(4)), "a dictionary of tensors, a tuple"),
        ({"x": torch.ones(4), "a": "b"}, "a"),
        ((), "parts"),
        (torch.tensor(1.0), "rows"),
        ({"x": torch.ones(4, 6), "y": torch.tensor(1.0)}, "x 4, y 0"),
        ({"x": torch.ones(4, 6), "y": torch.ones(10)}, "x 4, y 10"),
    ],
)
def test_an_example_that_is_no_batch_is_refused(example: Any, word: str) -> None:
    assert word in refused(BatchError, pipeloom.Pipeline, NET, example=example, loss=of_named)

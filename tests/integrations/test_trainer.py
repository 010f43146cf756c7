"""PipelineTrainer gives what transformers' Trainer gives in one process: numbers, log keys and files."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import output
from safetensors.torch import load_file
from torch import nn

from pipeloom.ir.errors import ConfigError

pytest.importorskip("accelerate", reason="transformers' Trainer wants accelerate, which is not installed")

SCRIPT = str(Path(__file__).parent / "trainer_script.py")
RECIPES = ("language_modelling", "sequence_classification", "image_classification")
ADAPTERS = ("lora", "smoothed_lora")
TIMES = ("runtime", "per_second")


def run(folder: Path, *words: str, ranks: int | None = None) -> None:
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    output(*launcher, SCRIPT, folder, *words)


def log(folder: Path, recipe: str) -> list[dict[str, Any]]:
    return json.loads((folder / recipe / "log.json").read_text())


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def assert_same_logs(piped: Path, plain: Path, recipes: tuple[str, ...] = RECIPES) -> None:
    for recipe in recipes:
        for ours, theirs in zip(log(piped, recipe), log(plain, recipe), strict=True):
            assert ours.keys() == theirs.keys()
            for key in theirs:
                if not key.endswith(TIMES) and not key.startswith("eval_steps"):
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), (recipe, key)


class AddsMeans(nn.Module):
    """Takes the number of labels, as `**more`, and gives a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: Any = None, **more: Any) -> dict[str, torch.Tensor]:
        logits = self.layers(x) if self.training else 2 * self.layers(x)
        return {"logits": logits} | ({} if labels is None else {"loss": self.loss(logits, labels, **more)})

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, labels)


class TakesNoNumber(AddsMeans):
    """Its losses are averaged over the batches of an update, not added up."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x, labels)


class SumWithMore(AddsMeans):
    """A sum over labels, and what is added once for each batch, as for the router of experts."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        whole = nn.functional.cross_entropy(logits, labels, reduction="sum") / more["num_items_in_batch"]
        return whole + 0.1 * self.layers[0].weight.square().mean()


class MaskedMean(AddsMeans):
    """Of no labels it is no number."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        mask = (labels != -100).float()
        each = nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum()


class ByClass(TakesNoNumber):
    """Its own loss is no mean over rows."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        return by_class({"logits": logits}, labels)


class NoLabels(AddsMeans):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": self.layers(x)}


def by_class(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """No mean over rows."""
    return nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 5.0, 20.0]))


def with_own_loss(kind: Any) -> Any:
    class OwnLoss(kind):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = (self.model if "x" in inputs else model)(**inputs)
            loss = by_class(outputs, labels)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def trainer_of(
    kind: Any, model: nn.Module, rows: int, folder: Path, *, accumulated: int = 4, **more: Any
) -> Any:
    from transformers import TrainingArguments

    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": number % 3 if number != 5 else -100} for number, row in enumerate(x)]
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8 // accumulated,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=0.1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        label_names=["labels"],
    )
    return kind(model=model.eval(), args=args, train_dataset=data, eval_dataset=data, **more)


def figures(trainer: Any) -> list[float]:
    trainer.train()
    trainer.evaluate()
    return [
        line[key]
        for line in trainer.state.log_history
        for key in ("loss", "grad_norm", "eval_loss")
        if key in line
    ]


OWN = ("", "compute_loss", "compute_loss_func")
CASES = [
    *product((AddsMeans, TakesNoNumber, SumWithMore), OWN, (10, 11), (4,)),
    *product((AddsMeans, MaskedMean, ByClass), OWN[:1], (10, 11), (1, 4)),
    (NoLabels, "compute_loss_func", 11, 4),
]


@pytest.fixture
def kinds() -> tuple[Any, Any]:
    """The plain one and ours."""
    from transformers import Trainer

    from pipeloom.integrations.transformers import PipelineTrainer

    return Trainer, PipelineTrainer


def callback(do: Any, *hooks: str) -> Any:
    """Calls a function of the model."""
    from transformers import TrainerCallback

    def called(*_: Any, model: Any, **__: Any) -> None:
        do(model)

    return type("Called", (TrainerCallback,), dict.fromkeys(hooks, called))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("model", "own_loss", "rows", "accumulated"), CASES)
def test_losses_are_those_of_a_trainer_whatever_they_are(
    kinds: Any, tmp_path: Path, model: type[nn.Module], own_loss: str, rows: int, accumulated: int
) -> None:
    """The last update of an epoch has one batch, or two of which one is of a single row; one row has no
    label. Also where train() is called again."""
    change = with_own_loss if own_loss == "compute_loss" else lambda kind: kind
    more: dict[str, Any] = {"compute_loss_func": by_class} if own_loss == "compute_loss_func" else {}
    more["accumulated"] = accumulated
    found = [figures(trainer_of(change(kind), model(), rows, tmp_path, **more)) for kind in kinds]
    assert len(found[0]) == 9
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_callbacks_see_weights_when_an_epoch_ends_and_when_it_evaluates(kinds: Any, tmp_path: Path) -> None:
    found: list[list[float]] = []

    def see(model: Any) -> None:
        found[-1].append(float(model.layers[0].weight.detach().norm()))

    for kind in kinds:
        trainer = trainer_of(kind, AddsMeans(), 16, tmp_path)
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
        trainer.add_callback(callback(see, "on_evaluate", "on_epoch_end"))
        found.append([])
        trainer.train()
    assert len(found[0]) == 6
    assert len(set(found[0])) > 2
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_an_update_that_was_broken_off_leaves_no_batches(kinds: Any, tmp_path: Path) -> None:
    def break_off(model: Any) -> None:
        raise KeyboardInterrupt

    found = []
    for kind in kinds:
        trainer = trainer_of(kind, AddsMeans(), 12, tmp_path)
        trainer.add_callback(breaks := callback(break_off, "on_substep_end"))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(breaks)
        found.append(figures(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize(
    ("at_each_step", "with_each_loss", "word"),
    [
        (lambda model: setattr(model, "scale", 0.5), None, "numbers"),
        (lambda model: model.layers[0].weight.requires_grad_(False), None, "changed"),
        (None, lambda trainer, loss: loss.mul(trainer.state.global_step + 1), "global_step"),
        (None, lambda trainer, loss: trainer.log({"own": loss.item()}), "logs"),
    ],
)
def test_what_only_the_trainer_sees_is_refused(
    kinds: Any, tmp_path: Path, at_each_step: Any, with_each_loss: Any, word: str
) -> None:
    class Own(kinds[1]):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *rest, **more)
            made = with_each_loss(self, loss)
            return loss if made is None else made

    trainer = trainer_of(Own if with_each_loss else kinds[1], AddsMeans(), 8, tmp_path)
    trainer.model.scale = 1.0
    if at_each_step:
        trainer.add_callback(callback(at_each_step, "on_step_end"))
    with pytest.raises(ConfigError, match=word):
        trainer.train()


def test_an_optimizer_of_ones_own_is_refused(kinds: Any, tmp_path: Path) -> None:
    own = type("OwnOptimizer", (kinds[1],), {"create_optimizer": lambda self, model=None: pytest.fail()})
    with pytest.raises(ConfigError, match="optimizer"):
        trainer_of(own, AddsMeans(), 8, tmp_path)


def test_a_model_that_is_changed_afterwards_is_what_is_evaluated(kinds: Any, tmp_path: Path) -> None:
    def halve(model: Any) -> None:
        model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})

    trainer = trainer_of(kinds[1], AddsMeans(), 8, tmp_path)
    trainer.add_callback(callback(halve, "on_train_end"))
    trainer.train()
    halved = {name: 2 * tensor for name, tensor in trainer.model.state_dict().items()}
    torch.testing.assert_close(halved, trainer.pipe.state_dict())
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        trainer.model.layers[2].weight.zero_()
    assert trainer.evaluate()["eval_loss"] != pytest.approx(before, rel=1e-3)


@pytest.mark.slow
def test_three_recipes_give_what_one_process_gives_and_go_on_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    plain, piped = tmp_path / "plain", tmp_path / "piped"
    run(plain)
    run(piped, ranks=2)
    assert files(piped) == files(plain)
    assert_same_logs(piped, plain)
    reference = resumed(plain)
    assert_same_logs(resumed(piped, ranks=3), reference)
    assert_same_logs(resumed(piped), reference)  # by the plain Trainer, from what the pipeline wrote


@pytest.mark.slow
def test_adapters_give_what_one_process_gives_and_only_adapters_are_written(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are made by peft, which is not installed")
    plain, piped = tmp_path / "plain", tmp_path / "piped"
    run(plain, "lora")
    run(piped, "lora", ranks=2)
    assert files(piped) == files(plain)
    assert (piped / "lora" / "final" / "adapter_model.safetensors").is_file()
    assert_same_logs(piped, plain, ADAPTERS)
    reference = resumed(plain, "lora")
    assert_same_logs(resumed(piped, "lora", ranks=3), reference, ADAPTERS)
    assert_same_logs(resumed(piped, "lora"), reference, ADAPTERS)
    adapters = []
    for folder in (piped, plain):
        saved = load_file(folder / "lora" / "final" / "adapter_model.safetensors")
        assert all("lora_" in name for name in saved)
        adapters.append(saved)
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[1].items():
        torch.testing.assert_close(adapters[0][name], tensor, rtol=1e-4, atol=1e-6)


def resumed(folder: Path, *words: str, ranks: int | None = None) -> Path:
    copy = folder.with_name(f"{folder.name} on {ranks}")
    shutil.copytree(folder, copy)
    run(copy, "resume", *words, ranks=ranks)
    return copy

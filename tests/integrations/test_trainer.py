"""PipelineTrainer gives what transformers' Trainer gives in one process: numbers, log keys and files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import output
from safetensors.torch import load_file
from torch import nn

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

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:
        logits = self.layers(x) if self.training else 2 * self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batches_in_the_last", [1, 2])
def test_the_last_update_of_an_epoch_may_have_fewer_batches(tmp_path: Path, batches_in_the_last: int) -> None:
    """Also after an update that was broken off, whose batches are not those of the next one."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from pipeloom.integrations.transformers import PipelineTrainer

    class BreaksOff(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    x = torch.randn(8 + 2 * batches_in_the_last, 4, generator=torch.Generator().manual_seed(0))
    rows = [{"x": row, "labels": number % 3} for number, row in enumerate(x)]
    losses = []
    for kind in (Trainer, PipelineTrainer):
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            logging_steps=1,
            learning_rate=0.1,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = kind(model=AddsMeans().eval(), args=args, train_dataset=rows)
        trainer.add_callback(BreaksOff)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(BreaksOff)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


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

"""PipelineStrategy gives what Lightning's Trainer gives in one process: numbers, log keys and checkpoints."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import output

lightning = pytest.importorskip("lightning", reason="lightning is an optional extra, and not installed")

from pipeloom.integrations.lightning import PipelineStrategy  # noqa: E402
from pipeloom.ir.errors import ConfigError  # noqa: E402

SCRIPT = str(Path(__file__).parent / "lightning_script.py")
LAUNCHED = ("-m", "torch.distributed.run", "--nproc-per-node")


def run(folder: Path, *words: str, ranks: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    launcher = () if ranks is None else (*LAUNCHED, str(ranks))
    piped = () if ranks is None else ("piped",)
    output(*launcher, SCRIPT, folder, *piped, *words)


def logs(folder: Path) -> list[dict[str, float]]:
    newest = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    rows = list(csv.DictReader(newest.open()))
    return [{name: float(text) for name, text in row.items() if text} for row in rows]


def assert_same(piped: Path, plain: Path) -> None:
    for ours, theirs in zip(logs(piped), logs(plain), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    ours, theirs = (json.loads((folder / "end.json").read_text()) for folder in (piped, plain))
    assert ours["best"] == theirs["best"]
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-5)


def assert_same_layout(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same_layout(ours[key], theirs[key])
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    else:
        assert type(ours) is type(theirs)


@pytest.mark.slow
def test_fits_as_one_process_and_each_goes_on_from_the_other(tmp_path: Path) -> None:
    plain, piped = tmp_path / "plain", tmp_path / "piped"
    run(plain)
    run(piped, ranks=2)
    assert_same(piped, plain)
    assert any("val_loss" in row for row in logs(piped))
    ours, theirs = (torch.load(f / "kept" / "last.ckpt", weights_only=False) for f in (piped, plain))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "loops"):
        assert_same_layout(ours[part], theirs[part])
    assert ours.keys() == theirs.keys()

    to_plain, to_piped = tmp_path / "to_plain", tmp_path / "to_piped"
    shutil.copytree(piped, to_plain)
    shutil.copytree(plain, to_piped)
    run(plain, "resume")
    run(piped, "resume", ranks=2)
    run(to_plain, "resume")
    run(to_piped, "resume", ranks=2)
    for resumed in (piped, to_plain, to_piped):
        assert_same(resumed, plain)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(NamedTuple):
    x: torch.Tensor


class ReadsField(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch.x,), batch_idx)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SeesGradients(Module):
    def on_after_backward(self) -> None:
        print(self.net.weight.grad)


class ReadsIndex(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (batch_idx % 2)


class ReadsEpoch(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.current_epoch


class Freezes(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.bias.requires_grad_(batch_idx == 0)


class Anneals(Module):
    beta = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.beta = 1.0 / (1 + batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.beta


class LogsSum(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("odd_sum", self.net(batch[0]).square().sum())


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.net.weight], lr=0.1), torch.optim.SGD([self.net.bias], lr=0.1)]


def fit(folder: Path, module: Any, count: int = 8, strategy: Any = None, **settings: Any) -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(4.0 * count).reshape(count, 4) / 32)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy or PipelineStrategy(microbatches=2, device="cpu"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        **settings,
    )
    named = isinstance(module, ReadsField)
    collate = (lambda rows: Rows(torch.stack([x for (x,) in rows]))) if named else None
    loader = torch.utils.data.DataLoader(rows, 4, collate_fn=collate)
    validated = isinstance(module, LogsSum)
    trainer.fit(module, loader, loader if validated else None)


@pytest.mark.parametrize(
    ("module", "settings", "word"),
    [
        (ByHand, {}, "by hand"),
        (SeesGradients, {}, "on_after_backward"),
        (ReadsIndex, {}, "number of its batch"),
        (ReadsEpoch, {}, "current_epoch"),
        (Freezes, {}, "changed"),
        (Anneals, {}, "changed"),
        (LogsSum, {}, "odd_sum"),
        (TwoOptimizers, {}, "multiple optimizers"),
        (Module, {"accumulate_grad_batches": 2}, "accumulated"),
        (Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "by value"),
        (Module, {"callbacks": [lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)]}, "Averaging"),
    ],
)
def test_refused_by_name(tmp_path: Path, module: Any, settings: dict[str, Any], word: str) -> None:
    error = RuntimeError if module is TwoOptimizers else ConfigError  # Lightning refuses that itself
    with pytest.raises(error, match=word):
        fit(tmp_path, module(), **settings)


def test_settings_of_the_trainer_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_clip_val"):
        PipelineStrategy(clip_norm=1.0)


class Watches(Module):
    def __init__(self) -> None:
        super().__init__()
        self.batches, self.seen = 0, []

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.net.weight.clone().detach())


@pytest.mark.parametrize(("kind", "rows"), [(Watches, 8), (Module, 5), (ReadsField, 5)])
def test_weights_are_those_of_one_process_and_hooks_see_them(
    tmp_path: Path, kind: type[Module], rows: int
) -> None:
    """The last batch may have fewer rows than a step has micro-batches."""
    found = []
    for strategy in ("auto", None):
        torch.manual_seed(0)
        module = kind()
        fit(tmp_path, module, rows, strategy)
        assert kind is not Watches or (module.batches, len(module.seen)) == (2, 1)
        found.append([*getattr(module, "seen", []), module.net.weight.detach()])
    torch.testing.assert_close(*found)

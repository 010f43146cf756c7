"""Trains a LightningModule in the folder given, in one process or a pipeline, and writes what it logs."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = 2 * nn.functional.cross_entropy(self(x), y)  # other than validation_step
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(-1) == y).float().mean()
        self.log_dict({"val_loss": nn.functional.cross_entropy(logits, y), "val_accuracy": accuracy})

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        plain = [p for p in self.parameters() if p.ndim == 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "lr": 3e-3, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98))
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=2 * steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(folder: Path, *words: str) -> None:
    strategy: Any = "auto"
    if "piped" in words:
        from pipeloom.integrations.lightning import PipelineStrategy

        strategy = PipelineStrategy(microbatches=4)
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(92, 8)
    data = TensorDataset(x, (x @ torch.randn(8, 5)).argmax(-1))
    train, val = torch.utils.data.random_split(data, [64, 28])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=4 if "resume" in words else 2,
        default_root_dir=folder,
        logger=CSVLogger(folder, version=len(words), flush_logs_every_n_steps=1),
        callbacks=[
            LearningRateMonitor(),
            ModelCheckpoint(folder / "kept", monitor="val_loss", save_last=True),
        ],
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    resumed = folder / "kept" / "last.ckpt" if "resume" in words else None
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(val, 10), ckpt_path=resumed)
    if trainer.is_global_zero:
        weights = sum(float(p.double().square().sum()) for p in model.parameters())
        rows = {"weights": weights, "best": Path(trainer.checkpoint_callback.best_model_path).name}
        (folder / "end.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

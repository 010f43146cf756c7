"""A LightningModule in a pipeline: its Trainer gets a strategy, and it is started by torchrun.

torchrun --nproc-per-node 2 examples/lightning_module.py

With `python examples/lightning_module.py --plain` it trains in one process, with the same numbers.
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.net(inputs), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, classes = batch
        logits = self.net(inputs)
        self.log("val_loss", nn.functional.cross_entropy(logits, classes))
        self.log("val_accuracy", (logits.argmax(-1) == classes).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


strategy = "auto"
if "--plain" not in sys.argv:
    from pipeloom.integrations.lightning import PipelineStrategy

    strategy = PipelineStrategy(microbatches=4)

lightning.seed_everything(0)
inputs = torch.randn(320, 16)
data = TensorDataset(inputs, (inputs @ torch.randn(16, 4)).argmax(-1))
train, validation = torch.utils.data.random_split(data, [256, 64])
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    strategy=strategy,
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(train, 32, shuffle=True), DataLoader(validation, 32))
if trainer.is_global_zero:
    print("validation", *[f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items()])

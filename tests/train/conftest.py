"""A pipeline of one process in plain PyTorch, with the interface that the training loop uses."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import computing

from pipeloom.ir.timeline import Timeline
from pipeloom.runtime import checkpoint
from pipeloom.runtime.checkpoint import TrainState
from pipeloom.step_reports import StepReport
from pipeloom.train.config import Config, DataConfig, ModelConfig, OptimizerConfig, PipelineConfig
from pipeloom.train.workload import Workload, gpt_workload, rate_scheduler


class PlainPipeline:
    """Forward, backward, clip, update; the n-th step "takes" n seconds."""

    rank = 0

    def __init__(self, config: Config, workload: Workload) -> None:
        torch.manual_seed(config.seed)
        self.model = workload.job.model()
        self.optimizer = workload.job.optimizer(self.model.parameters())
        self.scheduler = rate_scheduler(config)(self.optimizer)
        self.schedulers = [self.scheduler]
        self.clip_norm = config.optimizer.clip_norm
        self.steps_done = 0
        self.report: StepReport | None = None

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        loss = self.model(**batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.steps_done += 1
        step_s = float(self.steps_done)
        self.report = StepReport(
            loss=loss.item(),
            step_s=step_s,
            wall_s=(step_s, step_s),
            busy_s=(step_s, 0.5 * step_s),
            waited_s=(0.0, 0.5 * step_s),
            peak_bytes=(1 << 20, 2 << 20),
            grad_norm=float(norm),
        )
        return loss.item()

    drains_each_step = True

    def steps(self, batches):
        for batch in batches:
            self.step(batch)
            assert self.report is not None
            yield self.report

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        with torch.no_grad():
            return self.model(**batch).loss.item()

    def measured(self) -> Timeline:
        return computing((0, "0F0", 0.0, float(self.steps_done)), source="measured")

    def state(self) -> TrainState:
        return TrainState(parameters=dict(self.model.named_parameters()), optimizers=(self.optimizer,))

    def save(self, directory: Path, *, extra: Mapping[str, Any], keep: int) -> Path:
        both = {"user": dict(extra), "scheduler": self.scheduler.state_dict()}
        return checkpoint.save(directory, self.state(), step=self.steps_done, extra=both, keep=keep)

    def load(self, directory: Path) -> dict[str, Any]:
        self.steps_done, both = checkpoint.load(directory, self.state())
        self.scheduler.load_state_dict(both["scheduler"])
        return both["user"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A config that trains in milliseconds, on a text of its own."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "abcdefgh " * 20)
    return Config(
        steps=12,
        validate_every=5,
        validation_batches=2,
        checkpoint_every=4,
        model=ModelConfig(layers=1, width=16, heads=2, context=16),
        data=DataConfig(paths=(str(folder),), validation_share=0.2),
        optimizer=OptimizerConfig(warmup_steps=3, learning_rate=1e-2),
        pipeline=PipelineConfig(microbatches=2, microbatch_size=2),
    )


@pytest.fixture
def change_text(tiny: Config) -> Iterator[Callable[[], object]]:
    """Makes the first file of the text longer, for one test."""
    file = Path(tiny.data.paths[0]) / "0.txt"
    before = file.read_text()
    yield lambda: file.write_text("longer than it was, " * 30)
    file.write_text(before)


@pytest.fixture
def plain() -> Callable[[Config], tuple[PlainPipeline, Workload]]:
    def make(config: Config) -> tuple[PlainPipeline, Workload]:
        workload = gpt_workload(config)
        return PlainPipeline(config, workload), workload

    return make

"""The settings of `pipeloom train`: frozen dataclasses with defaults, read from TOML, printed as TOML.

    name = "gpt"
    [model]
    width = 256
    [pipeline]
    ranks = 4

Every key may also be given as `--set model.width=256`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..ir.errors import ConfigError, shown
from ..settings import PlanSettings, setting


def _require(holds: bool, message: str, hint: str) -> None:
    if not holds:
        raise ConfigError(message, hint=hint)


def _require_positive(section: str, **numbers: float) -> None:
    for key, number in numbers.items():
        _require(number > 0, f"{section}{key} is {number}", "use a value above 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The byte-level GPT. context: bytes it sees at once.  tied: one matrix embeds and predicts."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        _require_positive(
            "model.", layers=self.layers, width=self.width, heads=self.heads, context=self.context
        )
        _require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not a multiple of model.heads {self.heads}",
            "all heads have the same width",
        )
        _require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}", "use at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text to train on.

    paths: files, or folders whose files are all taken; empty for the .py files of Python's standard library.
    validation_share: share of the files (of each file, if there are too few) kept for validation.
    """

    paths: tuple[str, ...] = ()
    validation_share: float = 0.05

    def __post_init__(self) -> None:
        share = self.validation_share
        _require(0 < share < 1, f"data.validation_share is {share}", "use a share between 0 and 1, as 0.05")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay.

    final_rate_share: learning rate at the last step, as a share of `learning_rate`.
    clip_norm: largest global norm of the gradients; 0 does not clip.
    A job that brings its own optimizer uses only the schedule of these.
    """

    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    final_rate_share: float = 0.05
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("optimizer.", learning_rate=self.learning_rate)
        for key in ("weight_decay", "warmup_steps", "final_rate_share", "clip_norm"):
            value = getattr(self, key)
            _require(value >= 0, f"optimizer.{key} is {value}", "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PlanSettings):
    """How the model is spread: the settings of a plan, and those of the ranks that run it."""

    accumulate: int = setting(1, "Times that the micro-batches run before the weights change.", least=1)
    device: str = setting("cpu", "What ranks compute on.", words=("cpu", "cuda"))
    autocast: str | None = setting(None, "Mixed precision, in this dtype: bfloat16.")
    plan: str | None = setting(
        None, "Follow this plan file instead of planning: what it says is not planned anew.", kind="file"
    )
    timeout_s: float = setting(300.0, "Limit of each wait for other ranks, in seconds.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.autocast in (None, "bfloat16"),
            f"pipeline.autocast is {shown(self.autocast)}",
            'use "bfloat16", or leave it out; float16 would need the loss to be scaled, see docs/training.md',
        )
        _require_positive("pipeline.", timeout_s=self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about one run.

    name: of the run directory, runs/<name>-<n>; by default the job's name.
    job: "file.py:function" or "package.module:function" returning a `pipeloom.Job`; unset for the built-in
    GPT (then `model` and `data` are used).
    checkpoint_every: steps between checkpoints; one is always written at the end.
    compare: before the first step of a model that was not trained here before, compare two micro-batches with
        plain PyTorch; the run is refused if they differ.
    rehearsals: how often, at most, the run predicts a step anew between two steps, to be held against the
        steps around it; each takes nearly as long as a step. 0 for none.
    """

    name: str = "gpt"
    job: str | None = None
    seed: int = 0
    steps: int = 400
    validate_every: int = 100
    validation_batches: int = 4
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    rehearsals: int = 21
    compare: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        _require_positive(
            "",
            steps=self.steps,
            validate_every=self.validate_every,
            validation_batches=self.validation_batches,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
        )
        _require(self.rehearsals >= 0, f"rehearsals is {self.rehearsals}", "use 0 or more")
        _require(
            bool(self.name) and Path(self.name).name == self.name,
            f"name is {shown(self.name)}",
            "use a plain word: it names the run directory",
        )

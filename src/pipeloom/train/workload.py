"""What a config trains: the model's job, its batches and learning rate by step, and a name for the data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..ir.errors import ConfigError
from ..run_options import named_device
from ..tracer.job import Job, load_job
from ..tracer.job_calls import at_length
from .config import Config, OptimizerConfig
from .model import GPT
from .muon import MuonAndAdamW
from .text_data import Text, files_of, split, standard_library

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """train, validation: number of the step, or of the validation batch -> a whole batch, the same on every
    rank.  data: fingerprint; a run that is resumed over other data is refused.
    rate: highest learning rate, None if the job brings its own optimizer."""

    job: Job
    train: Callable[[int], Batch]
    validation: Callable[[int], Batch]
    data: str
    rate: float | None


def tokens_of(job: Job, batch: Batch) -> float | None:
    """How many tokens a batch has: as many as the job's loss averages over, if the job says so, else as many
    as its first entry has integers, where those are rows of several; None for data of another kind.

    >>> images, words = {"x": torch.zeros(2, 3, 8, 8)}, {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
    >>> job = Job(model=torch.nn.Identity, batch=lambda seed, size: images)
    >>> tokens_of(job, images), tokens_of(job, words)
    (None, 32.0)
    """
    if job.weight is not None:
        return float(job.weight(batch))
    first = next(iter(batch.values()))
    is_words = first.ndim == 2 and not first.is_floating_point() and first.dtype != torch.bool
    return float(first.numel()) if is_words else None


def gpt_workload(config: Config) -> Workload:
    """The built-in GPT on text."""
    spans = files_of(config.data.paths) if config.data.paths else standard_library()
    train, validation = split(spans, config.data.validation_share)
    window = config.model.context + 1
    for purpose, text in (("training", train), ("validation", validation)):
        if len(text) < window:
            raise ConfigError(
                f"the {purpose} text has {len(text)} bytes, one sequence needs {window}",
                hint="give more text, or lower model.context",
            )

    def batch(text: Text, seed: int, rows: int) -> Batch:
        bytes_BT = torch.from_numpy(text.windows(seed, rows, window)).long()
        return {"input_ids": bytes_BT[:, :-1].contiguous(), "labels": bytes_BT[:, 1:].contiguous()}

    rows, seed = config.pipeline.rows, config.seed
    return Workload(
        job=Job(
            name=config.name,
            model=lambda: GPT(**asdict(config.model)),
            batch=lambda seed, size: batch(train, seed, size),
            weight=lambda batch: batch["labels"].numel(),
            optimizer=optimizer_of(config),
        ),
        train=lambda step: batch(train, derive_seed(seed, "train", step), rows),
        validation=lambda index: batch(validation, derive_seed(0, "validation", index), rows),
        data=train.fingerprint,
        rate=config.optimizer.learning_rate,
    )


def job_workload(config: Config, job: Job) -> Workload:
    """The user's own job. Validation uses seeds of its own, so a generator gives data not trained on."""
    rows, seed = config.pipeline.rows, config.seed
    rate = config.optimizer.learning_rate if job.optimizer is None else None
    if job.optimizer is None:
        job = replace(job, optimizer=optimizer_of(config))
    elif config.optimizer.name != OptimizerConfig().name:
        raise ConfigError(
            f"the optimizer is to be {config.optimizer.name}, but {job.name} brings its own",
            hint="leave out one of them",
        )
    return Workload(
        job=job,
        train=lambda step: job.batch(derive_seed(seed, "train", step), rows),
        validation=lambda index: job.batch(derive_seed(0, "validation", index), rows),
        data=config.job or job.name,
        rate=rate,
    )


def workload_of(config: Config) -> Workload:
    """Its job has batches of the longest of several lengths that are planned for; what is trained on has its
    own."""
    workload = gpt_workload(config) if config.job is None else job_workload(config, load_job(config.job))
    histogram = config.pipeline.histogram
    return replace(workload, job=at_length(workload.job, max(histogram))) if histogram else workload


def job_of(config: Config) -> Job:
    """The job that a config names, without an optimizer added; else the built-in GPT."""
    return gpt_workload(config).job if config.job is None else load_job(config.job)


def optimizer_of(config: Config) -> Callable[..., Any]:
    """What a job without an optimizer of its own trains with."""
    settings = config.optimizer
    given: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    given |= {"betas": (0.9, 0.95), "fused": named_device(config.pipeline.device) != "cpu" or None}
    if settings.name == "muon+adamw":
        return lambda named_parameters: MuonAndAdamW(named_parameters, **given)
    return lambda parameters: AdamW(parameters, **given)  # fused ones need no scratch


def rate_share(config: Config, step: int) -> float:
    """Learning rate of a step (0-based) as a share of the highest: linear warm-up, then half a cosine.

    Source: cosine decay of Loshchilov and Hutter, arXiv 1608.03983, without restarts.

    >>> from .config import OptimizerConfig
    >>> config = Config(steps=14, optimizer=OptimizerConfig(warmup_steps=4, final_rate_share=0.1))
    >>> [round(rate_share(config, step), 3) for step in (0, 3, 4, 9, 13)]
    [0.25, 1.0, 1.0, 0.55, 0.122]
    """
    settings = config.optimizer
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    length = max(config.steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / length, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_rate_share + (1 - settings.final_rate_share) * cosine


def rate_scheduler(config: Config) -> Callable[[Optimizer], LambdaLR]:
    return lambda optimizer: LambdaLR(optimizer, lambda step: rate_share(config, step))


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """Below 2**31. Resuming needs no generator state, because a seed depends on the step alone."""
    digest = hashlib.blake2b(f"{seed} {purpose} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31

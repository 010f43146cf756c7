"""Hugging Face's Trainer, with the model in a pipeline: `PipelineTrainer`.

To the Trainer each rank looks like one process alone: it loads all data, computes all metrics, and only rank
0 logs and writes. What it calls the backward of a batch gathers batches until `gradient_accumulation_steps`
are there, which are then one step of the pipeline, update included; its optimizer only has learning rates.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from ..ir.errors import CheckpointError, ConfigError
from ..pipeline import Pipeline
from ..pipeline_request import require_same_weights
from ..tracer.job_calls import evaluation_mode
from .as_one_process import load_optimizer_states, optimizer_states, random_kept, repeated, with_enough_rows

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"

_RATES = ("lr", "initial_lr")
"""What a scheduler keeps in a group of its optimizer."""

_COUNT = "batches_of_update"
"""The last update of an epoch may have fewer batches than the others."""

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment, and accelerate reads."""


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose model is trained by all processes that torchrun has started together.

    It takes what `Trainer` takes. Losses, learning rates, logs, metrics and files are those of a `Trainer` in
    one process, but for dropout, which draws other numbers.

    pipeline: keywords of `Pipeline`, as {"microbatches": 8, "memory": "16GiB"}; by default a batch is split
        into as many micro-batches as there are gradient accumulation steps, or 8.

    Raises: ConfigError for what a pipeline cannot do: float16, an optimizer that was made already; and all
        that `Pipeline` raises.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    compute_loss_func: Any
    label_smoother: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        pipeline: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or TrainingArguments(output_dir="tmp_trainer")  # as a Trainer does
        given = signature(Trainer.__init__).bind(self, model, args, *more, **kwargs).arguments
        _refuse(args, given.get("optimizers", (None, None)))
        _as_one_process(args)
        self.pipe: Pipeline | None = None
        self._settings = dict(pipeline or {})
        self._gathered: list[dict[str, Any]] = []
        self._adds_means = False
        super().__init__(model, args, *more, **kwargs)
        self.place_model_on_device = False

    # Training

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The pipeline, anew from the weights that `self.model` has; and a stand-in for its optimizer."""
        self._open_pipeline(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        assert self.pipe is not None
        self._gathered = []  # an earlier train() may have stopped within an update
        groups = self.pipe.weights.optimizers[0].param_groups
        rates = [{"params": [nn.Parameter(torch.zeros(()))], "lr": group["lr"]} for group in groups]
        self.optimizer = stand_in = _LearningRates(rates)
        return stand_in

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep a batch; with the last one of an update, train on all of them. Its loss is that of all."""
        assert self.pipe is not None
        self._gathered.append(dict(inputs))
        if len(self._gathered) < self.current_gradient_accumulation_steps:
            return torch.zeros(())
        batch = self._with_count(_joined(self._gathered), len(self._gathered))
        self._gathered = []
        batch = with_enough_rows(batch, _rows(batch), self.pipe)  # the last of an epoch may have few
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.pipe.weights.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate
        return torch.tensor(self.pipe.step(batch if self.pipe.rank == 0 else None))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The pipeline has clipped them."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        assert self.pipe is not None
        return torch.tensor(self.pipe.grad_norm)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        outcome = super().train(*args, **kwargs)
        if self.pipe is not None:
            self.model.load_state_dict(self.pipe.state_dict(frozen=False), strict=False)
        return outcome

    # Evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        if any(inputs.get(name) is None for name in self.label_names):
            raise ConfigError(
                f"a batch without {', '.join(self.label_names)} is to be predicted, and the pipeline ends in "
                "the loss",
                hint="give the data labels, or predict with trainer.model in one process",
            )
        if self.pipe is None:
            self._open_pipeline([inputs], 1)
        assert self.pipe is not None
        rows = _rows(inputs)
        counted = self._with_count(inputs, 1)
        batch = repeated(counted, rows, self.pipe.plan.microbatches) if self.pipe.rank == 0 else None
        if prediction_loss_only:
            return torch.tensor(self.pipe.evaluate(batch)), None, None
        loss, outputs = self.pipe.outputs(batch)
        ignored = ignore_keys or getattr(
            self.model.config, "keys_to_ignore_at_inference", ["past_key_values"]
        )
        kept = tuple(tensor[:rows] for name, tensor in outputs.items() if name not in ignored)
        labels = tuple(inputs[name] for name in self.label_names)
        return torch.tensor(loss), _alone(kept), _alone(labels) if labels else None

    # The pipeline

    def _open_pipeline(self, batches: Any, count: int) -> None:
        """Make the pipeline for a batch as large as `count` of these."""
        if self.pipe is not None:
            self.pipe.close()
        args = self.args
        self.model.train()  # it is not after from_pretrained; a Trainer's own training_step does so
        clip = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
        settings: dict[str, Any] = {"microbatches": count} if count > 1 else {}
        settings |= {"clip_norm": clip, "seed": args.seed, **self._settings}
        if args.bf16:
            settings["autocast"] = torch.bfloat16
        with random_kept():
            taken = [dict(batch) for _, batch in zip(range(count), batches, strict=False)]
            counted = "labels" in taken[0] and (self.model_accepts_loss_kwargs or self.compute_loss_func)
            self._adds_means = bool(count > 1 and counted and self._ignores_items(taken[0]))
            self.pipe = Pipeline(
                self._copied_model if counted else self.model,
                example=self._with_count(_joined(taken), count),
                loss=self._loss_of_outputs if self.label_smoother or self.compute_loss_func else None,
                optimizer=self._make_optimizer,
                weight=(lambda batch: self._items(batch["labels"]))
                if counted and not self._adds_means
                else None,
                data="first",
                **settings,
            )

        require_same_weights(self.pipe.watch, self.model, self.pipe.options.timeout_s)

    def _copied_model(self) -> nn.Module:
        """A copy whose losses are a Trainer's: sums over tokens, divided by the number of its labels."""
        with torch.utils._python_dispatch._disable_current_modes():
            model: nn.Module = copy.deepcopy(self.model)
        forward = model.forward

        def adding_means(**batch: Tensor) -> Any:
            count = batch.pop(_COUNT)[0]
            outputs = forward(**batch)
            return {**outputs, "loss": outputs["loss"] * count.to(outputs["loss"].dtype)}

        if self._adds_means:
            model.forward = adding_means
        elif self.model_accepts_loss_kwargs and self.label_smoother is None:
            model.forward = lambda **batch: forward(**batch, num_items_in_batch=self._items(batch["labels"]))
        return model

    def _with_count(self, batch: Mapping[str, Any], count: int) -> dict[str, Any]:
        """A batch that tells the model of how many it is made, where it has to know."""
        if not self._adds_means:
            return dict(batch)
        return {**batch, _COUNT: torch.full((_rows(batch),), float(count))}

    def _ignores_items(self, batch: Mapping[str, Any]) -> bool:
        """Whether the model's loss is a mean, however many labels it is told that there are. Then a Trainer
        adds up the means of an update's batches."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            return False
        with evaluation_mode(self.model), torch.no_grad():
            losses = [self.model(**batch, num_items_in_batch=torch.tensor(n))["loss"] for n in (1, 2)]
        return bool(losses[0] == losses[1] != 0)

    def _make_optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> Optimizer:
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = [
            {
                "params": [p for n, p in named_parameters if n in decayed],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for n, p in named_parameters if n not in decayed], "weight_decay": 0.0},
        ]
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        optimizer: Optimizer = kind(groups, **settings)
        return optimizer

    def _loss_of_outputs(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor
        labels, items = batch["labels"], self._items(batch["labels"])
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=items)
        else:
            kind = type(unwrap_peft_model(self.model)).__name__  # type: ignore[no-untyped-call]
            shifts = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = self.label_smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=items)
        return loss

    def _items(self, labels: Tensor) -> Tensor:
        """Labels as a Trainer counts them."""
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    # Files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.pipe is None:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.model.state_dict() | self.pipe.state_dict(frozen=False)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)
        self.pipe.channel.all_gather_object(None, "all ranks to have saved")  # others look for its files

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """In the files of a `Trainer` in one process, which can go on from them, too."""
        state = self._optimizer_state()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_FILE)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FILE).is_file():
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        self._load_optimizer_state(state, checkpoint)
        scheduler = torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: saved[key] for key in _RATES if key in saved})
        assert self.pipe is not None
        self.pipe.steps_done = self.state.global_step

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.pipe is not None:
            self.pipe.load_state_dict(self.model.state_dict())

    def _grouped_names(self) -> list[list[str]]:
        """Names of trained parameters by the groups of the optimizer."""
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        names = {id(p): n for n, p in trained}
        groups = self._make_optimizer(trained).param_groups
        return [[names[id(p)] for p in group["params"]] for group in groups]

    def _optimizer_state(self) -> dict[str, Any]:
        """As the optimizer of one process has it; on all ranks."""
        assert self.pipe is not None
        optimizer, merged = self.pipe.weights.optimizers[0], optimizer_states(self.pipe)
        state: dict[int, Any] = {}
        groups, number = [], 0
        rates = [{key: g[key] for key in _RATES if key in g} for g in self.optimizer.param_groups]
        for names, group, rate in zip(self._grouped_names(), optimizer.param_groups, rates, strict=True):
            indices = list(range(number, number + len(names)))
            number += len(names)
            state |= {
                index: merged[name] for index, name in zip(indices, names, strict=True) if name in merged
            }
            groups.append({**group, **rate, "params": indices})
        return {"state": state, "param_groups": groups}

    def _load_optimizer_state(self, state: Mapping[str, Any], checkpoint: str) -> None:
        assert self.pipe is not None
        names = [name for group in self._grouped_names() for name in group]
        indices = [index for group in state["param_groups"] for index in group["params"]]
        if len(names) != len(indices):
            raise CheckpointError(
                f"{checkpoint} has the optimizer of {len(indices)} parameters, the model trains {len(names)}",
                hint="resume with the model and the optimizer that it was saved with",
            )
        paired = zip(names, indices, strict=True)
        saved = {name: state["state"][index] for name, index in paired if index in state["state"]}
        load_optimizer_states(self.pipe, saved)


class _LearningRates(SGD):
    """The learning rates that the scheduler changes. The pipeline's own optimizer steps."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=groups[0]["lr"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Done by the pipeline."""


def _refuse(args: Any, optimizers: Any) -> None:
    if args.fp16:
        raise ConfigError("fp16 is asked for", hint="use bf16, which needs no scaling of the loss")
    if optimizers[0] is not None:
        raise ConfigError(
            "the optimizer was made already, and no rank has all parameters",
            hint="name it in the arguments, or give optimizer_cls_and_kwargs",
        )


def _as_one_process(args: Any) -> None:
    """Let transformers and accelerate see one process, of which only that on rank 0 is the main one."""
    from accelerate.state import AcceleratorState, PartialState

    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        args.use_cpu = True  # the Trainer's own device, where batches are made; the pipeline has its own
        vars(args).pop("_setup_devices", None)
        _ = args.device
        state = PartialState()
        state.process_index, state.local_process_index = rank, local
    finally:
        os.environ.update(hidden)


def _rows(batch: Mapping[str, Any]) -> int:
    return len(next(value for value in batch.values() if isinstance(value, Tensor)))


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Batches of one update as one. They are to have the same shapes but for their rows."""
    if len(batches) == 1:
        return batches[0]
    try:
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    except (RuntimeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the batches of one update cannot be joined: {error}",
            hint="let the collator pad them all to one length, or use gradient_accumulation_steps=1",
        ) from None


def _alone(tensors: tuple[Any, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors

"""Hugging Face's Trainer, with the model in a pipeline: `PipelineTrainer`.

To the Trainer each rank looks like one process alone: it loads all data, computes all metrics, and only rank
0 logs and writes. What it calls the backward of a batch gathers batches until `gradient_accumulation_steps`
are there, which are then one step of the pipeline, update included; its optimizer only has learning rates.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from ..ir.errors import CheckpointError, ConfigError
from ..pipeline import Pipeline
from ..pipeline_request import require_same_weights
from ..runtime.batches import microbatch_rows
from ..tracer.job_calls import JoinedBatches, evaluation_mode
from .as_one_process import (
    is_of_user,
    load_optimizer_states,
    optimizer_states,
    random_kept,
    repeated,
    state_of,
)

_log = logging.getLogger("pipeloom")

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"

_RATES = ("lr", "initial_lr")
"""What a scheduler keeps in a group of its optimizer."""

_SHARE = "share_of_update"
"""What `PipelineTrainer._shares` says of a batch."""

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment, and accelerate reads."""


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose model is trained by all processes that torchrun has started together.

    It takes what `Trainer` takes. Losses, learning rates, logs, metrics and files are those of a `Trainer` in
    one process, but for dropout, which draws other numbers. The weights of `trainer.model` are those of the
    last epoch's end.

    pipeline: keywords of `Pipeline`, as {"microbatches": 8, "memory": "16GiB"}; by default there are as many
        micro-batches as gradient accumulation steps, or 8. A loss need be no mean over rows or labels: if its
        first batch shows that it is none, batches are not split, and accumulation alone gives micro-batches.

    Raises: ConfigError for what a pipeline cannot do: float16, an optimizer that was made already or that a
        subclass makes, weights of `trainer.model` that change in training, fewer micro-batches than batches
        of an update, generation; and all that `Pipeline` raises.
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
        self._refuse(args, given.get("optimizers", (None, None)))
        _as_one_process(args)
        self.pipe: Pipeline | None = None
        self._settings = dict(pipeline or {})
        self._gathered: list[dict[str, Any]] = []
        self._labelled = self._counted = self._is_scaled = self._stays_whole = False
        self._seen: list[Any] = []
        super().__init__(model, args, *more, **kwargs)
        self.place_model_on_device = False
        self.callback_handler.callbacks.insert(0, _SeesWeights(self))

    def _refuse(self, args: Any, optimizers: Any) -> None:
        if args.fp16:
            raise ConfigError("fp16 is asked for", hint="use bf16, which needs no scaling of the loss")
        if getattr(args, "predict_with_generate", False):
            raise ConfigError(
                "predictions are to be generated, and the pipeline ends in the loss",
                hint="leave predict_with_generate out, and generate with trainer.model after train()",
            )
        if type(self).create_optimizer is not PipelineTrainer.create_optimizer or optimizers[0] is not None:
            raise ConfigError(
                "the optimizer is made for the whole model, and no rank has all parameters",
                hint="name it in the arguments, or give optimizer_cls_and_kwargs",
            )

    # Training

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The pipeline, anew from the weights that `self.model` has; and a stand-in for its optimizer."""
        known = optimizer_states(self.pipe) if self.pipe is not None and self.optimizer is not None else {}
        self._open_pipeline(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        assert self.pipe is not None
        load_optimizer_states(self.pipe, known)  # of an earlier train()
        self._gathered = []  # an earlier train() may have stopped within an update
        groups = self.pipe.weights.optimizers[0].param_groups
        stand_ins = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in groups]
        self.optimizer = stand_in = _StandIn(stand_ins)
        return stand_in

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep a batch; with the last one of an update, train on all of them. Its loss is that of all."""
        assert self.pipe is not None
        self._gathered.append(dict(inputs))
        if len(self._gathered) < self.current_gradient_accumulation_steps:
            return torch.zeros(())
        self._refuse_changes()
        batches = self._shares(self._gathered, self.pipe.plan.microbatches, trains=True)
        self._gathered = []
        for group, told in zip(
            self.pipe.weights.optimizers[0].param_groups, self.optimizer.param_groups, strict=True
        ):
            group.update({key: told[key] for key in group if key != "params"})
        return torch.tensor(self.pipe.step(batches if self.pipe.rank == 0 else None))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The pipeline has clipped them."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        assert self.pipe is not None
        return torch.tensor(self.pipe.grad_norm)

    def _refuse_changes(self) -> None:
        if self._seen != state_of(self.model):
            raise ConfigError(
                "weights, buffers or numbers of trainer.model, or what learns, were changed in training",
                hint="change the model before train(), and call that again",
            )

    def _take_weights(self) -> None:
        if self.pipe is not None:
            self._refuse_changes()
            self.model.load_state_dict(self.pipe.state_dict(frozen=False), strict=False)
            self._seen = state_of(self.model)

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
        if self.is_in_train:
            self._refuse_changes()
        elif self._seen != state_of(self.model):
            self.pipe.load_state_dict(self.model.state_dict())
            self._seen = state_of(self.model)
        rows, parts = _rows(inputs), self.pipe.plan.microbatches
        batches = self._shares([inputs if self._stays_whole else repeated(inputs, rows, parts)], parts)
        batch = batches if self.pipe.rank == 0 else None
        if prediction_loss_only:
            return torch.tensor(self.pipe.evaluate(batch)), None, None
        loss, outputs = self.pipe.outputs(batch)
        config = getattr(self.model, "config", None)
        ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        kept = tuple(tensor[:rows] for name, tensor in outputs.items() if name not in ignored)
        labels = tuple(inputs[name] for name in self.label_names)
        return torch.tensor(loss), _alone(kept), _alone(labels) if labels else None

    # The pipeline

    def _open_pipeline(self, batches: Any, count: int) -> None:
        """Make the pipeline for a batch as large as `count` of these."""
        if self.pipe is not None:
            self.pipe.close()
        args = self.args
        mode = self.model.training
        self.model.train()  # it is not after from_pretrained; a Trainer's own training_step does so
        clip = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
        settings: dict[str, Any] = {"clip_norm": clip, "seed": args.seed}
        if args.bf16:
            settings["autocast"] = torch.bfloat16
        with random_kept():
            taken = [dict(batch) for _, batch in zip(range(count), batches, strict=False)]
            self._labelled = "labels" in taken[0]
            self._counted = self._labelled and bool(self.model_accepts_loss_kwargs or self.compute_loss_func)
            scaled = getattr(self, "loss_is_scaled_for_ga", None)
            self._is_scaled = bool(self._counted or self.compute_loss_func) if scaled is None else scaled
            self._stays_whole = not self._may_be_split(taken[0])
            if count > 1 or self._stays_whole:
                settings["microbatches"] = count
            self.pipe = Pipeline(
                self._copied_model,
                example=JoinedBatches.of(self._shares(taken, count)),
                loss=self._loss_of_outputs if self._loss_is_outside else None,
                optimizer=self._make_optimizer,
                weight=self._weight,
                data="first",
                **settings | self._settings,
            )
        parts = self.pipe.plan.microbatches
        if parts < count or (parts > count and self._stays_whole):
            self.pipe.close()
            raise ConfigError(
                f"{parts} micro-batches are asked for, and an update has {count} batches"
                + (", whose loss is no mean, so that they stay whole" if parts > count else ""),
                hint="leave microbatches out, or let gradient_accumulation_steps be as many",
            )
        self.model.train(mode)
        require_same_weights(self.pipe.watch, self.model, self.pipe.options.timeout_s)
        self._seen = state_of(self.model)

    # A Trainer adds up the losses L_b of an update's batches, each told the number N of all their labels, or
    # takes their mean: then scale is 1, else the number of batches,
    #
    #     loss = scale / batches * sum_b L_b(N)
    #
    # A pipeline takes the mean over micro-batches by weight. Micro-batch m with i_m of the i_b labels of its
    # batch counts i_m / i_b, and is told of N i_m / i_b labels. So it is the same for a sum over labels that
    # is divided by how many it is told of, for a mean over labels, and for what is added to either. A batch
    # without labels counts by rows.

    def _shares(
        self, batches: list[dict[str, Any]], parts: int, *, trains: bool = False
    ) -> list[dict[str, Any]]:
        """The batches of an update, each with rows enough for its micro-batches, and in each row what one
        micro-batch has to know: by what it counts (labels of its batch; if it has none, its rows, below 0),
        what its own labels are multiplied with (or of how many it is told), and the number of batches.

        trains: a micro-batch without labels, whose mean would be no number, has rows of others, and counts 0.
        """
        counts, told = [self._count(batch) for batch in batches], []
        total = sum(self._labels(batch) for batch in batches)
        for batch, own, pieces in zip(batches, counts, microbatch_rows(parts, len(batches)), strict=True):
            rows = _rows(batch)
            if rows < pieces or self._stays_whole:  # the last update of an epoch may have few
                batch = repeated(batch, rows, pieces * rows if self._stays_whole else pieces)
            times = _rows(batch) / rows
            share = [own * times, total / own, len(batches)] if own else [-times * rows, total, len(batches)]
            shares = torch.tensor([share] * _rows(batch))
            if own and self._labelled and trains:
                batch, shares = self._without_unlabelled(batch, shares, pieces)
            there = {name: value for name, value in batch.items() if value is not None}
            told.append({**there, _SHARE: shares})
        return told

    def _without_unlabelled(
        self, batch: dict[str, Any], shares: Tensor, pieces: int
    ) -> tuple[dict[str, Any], Tensor]:
        rows, start = torch.arange(_rows(batch)), 0
        labelled = next(row for row in rows if self._labels(_rows_of(batch, rows[row : row + 1])))
        for size in microbatch_rows(len(rows), pieces):
            chosen = slice(start, start := start + size)
            if not self._labels(_rows_of(batch, rows[chosen])):
                rows[chosen], shares[chosen, 0] = labelled, math.inf
        return _rows_of(batch, rows), shares

    def _labels(self, batch: Mapping[str, Tensor]) -> float:
        return float(self._items(batch["labels"])) if self._labelled else 0.0

    def _count(self, batch: Mapping[str, Tensor]) -> float:
        return self._labels(batch) if self._labelled else float(_rows(batch))

    def _weight(self, batch: Mapping[str, Tensor]) -> float:
        of_batch = float(batch[_SHARE][0, 0])
        return self._count(batch) / of_batch if of_batch > 0 else -_rows(batch) / of_batch

    @property
    def _has_own_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss

    @property
    def _loss_is_outside(self) -> bool:
        """Whether a loss of the Trainer's is computed of the model's outputs."""
        return not self._has_own_loss and bool(self.label_smoother or self.compute_loss_func)

    def _may_be_split(self, batch: dict[str, Any]) -> bool:
        """Whether the loss of a batch is that of its halves, each counted and told of its own labels. Of
        models of transformers that are told of labels it is."""
        rows, model = _rows(batch), unwrap_peft_model(self.model)  # type: ignore[no-untyped-call]
        theirs = type(model).__module__.startswith("transformers.") and self._counted
        if rows == 1 or (theirs and not self._has_own_loss and self.compute_loss_func is None):
            return True
        halves = [_rows_of(batch, part) for part in torch.arange(rows).tensor_split(2)]
        with evaluation_mode(self.model), torch.no_grad(), self._state_unread():
            whole, *each = (
                float(self.compute_loss(self.model, dict(part), num_items_in_batch=self._told(part)))  # type: ignore[arg-type]
                for part in (batch, *halves)
            )
        counts = [self._count(half) for half in halves]
        mean = sum(loss * count for loss, count in zip(each, counts, strict=True) if count)
        found = math.isclose(whole, mean / (sum(counts) or 1), rel_tol=1e-4, abs_tol=1e-6)
        if not found:
            _log.warning(
                "the loss of %s is no mean over labels or rows: each batch is one micro-batch, and "
                "gradient_accumulation_steps gives the pipeline more",
                type(model).__name__,
            )
        return found

    @contextmanager
    def _state_unread(self) -> Iterator[None]:
        """Raises in the block: ConfigError where the loss reads how far training is, or logs: it is captured
        once."""
        state, self.state = self.state, _Unread()  # type: ignore[assignment]
        vars(self)["log"] = _refuse_log
        try:
            yield
        finally:
            self.state = state
            del vars(self)["log"]

    def _told(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        return torch.tensor(max(1.0, self._labels(batch))) if self._counted else None

    def _copied_model(self) -> nn.Module:
        """A copy whose losses are those of a Trainer, as far as the model computes them."""
        with torch.utils._python_dispatch._disable_current_modes():
            model: nn.Module = copy.deepcopy(self.model)
        forward = model.forward

        def with_loss(**batch: Tensor) -> Any:
            told = batch.pop(_SHARE)[0]
            items = self._told_items(batch, told)
            if self._has_own_loss:
                own, whole = vars(model).pop("forward"), self.model
                self.model = model  # it may be this that the loss calls
                try:
                    made: Any = self.compute_loss(
                        model, dict(batch), return_outputs=not model.training, num_items_in_batch=items
                    )
                finally:
                    vars(model)["forward"], self.model = own, whole
                loss, outputs = (made, {}) if model.training else made
            else:
                told_model = self.model_accepts_loss_kwargs and items is not None
                given = {n: t for n, t in batch.items() if n != "labels" or not self._loss_is_outside}
                outputs = forward(**given, **({"num_items_in_batch": items} if told_model else {}))
                if self._loss_is_outside:
                    return outputs
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
            named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
            return {
                **{str(name): value for name, value in named.items()},
                "loss": self._scaled(loss, batch, told),
            }

        model.forward = with_loss
        return model

    def _told_items(self, batch: Mapping[str, Tensor], told: Tensor) -> Tensor | None:
        if not self._counted:
            return None
        own = self._items(batch["labels"])
        return torch.where(own > 0, own * told[1], told[1]).clamp(min=1)

    def _scaled(self, loss: Tensor, batch: Mapping[str, Tensor], told: Tensor) -> Tensor:
        """A mean over labels of a micro-batch that has none is no number: it counts for nothing, and is 0."""
        if self._labelled:
            heard = (self._items(batch["labels"]) > 0) | (told[0] < 0)
            loss = torch.where(heard, loss, torch.zeros_like(loss))
        return loss * told[2].to(loss.dtype) if self._is_scaled else loss

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
        labels, told = batch["labels"], batch[_SHARE][0]
        items = self._told_items(batch, told)
        if self.compute_loss_func is not None:
            loss: Tensor = self.compute_loss_func(outputs, labels, num_items_in_batch=items)
        else:
            kind = type(unwrap_peft_model(self.model)).__name__  # type: ignore[no-untyped-call]
            shifts = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = self.label_smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=items)
        return self._scaled(loss, batch, told)

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
            group.update({key: value for key, value in saved.items() if key != "params"})
        assert self.pipe is not None
        self.pipe.steps_done = self.state.global_step

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.pipe is not None:
            self.pipe.load_state_dict(self.model.state_dict())
            self._seen = state_of(self.model)

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


class _SeesWeights(TrainerCallback):
    """Before other callbacks: the model of the Trainer has the weights then."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = trainer

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._take_weights()

    on_train_end = on_epoch_end

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._take_for("on_evaluate")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._take_for("on_save")

    def _take_for(self, hook: str) -> None:
        callbacks = self._trainer.callback_handler.callbacks[1:]
        if any(is_of_user(each, hook, "transformers") for each in callbacks):
            self._trainer._take_weights()


class _Unread:
    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the loss reads state.{name}, and is captured once for all steps",
            hint="let the collator put into the batch what depends on it",
        )


def _refuse_log(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "the loss logs, and is captured once for all steps",
        hint="log nothing in compute_loss: the loss itself is logged by the Trainer",
    )


class _StandIn(SGD):
    """What schedulers and callbacks change. The pipeline's own optimizer steps."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=groups[0]["lr"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Done by the pipeline."""


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


def _rows_of(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}


def _alone(tensors: tuple[Any, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors

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
from ..runtime.batches import microbatch_rows
from ..tracer.job_calls import evaluation_mode
from .as_one_process import load_optimizer_states, optimizer_states, random_kept, repeated

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
    one process, but for dropout, which draws other numbers.

    pipeline: keywords of `Pipeline`, as {"microbatches": 8, "memory": "16GiB"}; by default there are as many
        micro-batches as gradient accumulation steps, or 8. What `compute_loss` or `compute_loss_func` make
        need be no mean over rows: unless it is a sum over `num_items_in_batch`, batches then stay whole.

    Raises: ConfigError for what a pipeline cannot do: float16, an optimizer that was made already or that a
        subclass makes, weights of `trainer.model` that change in training; and all that `Pipeline` raises.
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
        self._seen: list[tuple[bool, int]] = []
        super().__init__(model, args, *more, **kwargs)
        self.place_model_on_device = False

    def _refuse(self, args: Any, optimizers: Any) -> None:
        if args.fp16:
            raise ConfigError("fp16 is asked for", hint="use bf16, which needs no scaling of the loss")
        if type(self).create_optimizer is not PipelineTrainer.create_optimizer or optimizers[0] is not None:
            raise ConfigError(
                "the optimizer is made for the whole model, and no rank has all parameters",
                hint="name it in the arguments, or give optimizer_cls_and_kwargs",
            )

    # Training

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The pipeline, anew from the weights that `self.model` has; and a stand-in for its optimizer."""
        self._open_pipeline(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        assert self.pipe is not None
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
        if self._seen != self._model_state():
            raise ConfigError(
                "weights of trainer.model, or which of them learn, were changed while the ranks train theirs",
                hint="change the model before train(), and call that again",
            )
        batches, self._gathered = self._shares(self._gathered, self.pipe.plan.microbatches), []
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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        outcome = super().train(*args, **kwargs)
        if self.pipe is not None:
            self.model.load_state_dict(self.pipe.state_dict(frozen=False), strict=False)
            self._seen = self._model_state()
        return outcome

    def _model_state(self) -> list[tuple[bool, int]]:
        """What tells that somebody has changed `trainer.model`, of which the pipeline has copies."""
        return [(p.requires_grad, p._version) for p in self.model.parameters()]

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
        if self._seen != self._model_state() and not self.is_in_train:
            self.pipe.load_state_dict(self.model.state_dict())
            self._seen = self._model_state()
        rows, parts = _rows(inputs), self.pipe.plan.microbatches
        batches = self._shares([inputs if self._stays_whole else repeated(inputs, rows, parts)], parts)
        batch = batches if self.pipe.rank == 0 else None
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
        settings: dict[str, Any] = {"clip_norm": clip, "seed": args.seed}
        if args.bf16:
            settings["autocast"] = torch.bfloat16
        with random_kept():
            taken = [dict(batch) for _, batch in zip(range(count), batches, strict=False)]
            self._labelled = "labels" in taken[0]
            self._counted = self._labelled and bool(self.model_accepts_loss_kwargs or self.compute_loss_func)
            scaled = getattr(self, "loss_is_scaled_for_ga", None)
            self._is_scaled = bool(self._counted or self.compute_loss_func) if scaled is None else scaled
            self._stays_whole = self._has_own_loss and not self._is_sum_over_items(taken[0])
            if count > 1 or self._stays_whole:
                settings["microbatches"] = count
            settings |= self._settings
            self.pipe = Pipeline(
                self._copied_model,
                example=_joined(self._shares(taken, count)),
                loss=self._loss_of_outputs if self._loss_is_outside else None,
                optimizer=self._make_optimizer,
                weight=self._weight,
                data="first",
                **settings,
            )
        require_same_weights(self.pipe.watch, self.model, self.pipe.options.timeout_s)
        self._seen = self._model_state()

    # A Trainer adds up the losses L_b of an update's batches, each told the number N of all their labels, or
    # takes their mean: then scale is 1, else the number of batches,
    #
    #     loss = scale / batches * sum_b L_b(N)
    #
    # A pipeline takes the mean over micro-batches by weight. Micro-batch m with i_m of the i_b labels of its
    # batch counts i_m / i_b, and is told of N i_m / i_b labels. So it is the same for a sum over labels that
    # is divided by how many it is told of, for a mean over labels, and for what is added to either.

    def _shares(self, batches: list[dict[str, Any]], parts: int) -> list[dict[str, Any]]:
        """The batches of an update, each with rows enough for its micro-batches, and in each row what one
        micro-batch has to know: labels of its batch by which it counts, what its own are multiplied with,
        and the number of batches. Where there are more batches than `parts`, several are one."""
        counts = [self._count(batch) for batch in batches]
        heard = sum(count > 0 for count in counts)
        groups, start = [], 0
        sizes = microbatch_rows(len(batches), min(parts, len(batches)))
        for size, pieces in zip(sizes, microbatch_rows(parts, len(sizes)), strict=True):
            chosen = slice(start, start := start + size)
            batch, own = _joined(batches[chosen]), sum(counts[chosen])
            several = sum(count > 0 for count in counts[chosen]) or 1
            rows = _rows(batch)
            if rows < pieces or self._stays_whole:  # the last update of an epoch may have few
                batch = repeated(batch, rows, pieces * rows if self._stays_whole else pieces)
            times = _rows(batch) / rows
            told = [own * times / several or 1.0, several * sum(counts) / own if own else 1.0, float(heard)]
            groups.append({**batch, _SHARE: torch.tensor([told] * _rows(batch))})
        return groups

    def _count(self, batch: Mapping[str, Tensor]) -> float:
        return float(self._items(batch["labels"])) if self._labelled else float(_rows(batch))

    def _weight(self, batch: Mapping[str, Tensor]) -> float:
        return self._count(batch) / float(batch[_SHARE][0, 0])

    @property
    def _has_own_loss(self) -> bool:
        return self.compute_loss_func is not None or type(self).compute_loss is not Trainer.compute_loss

    @property
    def _loss_is_outside(self) -> bool:
        """Whether a loss of the Trainer's is computed of the model's outputs."""
        own = type(self).compute_loss is not Trainer.compute_loss
        return not own and bool(self.label_smoother or self.compute_loss_func)

    def _is_sum_over_items(self, batch: dict[str, Any]) -> bool:
        """Whether a loss of the user's is divided by the number of labels that it is told of."""
        if not self._counted:
            return False
        with evaluation_mode(self.model), torch.no_grad():
            once, half = (
                float(self.compute_loss(self.model, dict(batch), num_items_in_batch=torch.tensor(n)))  # type: ignore[arg-type]
                for n in (1, 2)
            )
        return once != 0 and math.isclose(once, 2 * half, rel_tol=1e-4)

    def _copied_model(self) -> nn.Module:
        """A copy whose losses are those of a Trainer, as far as the model computes them."""
        with torch.utils._python_dispatch._disable_current_modes():
            model: nn.Module = copy.deepcopy(self.model)
        forward = model.forward

        def with_loss(**batch: Tensor) -> Any:
            told = batch.pop(_SHARE)[0]
            items = self._told_items(batch, told)
            if type(self).compute_loss is not Trainer.compute_loss:
                own = vars(model).pop("forward")
                try:
                    loss, outputs = self.compute_loss(
                        model, dict(batch), return_outputs=True, num_items_in_batch=items
                    )
                finally:
                    vars(model)["forward"] = own
            else:
                told_model = self.model_accepts_loss_kwargs and items is not None
                outputs = forward(**batch, **({"num_items_in_batch": items} if told_model else {}))
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
        """At least one: what has no labels is divided by it, too."""
        return (self._items(batch["labels"]) * told[1]).clamp(min=1) if self._counted else None

    def _scaled(self, loss: Tensor, batch: Mapping[str, Tensor], told: Tensor) -> Tensor:
        """Without labels a mean over them is not a number: it counts for nothing, and is 0 here."""
        if self._labelled:
            loss = torch.where(self._items(batch["labels"]) > 0, loss, torch.zeros_like(loss))
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

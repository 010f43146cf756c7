"""What a pipeline saves and loads: its rank's weights, optimizer, learning rate and random seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..ir.graph import OpGraph
from ..runtime.checkpoint import checkpoint
from ..runtime.checkpoint.state import TrainState
from ..runtime.failure.watch import Watch
from ..runtime.weights import Weights
from .ranks import JoinedRanks
from .rate_schedulers import RateSchedulers


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCheckpoint:
    """One rank's part in checkpoints; all ranks call the same method.

    seed: of random ops.
    """

    graph: OpGraph
    weights: Weights
    scheduler: LRScheduler | RateSchedulers | None
    joined: JoinedRanks
    watch: Watch
    seed: int

    def save(self, directory: Path, *, step: int, extra: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint of a step, in which nothing is in flight; returns its path."""
        state = {"user": dict(extra), "seed": self.seed}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return self.watch.wait_for_all(
            "all ranks to save a checkpoint",
            lambda: checkpoint.save(
                directory,
                self._state(self.weights.previous),
                step=step,
                extra=state,
                group=self.joined.group,
                keep=keep,
            ),
        )

    def load(self, directory: Path) -> tuple[int, dict[str, Any]]:
        """Continue from the newest checkpoint: its step, and what the user had it keep.

        A pipeline that keeps versions takes its previous one from there. In a checkpoint without one, as of a
        run with a flush, it is the same as the newest.
        """
        previous: dict[str, Tensor] = {}
        step, state = self.watch.wait_for_all(
            "all ranks to load a checkpoint",
            lambda: checkpoint.load(directory, self._state(previous), group=self.joined.group),
        )
        self.weights.restart_versions(step if self.weights.updates is not None else 0, previous)
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        return step, dict(state["user"])

    def _state(self, previous: dict[str, Tensor]) -> TrainState:
        kept = {b.name for b in self.graph.buffers if b.persistent}
        return TrainState(
            parameters=self.weights.params,
            buffers={n: t for n, t in self.weights.buffers.items() if n in kept},
            optimizers=self.weights.optimizers,
            aliases={alias: p.name for p in self.graph.parameters for alias in p.aliases},
            previous=previous,
            keeps_previous=self.weights.updates is not None,
        )

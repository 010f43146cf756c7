"""The processes of a command's ranks, which start before it is known what they will run.

A rank imports torch, the runtime and what the user's model is made of, which takes seconds. Meanwhile the
launching process imports the same, captures the model, profiles it and plans. So nothing here imports torch
before the ranks have started.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from ..ir.errors import PeerError, PipeloomError, as_sentence
from ..ir.plan import Plan
from ..runtime.launch import StartedRanks, launch
from .config import Config

if TYPE_CHECKING:
    import torch

    from ..tracer.captured import Captured
    from ..tracer.job import Job

NEEDED = (
    "pipeloom.pipeline",
    "pipeloom.train.run",
    "torch.distributed",
    "torch.fx.experimental.proxy_tensor",
)
"""What a rank imports before its first step."""


@dataclass(frozen=True, kw_only=True)
class HandedModel:
    """A captured model for the ranks of this user; see `tracer.handover`.

    evaluation: its graph of evaluation mode; None if no rank evaluates it.
    """

    training: bytes
    evaluation: bytes | None = None

    @property
    def digest(self) -> bytes:
        """Tells training graphs apart."""
        return hashlib.sha256(self.training).digest()


class RankProcesses(ExitStack):
    """Runs a function in a process for each rank. A context manager, at whose end all of them have ended.

    ranks: as many start at once and get ready. None do by default, in a process that is a rank itself, and if
        there are more than cores, since they would only take them from the process that plans.
    config: what they will train.
    needed: whether a rank that dies early ends this process; see `StartedRanks`.
    """

    def __init__(self, ranks: int = 0, config: Config | None = None, *, needed: bool = True) -> None:
        super().__init__()
        self._started = None
        if 1 <= ranks <= (os.cpu_count() or 1) and "RANK" not in os.environ:
            self._started = self.enter_context(StartedRanks(ranks, needed=needed))
            self._started.prepare(get_ready, (config or Config(),))

    def hand_over(
        self,
        config: Config,
        job: Job,
        plan: Plan,
        captured: Captured | None = None,
        *,
        evaluates: bool = False,
    ) -> HandedModel | None:
        """A job's model for `take_over` in each rank of a plan, captured once for all of them.

        captured: the model, if planning has captured it.
        evaluates: with the graph of evaluation mode. Capturing that takes seconds, in which ranks that have
            started trace their stages.
        Returns: None if each rank has to capture the model: it is cut between its modules.
        Raises: CaptureError if the model cannot be captured, or not in evaluation mode.
        """
        from ..run_options import mixed_precision
        from ..tracer.capture import capture
        from ..tracer.evaluation import capture_evaluation
        from ..tracer.handover import hand_over
        from ..tracer.job_calls import sample_batch
        from ..tracer.split_words import split_words

        autocast = mixed_precision(autocast_of(config), device_of(config))
        if captured is None:
            captured = capture(job, plan.microbatch_size, autocast=autocast)
        captured = split_words(captured, plan.split_words)
        training = hand_over(captured)
        model = None if training is None else HandedModel(training=training)
        if not evaluates or captured.cut is not None:
            return model
        if model is not None and self._started is not None and self._started.ranks == plan.ranks:
            self._started.prepare(trace_ahead, (config, plan, model))
        batch = sample_batch(job, 0, plan.microbatch_size)
        captured.evaluation = capture_evaluation(job, captured, batch, autocast=autocast)
        return None if model is None else replace(model, evaluation=hand_over(captured.evaluation))

    def run(self, main: Callable[..., object], ranks: int, *args: object) -> int:
        """Run `main(*args)` in a process for each rank: in those that have started, if they are as many.

        main: a function of a module; see `run_rank`.
        Returns: the exit status, as `launch` does. All ranks have ended then, and also after Ctrl-C.
        """
        if self._started is not None and self._started.ranks == ranks:
            try:
                return self._started.run(run_rank, (main, *args))
            finally:
                self.close()
        return launch(run_rank, ranks, args=(main, *args))


def device_of(config: Config) -> str:
    from ..run_options import named_device

    return named_device(config.pipeline.device)


def autocast_of(config: Config) -> torch.dtype | None:
    import torch

    name = config.pipeline.autocast
    return None if name is None else getattr(torch, name)


def get_ready(config: Config) -> None:
    """What a rank does before it knows its work: import, and build its model once on fake tensors, since the
    user's constructor imports, too."""
    for name in NEEDED:
        import_module(name)
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..tracer.blueprint import make_blueprint
    from .workload import job_of

    make_blueprint(job_of(config).model, FakeTensorMode(allow_non_fake_inputs=True))


_TRACED: dict[bytes, Captured] = {}
"""Models whose stages this rank has traced ahead, by digest, until `take_over` asks for them."""


def trace_ahead(config: Config, plan: Plan, model: HandedModel) -> None:
    """In a rank that waits for its work: take over the model, and trace the rank's stages for the CPU.

    Raises: CaptureError as `take_over`, which then raises it again.
    """
    if device_of(config) != "cpu":
        return
    from ..rank_stages import make_variant
    from ..tracer import handover
    from .workload import job_of

    rank = int(os.environ["RANK"])
    captured = handover.take_over(model.training, job_of(config))
    make_variant(
        captured,
        plan,
        plan.stage_graph(captured.graph),
        [stage for stage, home in enumerate(plan.placement) if home == rank],
        device="cpu",
        compiled=config.pipeline.compile,
        policy=plan.memory,
    )  # `captured` keeps what tracing made
    _TRACED[model.digest] = captured


def take_over(model: HandedModel | None, job: Job) -> Captured | None:
    """What `RankProcesses.hand_over` gave, in a rank. Raises: CaptureError if its job makes another model."""
    from ..tracer import handover

    if model is None:
        return None
    captured = _TRACED.pop(model.digest, None) or handover.take_over(model.training, job)
    if model.evaluation is not None:
        handover.take_over_evaluation(model.evaluation, captured, job)
    return captured


def run_rank(main: Callable[..., object], *args: object) -> None:
    """What each rank runs: `main(*args)`. An error of pipeloom's ends it with a sentence and a hint, which
    the launcher prints once, and never with our traceback."""
    warnings.formatwarning = as_sentence
    try:
        main(*args)
    except PeerError:
        raise  # the launcher knows that the cause is elsewhere
    except PipeloomError as error:
        sys.exit(str(error))

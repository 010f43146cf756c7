"""`capture`, without importing torch until it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir.graph import OpGraph
from ..tracer.job import Job

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from ..tracer.captured import Captured


def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: dtype | None = None,
) -> Captured:
    """Turn a job's model and loss into an OpGraph and what can be run; see `tracer.capture`.

    job: its model is built on fake tensors, which take no memory.
    microbatch_size: rows per micro-batch.  batch: a micro-batch to take the shapes from instead, tensors
    whose first dimension is the micro-batch, by the names of the forward's arguments.
    autocast: torch.bfloat16 for mixed precision; None for none.
    A model that cannot be exported is captured as whole modules, with a warning that says why.

    Raises: CaptureError if the model can be captured in neither way, has nothing to train, or its loss is no
        scalar; CutError if `Job.modules` names what the model does not have; ConfigError for an `autocast`
        that cannot be trained with; PlanError if the job's optimizer cannot train it.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> graph = pipeloom.capture(job, 4).graph
    >>> [op.name for op in graph.ops][:3], [f"{p.name} {p.shape}" for p in graph.parameters][:2]
    (['linear', 'tanh', 'linear_1'], ['0.weight (8, 8)', '0.bias (8,)'])
    """
    from ..tracer.capture import capture as trace
    from .options import require_autocast

    require_autocast(autocast)
    captured = trace(job, microbatch_size, batch=batch, autocast=autocast)
    return replace(captured, graph=with_updates(captured.graph, job))


def with_updates(graph: OpGraph, job: Job, devices: Iterable[str] = ()) -> OpGraph:
    """The graph with what the job's optimizer takes for each parameter.

    devices: names of those it is to run on, by default CPUs. On others PyTorch's optimizers update many
    parameters at once.
    Raises: PlanError if the optimizer cannot train the model.
    """
    from ..runtime.optimizer_bytes import stand_ins, update_bytes

    kind = "cpu" if all(name.startswith("cpu") for name in devices) else "cuda"
    return graph.with_updates(update_bytes(job.optimizer, stand_ins(graph), kind))

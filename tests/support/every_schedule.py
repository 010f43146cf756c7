"""Plans of a small byte-level GPT for any schedule of the library, in its usual placement."""

from dataclasses import replace

import torch
from nets import sgd
from runs import capture_of, even, plan_for

from pipeloom import Job
from pipeloom.ir.plan import Plan
from pipeloom.planner.placement import layout_of, stages_for
from pipeloom.schedules import registry
from pipeloom.train.model import GPT

SYNCHRONOUS = tuple(
    name for name in registry.names() if not registry.entry(name).lacks and name != "forward_only"
)
LACKING = tuple(name for name in registry.names() if registry.entry(name).lacks)


def gpt_job(
    *, layers: int = 1, width: int = 16, heads: int = 2, context: int = 16, dtype: torch.dtype = torch.float64
) -> Job:
    """The default model, small; its head is tied to its embedding."""

    def model() -> torch.nn.Module:
        return GPT(layers=layers, width=width, heads=heads, context=context).to(dtype)

    def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
        text = torch.randint(256, (rows, context + 1), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    return Job(name="small GPT", model=model, batch=batch, optimizer=sgd)


def plan_of(job: Job, name: str, ranks: int, *, microbatches: int, microbatch_size: int = 1) -> Plan:
    """The schedule over stages with about as many ops each."""
    captured = capture_of(job, microbatch_size)
    count = stages_for(name, ranks)
    flat = plan_for(
        captured, even(captured.graph, count), microbatches=microbatches, microbatch_size=microbatch_size
    )
    layout = layout_of(name, ranks)
    placed = replace(flat, placement=layout.placement, caps=())
    stages = placed.replicated(placed.stage_graph(captured.graph))
    rows = registry.build(name, stages, layout.placement, microbatches // layout.replicas)
    return replace(placed, schedule=rows.name, schedule_rows=tuple(str(rows).splitlines()))

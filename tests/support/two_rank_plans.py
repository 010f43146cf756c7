"""Pipelines of two ranks: each schedule that trains, stages that form a DAG, versions of weights, replicas,
treatments, checkpoints. What each gives on a device."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import delayed
import every_schedule
import products
import runs
import torch
import towers
from every_schedule import SYNCHRONOUS
from torch import Tensor

import pipeloom
from pipeloom import Job, Plan
from pipeloom.ir.plan import widened

GPT = every_schedule.gpt_job(dtype=torch.float32)
PRODUCTS = products.job(64)
WIDE = every_schedule.gpt_job(width=128, dtype=torch.float32)
TOWERS = towers.JOBS[False]
LAYERS = delayed.job_of("momentum")


def chain(*treatments: str, ahead: tuple[int, ...] = (), rows: int = 16) -> Plan:
    """Its messages have two values."""
    plan = runs.even_plan(PRODUCTS, 2, microbatches=4, microbatch_size=rows, schedule="1f1b")
    return runs.treated_plan(PRODUCTS, plan, *treatments, ahead=ahead) if treatments else plan


def branches(*features: str) -> Plan:
    """Five stages: two layers of each tower, and the join."""
    return towers.plan_of(TOWERS, features, (0, 1, 0, 1, 1))


def wide(schedule: str, *treatments: str) -> Plan:
    """Its tensors are so large that what an allocator adds to each is little."""
    plan = every_schedule.plan_of(WIDE, schedule, 2, microbatches=4, microbatch_size=4)
    return runs.treated_plan(WIDE, plan, *treatments) if treatments else plan


def side_by_side(*, shard: bool = False, steady: bool = False) -> Plan:
    one = delayed.steady_plan(LAYERS, 1, 2) if steady else runs.even_plan(LAYERS, 1, microbatches=2)
    return replace(widened(one, 2), shard_optimizer=shard)


def stages_side_by_side(*, shard: bool = False) -> Plan:
    """Two stages on each of the two ranks."""
    one = every_schedule.plan_of(GPT, "interleaved_1f1b", 1, microbatches=2)
    return replace(widened(one, 2), shard_optimizer=shard)


@dataclass(frozen=True)
class Case:
    """saves: whether a second pipeline loads what the first has saved, and goes on.
    wide: whether its peaks are compared with what the allocator makes of it, too.
    predicts: whether a step is forecast at the end.
    data: who gives batches."""

    job: Job
    plan: Callable[[], Plan]
    clip_norm: float | None = None
    saves: bool = False
    wide: bool = False
    predicts: bool = False
    data: Literal["every", "first"] = "every"


CASES = {
    "chain": Case(PRODUCTS, chain, saves=True),
    "chain, batches of rank 0": Case(PRODUCTS, chain, data="first"),
    "chain, offload": Case(PRODUCTS, lambda: chain("offload")),
    "chain, large messages": Case(PRODUCTS, lambda: chain(rows=512)),
    "chain, recompute": Case(PRODUCTS, lambda: chain("recompute")),
    "chain, recompute ahead": Case(PRODUCTS, lambda: chain("recompute", ahead=(1, 1))),
    "chain, offload, recompute, keep": Case(PRODUCTS, lambda: chain("offload", "recompute", "keep")),
    "towers": Case(TOWERS, branches, clip_norm=0.05),
    "towers, split backward, recompute": Case(TOWERS, lambda: branches("split backward", "recompute")),
    "towers, offload": Case(TOWERS, lambda: branches("offload"), saves=True),
    "towers, copies in the schedule": Case(TOWERS, lambda: branches("copies in the schedule")),
    "towers, 2bw": Case(TOWERS, lambda: branches("2bw"), clip_norm=0.05, saves=True),
    "2bw": Case(LAYERS, lambda: delayed.steady_plan(LAYERS, 2, 2), clip_norm=0.05),
    "stash": Case(LAYERS, lambda: delayed.steady_plan(LAYERS, 2, 2, "stash")),
    "width 2": Case(LAYERS, side_by_side, clip_norm=0.05, predicts=True),
    "width 2, 2bw": Case(LAYERS, lambda: side_by_side(steady=True), clip_norm=0.05),
    "width 2, shares": Case(LAYERS, lambda: side_by_side(shard=True), clip_norm=0.05, saves=True),
    "width 2, shares, 2bw": Case(LAYERS, lambda: side_by_side(shard=True, steady=True)),
    "width 2, two stages": Case(GPT, stages_side_by_side, clip_norm=0.05),
    "width 2, two stages, shares": Case(GPT, lambda: stages_side_by_side(shard=True), saves=True),
    "wide 1f1b": Case(WIDE, lambda: wide("1f1b"), wide=True),
    "wide 1f1b, offload": Case(WIDE, lambda: wide("1f1b", "offload"), wide=True),
    "wide 1f1b, recompute": Case(WIDE, lambda: wide("1f1b", "recompute"), wide=True),
    "wide zb_h1": Case(WIDE, lambda: wide("zb_h1"), wide=True),
    "wide zb_v": Case(WIDE, lambda: wide("zb_v"), wide=True),
    "wide interleaved_1f1b": Case(WIDE, lambda: wide("interleaved_1f1b"), wide=True),
} | {
    name: Case(GPT, lambda name=name: every_schedule.plan_of(GPT, name, 2, microbatches=4))
    for name in SYNCHRONOUS
}


def taken(what: str, when: str) -> int:
    """Bytes on the device: "requested" by tensors, or "allocated", which are rounded up."""
    return int(torch.accelerator.memory_stats().get(f"{what}_bytes.all.{when}", 0))


def trained(
    case: Case, device: str, folder: Path, waits: AbstractContextManager[list[Any]] | None = None
) -> dict[str, Any]:
    """Losses of four steps and of an evaluation, the parameters, and what a second pipeline makes of a
    checkpoint. peaks: of the ledger, and of the device as `taken` has them.

    waits: finds those of the host, in the fourth step.
    """
    plan = case.plan()
    batches = [case.job.batch(seed, plan.microbatches * plan.microbatch_size) for seed in range(4)]
    options = pipeloom.Options(device=device, timeout_s=60, clip_norm=case.clip_norm)
    gc.collect()
    before = {what: taken(what, "current") for what in ("requested", "allocated")}
    with pipeloom.Pipeline(case.job, plan, options=options, data=case.data) as pipeline:
        losses = [report.loss for report in pipeline.steps(batches[:3])]
        torch.accelerator.reset_peak_memory_stats()
        pipeline.ledger.peak = pipeline.ledger.total
        with waits or nullcontext([]) as found:
            losses.append(pipeline.step(batches[3]))
        held = [taken(what, "peak") - less for what, less in before.items()]
        peaks = [pipeline.ledger.peak, *held]
        evaluated = pipeline.evaluate(batches[0])
        if case.saves:
            pipeline.save(folder)
        assert not case.predicts or pipeline.predict().step_s > 0
        params = parameters(pipeline)
    loaded: Any = None
    if case.saves:
        with pipeloom.Pipeline(case.job, plan, options=options) as pipeline:
            pipeline.load(folder)
            loaded = [pipeline.step(batches[0]), parameters(pipeline)]
    return {
        "losses": losses,
        "evaluated": evaluated,
        "params": params,
        "waits": found,
        "loaded": loaded,
        "peaks": peaks,
    }


def parameters(pipeline: pipeloom.Pipeline) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in pipeline.weights.params.items()}

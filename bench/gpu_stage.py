"""A stage of GPT-2 1.5B for `gpu_check.py`: captured, profiled, with policies and plans for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.memory_policy import MemoryPolicy, Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.stages import cut
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.planner.search.evaluation import Evaluation
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.planner.treatments.choose import BOTH, treat_interval
from pipeloom.planning import capture
from pipeloom.profiler.measure_ops import measure
from pipeloom.profiler.roofline import roofline
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate

WAYS: Mapping[str, tuple[Treatment, ...]] = {
    "recompute": ("recompute",),
    "offload": ("offload",),
    "both": BOTH,
}
TOLERANCE = 0.03
"""By which a peak may pass the predicted one."""

ROOM = 0.85
"""Share of the free memory that the kept run may take: libraries and their workspaces need some."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the stage and of a step. rows: per micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int
    in_flight: int = 4
    microbatches: int = 8


SIZES = {
    "cuda": Size(layers=12, width=1600, heads=25, length=1024, rows=4),
    "cpu": Size(layers=2, width=64, heads=2, length=64, rows=2),
}


class Blocks(nn.Module):
    """Some blocks of GPT-2. Shapes: rows, length, width."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            vocab_size=1,
            n_positions=size.length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.body = GPT2Model(config)
        self.body.wte = nn.Identity()  # nobody reads tokens

    def forward(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        return (self.body(inputs_embeds=hidden).last_hidden_state * gradient).mean()


def job_of(size: Size) -> Job:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        shape = (rows, size.length, size.width)
        return {name: torch.randn(shape, generator=dice) for name in ("hidden", "gradient")}

    # One parameter after the other, as the ledger counts the optimizer's scratch.
    return Job(
        model=lambda: Blocks(size),
        batch=batch,
        name=f"{size.layers} blocks of GPT-2",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=False),
    )


@dataclass(frozen=True)
class Choice:
    """A policy of the stage. cap: bytes it was chosen for; asked: the cap as a share, None for none."""

    name: str
    asked: float | None
    cap: float
    treatments: Mapping[str, Treatment]

    @property
    def policy(self) -> MemoryPolicy:
        return MemoryPolicy(stages=(dict(self.treatments),)) if self.treatments else MemoryPolicy()


class Setup:
    """The stage captured at one size, its plan, and the cost models that predict it.

    cluster: one device.  budget_s: seconds to measure the ops' profile for.
    """

    def __init__(
        self,
        size: Size,
        device: str,
        autocast: torch.dtype | None,
        cluster: Cluster,
        *,
        budget_s: float = 6.0,
    ) -> None:
        self.size, self.device, self.autocast, self.cluster = size, device, autocast, cluster
        self.job = job_of(size)
        self.captured = capture(self.job, size.rows, autocast=autocast)
        graph = self.captured.graph
        self.stages = cut(graph, {op.name: 0 for op in graph.ops if not op.cheap})
        profiled = measure(self.captured, device, batch=self.job.batch(0, size.rows), budget_s=budget_s)
        self.models = {"profile": self._model(profiled), "roofline": self._model(self._estimate())}

    def _estimate(self) -> Profile:
        return roofline(self.captured.graph, self.cluster.devices[0])

    def _model(self, profile: Profile) -> CostModel:
        options = CostOptions(microbatches=self.size.microbatches)
        return CostModel(self.captured.graph, [profile], self.cluster, options)

    @cached_property
    def kept_bytes(self) -> float:
        return self._optimise(float("inf"), ()).peak_bytes

    def _optimise(self, cap: float, treatments: Sequence[Treatment]) -> Evaluation:
        model = self.models["profile"]
        return treat_interval(
            model, 0, len(model), 0, in_flight=self.size.in_flight, cap=cap, treatments=treatments
        )

    def choices(self, caps: Sequence[float]) -> Iterator[Choice]:
        """The policies to run; equal ones once."""
        yield Choice("keep", None, self.kept_bytes, {})
        for name, treatments in WAYS.items():
            seen: list[Mapping[str, Treatment]] = []
            for share in caps:
                cap = share * self.kept_bytes
                found = self._optimise(cap, treatments)
                if not found.fits:
                    least = found.peak_bytes
                    cap = least + 0.01 * (self.kept_bytes - least)
                    found = self._optimise(cap, treatments)
                if found.fits and found.treatments not in ({}, *seen):
                    seen.append(found.treatments)
                    yield Choice(name, share, cap, found.treatments)

    def plan(self, choice: Choice) -> Plan:
        q, count = self.size.in_flight, self.size.microbatches
        order = [f"0F{m}" for m in range(q)]
        for m in range(count):
            order += [f"0B{m}", *([f"0F{m + q}"] if m + q < count else [])]
        graph = self.captured.graph
        plan = Plan(
            graph=graph.fingerprint,
            planner="memopt",
            placement=(0,),
            schedule=f"first of {q} stages",
            stages=(estimate_stage(self.models["profile"], self.stages, 0, choice.treatments).plan(q),),
            schedule_rows=(" ".join(order),),
            microbatches=count,
            microbatch_size=self.size.rows,
            caps=(int(choice.cap * (1 + TOLERANCE)),),
            memory=choice.policy,
        )
        assert registry.in_flight(plan.as_schedule) == (q,)
        return plan

    def predicted(self, plan: Plan, by: str) -> Timeline:
        model, given = self.models[by], plan.memory.stages
        estimate = estimate_stage(model, self.stages, 0, given[0] if given else {})
        costs = (estimate.simulator_cost(estimate.plan(self.size.in_flight)),)
        program = lower(plan.as_schedule, self.stages, policy=plan.memory)
        return simulate(program, self.stages, costs, self.cluster)


def fitting(size: Size, device: str, autocast: torch.dtype | None, cluster: Cluster) -> Setup:
    """With as many rows per micro-batch as the kept run has room for, halved from `size.rows`."""
    setup = Setup(size, device, autocast, cluster)
    while setup.kept_bytes > ROOM * cluster.devices[0].memory_bytes and setup.size.rows > 1:
        setup = Setup(replace(setup.size, rows=setup.size.rows // 2), device, autocast, cluster)
    return setup

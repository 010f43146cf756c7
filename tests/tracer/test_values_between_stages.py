"""How values lie in memory between stages, and what that takes: what a plan says is what stages keep.

Values once arrived as their dimensions are numbered, not as they lay: ops saved what came in a message, whose
buffer stayed until the backward. And products copied operands that do not lie in one piece: stages kept up to
30 % more than was planned, and what a plan named to be recomputed was not there.
"""

from __future__ import annotations

from dataclasses import replace

import nets
import pytest
import torch
from batches import normal
from odd.case import images, job
from odd.values import Attention, DroppingEncoder, Einsum, Encoder, Mixer, SharedHead, TurnedValues
from parts import model_of, parts_of
from runs import assert_same, capture_of, pipelined, places, plain, plan_for, split_at, threads
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job, plan as make_plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import CommunicationError
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import cut
from pipeloom.runtime.batches import agree_on_layouts
from pipeloom.runtime.channel import Channel

ROWS = 2
ROW = normal(x=(6, 8))
TURNED = job(TurnedValues, ROW)
PRODUCTS = [
    job(model, normal(x=(12, 16)), optimizer=nets.sgd)
    for model in (SharedHead, Attention, Einsum, Mixer, Encoder)
]
DROPPING = job(DroppingEncoder, normal(x=(12, 16)), optimizer=nets.sgd)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", [TURNED, *PRODUCTS, DROPPING, nets.job("t5")], ids=lambda made: made.name.lower()
)
def test_at_every_cut_stages_keep_what_the_plan_says(made: Job) -> None:
    captured = capture_of(made, ROWS)
    names = places(captured)
    for place in range(1, len(names), 5 if made.name == "t5" else 1):
        stages, model = cut(captured.graph, split_at(captured, place)), model_of(captured.graph, 2)
        for stage in range(2):
            found = parts_of(captured, model, stages, stage, {})
            assert found.keeps_inputs[1] <= found.keeps_inputs[0], (names[place], found)
            assert found.residuals[1] == found.residuals[0], (names[place], found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", PRODUCTS, ids=lambda made: made.name)
def test_in_one_stage_not_a_bit_differs(made: Job) -> None:
    plan = plan_for(capture_of(made, ROWS), split_at(capture_of(made, ROWS)), microbatches=2)
    batches = [made.batch(seed, 2 * ROWS) for seed in range(2)]
    assert_same(pipelined(made, plan, batches), plain(made, batches, 2), tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("made", PRODUCTS, ids=lambda made: made.name)
def test_plans_that_recompute_keep_their_cap(made: Job) -> None:
    rows, count = 16, 4

    def planned(memory: int) -> Plan:
        return make_plan(
            made,
            ranks=2,
            microbatches=count,
            microbatch_size=rows,
            memory=memory,
            cluster=cpu_cluster(2),
            planner="dawnpiper",
            treatments=["recompute"],
            captured=capture_of(made, rows),
        )

    most = max(planned(1 << 30).peaks)
    plans = (planned(round(share * most)) for share in (0.9, 0.8, 0.7, 0.6, 0.55))
    tight = next(plan for plan in plans if any(stage.recomputed_bytes for stage in plan.stages))
    batches = [made.batch(seed, rows * count) for seed in range(2)]
    assert_same(pipelined(made, tight, batches), plain(made, batches, count), tolerance=1e-6)


def test_a_product_with_a_weight_needs_room_for_what_is_summed_into_its_gradient() -> None:
    """1.4 % more than the cap, in the backward of T5's norm: the product is as large as the values."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (self.bias * functional.linear(x, self.weight)).square().mean()

    captured = capture_of(job(lambda: Scaled(8, 8), ROW), ROWS)
    stages = cut(captured.graph, split_at(captured, 2))
    planned, real = parts_of(captured, model_of(captured.graph, 2), stages, 0, {}).backward
    assert real <= planned <= real + 8 * 4


def test_a_value_that_is_copied_before_it_is_handed_over_keeps_its_layout() -> None:
    """A stage that begins with the end of a reshape gives a view of what it received; the next stage on the
    same rank got a contiguous copy, and could not see it as the matrix that it was traced with."""

    class Again(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows, length, _ = x.shape
            heads = super().forward(x).view(rows, length, 2, 12).transpose(1, 2)
            turned = heads.reshape(2 * rows, length, 12).transpose(1, 2)
            return turned.transpose(1, 2).reshape(-1, 4).square().mean()

    again = job(lambda: Again(8, 24), ROW)
    captured = capture_of(again, ROWS)
    names = places(captured)
    begin, end = names.index("_unsafe_view"), names.index("transpose_1") + 1
    plan = plan_for(captured, split_at(captured, begin, end), microbatches=2, placement=(0, 1, 1))
    batches = [ROW(0, 2 * ROWS)]
    assert_same(pipelined(again, plan, batches), plain(again, batches, 2), tolerance=1e-5)


def test_ranks_that_have_captured_other_layouts_are_refused() -> None:
    captured = capture_of(TURNED, ROWS)
    place = places(captured).index("transpose")
    stages = cut(captured.graph, split_at(captured, place + 1))
    turned = next(c for c in stages.crossings if c.value.order)
    others = (replace(turned, value=replace(turned.value, order=())),)
    rest = tuple(c for c in stages.crossings if c is not turned)
    differing = [stages, replace(stages, crossings=rest + others)]

    def work(rank: int, channel: Channel) -> None:
        agree_on_layouts(channel, stages)
        agree_on_layouts(channel, differing[rank])

    said = rf"{turned.value.name} lies in memory otherwise for rank 1 than for rank 0"
    with pytest.raises(CommunicationError, match=said):
        threads(2, work)


def test_what_channels_last_convolutions_make_is_sent_as_it_is() -> None:
    """And batches are without gaps, whatever `Job.batch` returns."""

    def last() -> nn.Module:
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def turned(seed: int, rows: int) -> dict[str, Tensor]:
        return {"input": images(seed, rows)["x"].transpose(2, 3).contiguous().transpose(2, 3)}

    captured = capture_of(job(last, turned, loss=lambda output, _: output.square().mean()), ROWS)
    assert captured.graph.value["conv2d"].order == (0, 2, 3, 1) and captured.graph.inputs[0].order == ()
    stages = cut(captured.graph, split_at(captured, 1))
    assert stages.stages[0].ops == ("conv2d",)
    forward = parts_of(captured, model_of(captured.graph, 2), stages, 0, {}).forward
    assert forward == (0, 0)  # but for what is sent

"""Random models, cut at random places, under random schedules: the numbers of one process."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from runs import assert_same, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.graph import OpGraph
from pipeloom.planning import capture

WIDTH, ROWS = 6, 2

LAYERS = (
    "linear",
    "tanh",
    "gelu",
    "norm",
    "skip",
    "older",
    "split",
    "view",
    "in_place",
    "shared",
    "buffer",
    "mask",
)


class Random(nn.Module):
    """Layers in a row, each a way in which real models are wired."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.modules_by_place = nn.ModuleDict(
            {
                str(i): nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH)
                for i, kind in enumerate(layers)
                if kind in ("linear", "norm", "skip", "buffer")
            }
        )
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        kept = [x]
        for i, kind in enumerate(self.layers):
            x = self.layer(kind, i, x, kept)
            kept.append(x)
        return {"loss": nn.functional.cross_entropy(self.last(x), y)}

    def layer(self, kind: str, i: int, x: Tensor, kept: list[Tensor]) -> Tensor:
        own = self.modules_by_place[str(i)] if str(i) in self.modules_by_place else None
        match kind:
            case "linear" | "norm":
                assert own is not None
                return own(x)
            case "tanh":
                return torch.tanh(x)
            case "gelu":
                return nn.functional.gelu(x)
            case "skip":
                assert own is not None
                return x + own(x)
            case "older":  # a value from far back, over any number of stages
                return x * 0.5 + kept[len(kept) // 2]
            case "split":
                a, b = x.chunk(2, dim=-1)
                return torch.cat([b.sigmoid() * a, b], dim=-1)
            case "view":
                return x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)
            case "in_place":
                return (x * 1.5).add_(0.1).mul_(0.9)
            case "shared":
                return self.shared(x)
            case "buffer":
                assert own is not None
                self.seen.add_(x.detach().mean(0))
                return own(x)
            case _:  # an integer and a boolean value that may cross
                place = torch.arange(WIDTH, device=x.device).expand_as(x)
                return x.masked_fill((place % 3 == 0) & (x.detach() > 0.3), 0.0)


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    data = {"x": torch.randn(rows, WIDTH, generator=g), "y": torch.randint(3, (rows,), generator=g)}
    return {name: t.double() if t.is_floating_point() else t for name, t in data.items()}


@settings(
    max_examples=5,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=2, max_size=9).map(tuple),
    data=st.data(),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    split=st.booleans(),
    microbatches=st.integers(1, 4),
)
def test_a_random_model_cut_at_random_places(
    layers: tuple[str, ...], data: st.DataObject, schedule: str, split: bool, microbatches: int
) -> None:
    job = Job(
        model=lambda: Random(layers).double(),
        batch=batch,
        name="random",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    captured = capture(job, ROWS)
    blocks = _blocks(captured.graph)
    stages = data.draw(st.integers(1, min(4, len(blocks))), label="stages")
    places = data.draw(
        st.sets(st.integers(1, max(1, len(blocks) - 1)), min_size=stages - 1, max_size=stages - 1)
    )
    stage_of = {
        name: sum(place <= index for place in places) for index, block in enumerate(blocks) for name in block
    }
    plan = plan_for(
        captured, stage_of, microbatches=microbatches, microbatch_size=ROWS, schedule=schedule, split=split
    )
    batches = [batch(seed, ROWS * microbatches) for seed in (1, 2)]
    found = pipelined(job, plan, batches)
    assert_same(found, plain(job, batches, microbatches), tolerance=1e-12)


def _blocks(graph: OpGraph) -> list[list[str]]:
    """Ops that may be cut apart, in order; what must stay together is one block."""
    own = [op.name for op in graph.ops if not op.cheap]
    last = {
        name: max(index for index, other in enumerate(own) if other in group)
        for group in graph.together.values()
        for name in group
    }
    blocks: list[list[str]] = []
    open_until = -1
    for index, name in enumerate(own):
        if index > open_until:
            blocks.append([])
        blocks[-1].append(name)
        open_until = max(open_until, last.get(name, -1))
    return blocks

"""Causal masks that a model makes are said to attention instead; joins with empty tensors copy nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import runs
import torch
from batches import normal
from torch import Tensor, fx, nn
from torch.nn import functional

from pipeloom import Job
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.op_graph import ancestors

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
TOKENS = 6


def seen(rows: int = TOKENS, columns: int = TOKENS) -> Tensor:
    return torch.arange(columns)[None] <= torch.arange(rows)[:, None]


def added(least: float) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(~seen(), least)


class Attention(nn.Module):
    """given: of the batch, (rows, tokens, 8)."""

    def __init__(self, mask: Callable[[Tensor], Tensor], queries: int) -> None:
        super().__init__()
        self.qkv, self.mask, self.queries = nn.Linear(8, 24), mask, queries

    def forward(self, given: Tensor) -> Tensor:
        q, k, v = self.qkv(given).view(*given.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q[:, :, : self.queries], k, v, self.mask(given))
        return mixed.square().mean()


def job(mask: Callable[[Tensor], Tensor], queries: int = TOKENS) -> Job:
    return Job(
        model=lambda: Attention(mask, queries), batch=normal(given=(TOKENS, 8)), optimizer=torch.optim.SGD
    )


def causal(captured: Captured) -> list[bool]:
    nodes = captured.module.graph.find_nodes(op="call_function", target=ATTENTION)
    return [len(node.args) == 6 and node.args[3] is None and node.args[5] is True for node in nodes]


LIKE = {
    "of numbers": lambda _: seen(),
    "for each row": lambda given: seen().expand(given.shape[0], 1, TOKENS, TOKENS),
    "added": lambda _: added(-torch.inf),
    "added, finite": lambda _: added(torch.finfo(torch.float32).min),
}
UNLIKE = {
    "a window": lambda _: seen() & ~seen().tril(-3),
    "everything": lambda _: torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "of the batch": lambda given: seen() & (given[:, None, None, :, 0] < 9.0),
    "by chance": lambda _: seen() & (torch.rand(TOKENS, TOKENS) < 2),
    "of a part of the batch": lambda given: seen() & (given.unbind(-1)[0][:, None, None] < 9.0),
    "added, too little": lambda _: added(-1.0),
    "one for all queries": lambda _: torch.ones(1, TOKENS, dtype=torch.bool),
    "of fewer queries than keys": lambda _: seen(rows=4),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_causal_mask_is_left_out_and_nothing_else_changes(name: str) -> None:
    one = job(LIKE[name])
    captured = runs.capture_of(one)
    assert causal(captured) == [True]
    assert not [op for op in captured.graph.ops if op.target.startswith(("aten.le", "aten.arange"))]
    plan, batches = runs.even_plan(one, 1, microbatches=2), [one.batch(1, 4)]
    runs.assert_same(runs.pipelined(one, plan, batches), runs.plain(one, batches, 2), tolerance=1e-6)


@pytest.mark.parametrize("name", UNLIKE)
def test_another_mask_stays(name: str) -> None:
    queries = 4 if "fewer" in name else TOKENS
    assert causal(runs.capture_of(job(UNLIKE[name], queries))) == [False]


def test_what_a_mask_is_made_of_may_be_deeper_than_pythons_stack() -> None:
    graph = fx.Graph()
    last = graph.placeholder("given")
    for _ in range(1200):
        last = graph.call_function(torch.ops.aten.add.Tensor, (last, 0.0))
    assert len(ancestors([last], lambda _: False)) == 1201


class Joins(nn.Module):
    def __init__(self, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.join = nn.Linear(4, 4), join

    def forward(self, given: Tensor) -> Tensor:
        return self.join(self.layer(given).transpose(0, 1)).square().mean()


def empty(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, x.shape[1], dtype=dtype)


@pytest.mark.parametrize(
    ("join", "kept"),
    [
        (lambda x: torch.cat([empty(x), x, empty(x)]), 0),
        (lambda x: torch.cat([x, x]), 1),
        (lambda x: torch.cat([empty(x, torch.float64), x]), 1),
        (lambda x: torch.cat([empty(x), x]).as_strided((4, 2), (2, 1)), 1),
    ],
    ids=["a new cache", "twice", "as another type", "before its layout is read"],
)
def test_a_new_cache_is_joined_to_nothing(join: Callable[[Tensor], Tensor], kept: int) -> None:
    captured = runs.capture_of(Job(model=lambda: Joins(join), batch=normal(given=(4,))))
    assert sum(op.target == "aten.cat.default" for op in captured.graph.ops) == kept


def test_transformers_makes_no_mask_and_joins_nothing_to_keys() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=TOKENS, vocab_size=16)

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        ids = torch.randint(16, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    captured = runs.capture_of(Job(model=lambda: transformers.GPT2LMHeadModel(config), batch=batch))
    assert causal(captured) == [True]
    assert not [op for op in captured.graph.ops if op.target in ("aten.cat.default", "aten.le.Tensor")]

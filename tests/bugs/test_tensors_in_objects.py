"""A module that was called with an object that holds tensors (a cache of keys and values, as prefix tuning
makes one) hid what they were made from: parameters were not trained, without a word."""

import odd_models
from odd_code import Stack
from odd_models import Block, job
from runs import assert_same, even_plan, pipelined, plain
from torch import Tensor, nn


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.layers = [{"keys": keys}]


class Reads(nn.Module):
    def forward(self, h: Tensor, cache: Cache) -> Tensor:
        return h + cache.layers[0]["keys"]


class Prefixed(Stack):
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Linear(odd_models.WIDTH, odd_models.WIDTH)
        self.reads = Reads()

    def run(self, h: Tensor) -> Tensor:
        cache = Cache(self.prefix(h) * 2)
        h = self.blocks[1](self.blocks[0](h))
        if h.sum() > 1e9:
            h = -h
        return self.blocks[2](self.reads(h, cache))


def test_what_an_object_holds_is_trained() -> None:
    made = job(Prefixed)
    batches = [made.batch(seed, 8) for seed in range(2)]
    found = pipelined(made, even_plan(made, 3, microbatches=4), batches, evaluate=batches[:1])
    assert_same(found, plain(made, batches, 4, evaluate=batches[:1]), tolerance=2e-5)

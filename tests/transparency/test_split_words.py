"""Heads and embeddings that are cut by words give the numbers of one process."""

import pytest
from heads import FAMILIES, LOSSES, batch, family, with_loss
from runs import assert_same, capture_of, even_plan, pipelined, plain

from pipeloom.tracer.split_words import heads

SIZES = {"microbatches": 4, "microbatch_size": 2}


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, double: bool) -> None:
    job = family(name, double=double)
    batches = [batch(seed, 8) for seed in range(3)]
    plan = even_plan(job, 4, words=3, placement=(0, 1, 1, 0), schedule="zb_v", **SIZES)
    expected = plain(job, batches[:2], 4, evaluate=batches[2:], clip_norm=1.0)
    found = pipelined(job, plan, batches[:2], evaluate=batches[2:], clip_norm=1.0)
    assert_same(found, expected, tolerance=1e-12 if double else 1e-5)
    assert plan.split_words


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    job = with_loss(name)
    batches = [batch(seed, 8) for seed in range(2)]
    plan = even_plan(job, 3, words=4, **SIZES)
    (head,) = heads(capture_of(job))
    assert head.names[0] == "head.weight"
    assert_same(pipelined(job, plan, batches), plain(job, batches, 4), tolerance=1e-12)

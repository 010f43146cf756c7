"""The same numbers as one process, for every model of `nets`, cut and schedule."""

from dataclasses import replace
from functools import cache

import nets
import pytest
from runs import Numbers, assert_same, capture_of, cuttable, even_plan, pipelined, plain

SIZES = {"microbatches": 4, "microbatch_size": 2}
DOUBLE = {name: name != "mixtral" for name in nets.NAMES}
"""Mixtral's experts have no kernel for float64."""


@cache
def expected(name: str) -> Numbers:
    """Two steps and an evaluation in plain PyTorch."""
    job = nets.job(name, double=DOUBLE[name])
    batches = [job.batch(seed, 8) for seed in range(3)]
    return plain(job, batches[:2], 4, evaluate=batches[2:])


@pytest.mark.sampled("gpt2-2-1f1b-split")
@pytest.mark.parametrize("way", ["whole", "split"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", nets.NAMES)
def test_every_model_and_setting(name: str, stages: int, schedule: str, way: str) -> None:
    job = nets.job(name, double=DOUBLE[name])
    batches = [job.batch(seed, 8) for seed in range(3)]
    plan = even_plan(job, stages, schedule=schedule, split=way == "split", **SIZES)
    numbers, evaluate = expected(name), batches[2:]
    if (name, stages) == ("counting", 4):  # its second stage updates a running mean, and does nothing else
        numbers, evaluate = replace(numbers, evaluated=[]), []
    found = pipelined(job, plan, batches[:2], evaluate=evaluate)
    assert_same(found, numbers, tolerance=1e-12 if DOUBLE[name] else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*nets.OWN, "convnet"])
def test_every_op_is_a_stage(name: str) -> None:
    """The finest cut there is, on two ranks. Stages of ops that only train have no evaluation."""
    job = nets.job(name, double=True)
    batches = [job.batch(seed, 8) for seed in range(2)]
    stages = len(cuttable(capture_of(job).graph))
    plan = even_plan(
        job, stages, schedule="gpipe", split=True, placement=[s * 2 // stages for s in range(stages)], **SIZES
    )
    assert_same(pipelined(job, plan, batches), plain(job, batches, 4), tolerance=1e-12)

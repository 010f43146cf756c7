"""The same numbers as one process, for every model of the zoo, cut and schedule."""

from dataclasses import replace

import pytest
import zoo
from runs import Numbers, assert_same, capture_of, even_plan, pipelined, plain

SIZES = {"microbatches": 4, "microbatch_size": 2}

EXPECTED: dict[tuple[str, bool], Numbers] = {}


def expected(name: str, *, double: bool) -> Numbers:
    """Two steps and an evaluation in plain PyTorch, made once per model."""
    if (name, double) not in EXPECTED:
        job = zoo.job(name, double=double)
        batches = [job.batch(seed, 8) for seed in range(3)]
        EXPECTED[name, double] = plain(job, batches[:2], 4, evaluate=batches[2:])
    return EXPECTED[name, double]


def check(name: str, *, double: bool, tolerance: float, stages: int, schedule: str, split: bool) -> None:
    job = zoo.job(name, double=double)
    batches = [job.batch(seed, 8) for seed in range(3)]
    plan = even_plan(job, stages, schedule=schedule, split=split, **SIZES)
    idle = (name, stages) == ("counting", 4)  # its second stage updates a running mean, and does nothing else
    found = pipelined(job, plan, batches[:2], evaluate=[] if idle else batches[2:])
    numbers = expected(name, double=double)
    assert_same(found, replace(numbers, evaluated=[]) if idle else numbers, tolerance=tolerance)


@pytest.mark.sampled("gpt2-2-1f1b-split")
@pytest.mark.parametrize(
    ("stages", "schedule", "way"),
    [
        (1, "gpipe", "split"),
        (1, "1f1b", "whole"),
        (2, "gpipe", "whole"),
        (2, "1f1b", "split"),
        (3, "gpipe", "split"),
        (3, "1f1b", "whole"),
        (4, "gpipe", "whole"),
        (4, "1f1b", "split"),
    ],
)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_pair_of_settings(name: str, stages: int, schedule: str, way: str) -> None:
    check(name, double=False, tolerance=1e-5, stages=stages, schedule=schedule, split=way == "split")


@pytest.mark.sampled("gpt-3-gpipe")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name != "mixtral"])
def test_float64(name: str, stages: int, schedule: str) -> None:
    """Mixtral's experts have no kernel for float64."""
    check(name, double=True, tolerance=1e-12, stages=stages, schedule=schedule, split=True)


@pytest.mark.sampled("two_encoders")
@pytest.mark.parametrize("name", ["two_encoders", "counting"])
def test_only_last_bits_differ(name: str) -> None:
    """Where no value is read by two stages, additions have the order of one process, but for those inside the
    products that are added to a weight's gradient."""
    check(name, double=True, tolerance=1e-13, stages=3, schedule="gpipe", split=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.OWN, "convnet"])
def test_every_op_is_a_stage(name: str) -> None:
    """The finest cut there is, on two ranks. Stages of ops that only train have no evaluation."""
    job = zoo.job(name, double=True)
    batches = [job.batch(seed, 8) for seed in range(2)]
    stages = sum(not op.cheap for op in capture_of(job).graph.ops)
    plan = even_plan(
        job, stages, schedule="gpipe", split=True, placement=[s * 2 // stages for s in range(stages)], **SIZES
    )
    assert_same(pipelined(job, plan, batches), plain(job, batches, 4), tolerance=1e-12)

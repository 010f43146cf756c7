"""The zoo of odd models (`tests/support/odd`): each trains as in plain PyTorch, or is refused by name."""

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from odd import CASES
from odd.case import Case, differences
from odd.control_flow import TorchCond
from runs import Numbers, capture_of, even, pipelined, plain, plan_for, split_at, treated_plan

from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.capture import capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]
MICROBATCHES, ROWS = 4, 2


def runs() -> Iterator[object]:
    """Of each case each cut in some way, and each way at some cut; one run of each is quick."""
    for case in CASES:
        ways = ["split"] if case.split else []
        ways += ["gpipe", "1f1b" if case.between else "recompute"]
        for at in range(max(len(case.cuts), len(ways)) if not case.words else 0):
            cut, way = case.cuts[at % len(case.cuts)], ways[at % len(ways)]
            marks = [pytest.mark.slow] if case.slow or at else []
            yield pytest.param(case, cut, way, id=f"{case}-{cut}-{way}", marks=marks)


@cache
def expected_of(case: Case) -> Numbers:
    if case.expect.startswith("random"):
        return run(case, *places(case, 1), "1f1b")
    train, evaluate = batches(case)
    return plain(case.double, train, MICROBATCHES, evaluate=evaluate)


def batches(case: Case) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    made = [case.double.batch(seed, MICROBATCHES * ROWS) for seed in range(3)]
    return made[:2], made[2:] if case.evaluated else []


def places(case: Case, cut: int | str) -> Iterator[dict[str, int]]:
    """Op -> stage, for each of the cuts of that name that leave together what must stay together."""
    captured = capture_of(case.double, ROWS)
    count = sum(not op.cheap for op in captured.graph.ops)
    if isinstance(cut, int):
        yield even(captured.graph, min(cut, count))
        return
    for place in range(1, count):
        around = (place, place + 1) if cut == "around" and place + 1 < count else (place,)
        stage_of = split_at(captured, *around)
        if all(len({stage_of[op] for op in group}) == 1 for group in captured.graph.together.values()):
            yield stage_of


def run(case: Case, stage_of: dict[str, int], way: str, **options: object) -> Numbers:
    schedule = "gpipe" if way == "gpipe" else "1f1b"
    job = case.double
    captured = capture_of(job, ROWS)
    plan = plan_for(captured, stage_of, microbatches=MICROBATCHES, schedule=schedule, split=way == "split")
    if way == "recompute":
        plan = treated_plan(job, plan, "recompute")
    train, evaluate = batches(case)
    return pipelined(job, plan, train, evaluate=evaluate, **options)


def names_a_line_of(case: Case, text: str) -> bool:
    return any(case.has_line(file, int(line)) for file, line in re.findall(r"(odd/\w+\.py):(\d+)", text))


def captured_as_described(case: Case) -> None:
    """As one graph, or between its modules, with the reason and the line of the model where it stands."""
    reason = capture_of(case.double, ROWS).graph.fallback
    assert bool(reason) == bool(case.between), reason
    assert re.search(case.between, reason), reason
    if ".py" in case.between:
        assert names_a_line_of(case, reason)


def draws_by_its_seed(case: Case) -> None:
    """Evaluated it is as in plain PyTorch; trained it draws other numbers with another seed."""
    stage_of = next(places(case, case.cuts[0]))
    plan = plan_for(capture_of(case.double, ROWS), stage_of, microbatches=MICROBATCHES)
    train, evaluate = batches(case)
    expected = plain(case.double, [], MICROBATCHES, evaluate=evaluate)
    found = pipelined(case.double, plan, [], evaluate=evaluate)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-9)
    again = [pipelined(case.double, plan, train, seed=seed).losses for seed in (0, 1)]
    assert again[0] != again[1]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("case", "cut", "way"), list(runs()))
def test_an_odd_model_trains_as_in_plain_pytorch(case: Case, cut: int | str, way: str) -> None:
    """Losses, gradients, parameters, buffers and evaluation losses of two steps, in float64."""
    if cut == case.cuts[0]:
        captured_as_described(case)
        if case.expect == "random":
            draws_by_its_seed(case)
    expected = expected_of(case)
    for stage_of in places(case, cut):
        found = run(case, stage_of, way)
        apart = differences(case.double, found, expected)
        assert max(apart.values()) <= 1e-9, (apart, stage_of)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * c.slow) for c in CASES if c.words]
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(case: Case) -> None:
    """The message says what, the line of the model where it stands, and the hint what to do."""
    with pytest.raises(CaptureError, match=case.words) as caught:
        capture(case.job, ROWS)
    assert case.hint in str(caught.value.hint)
    assert names_a_line_of(case, caught.value.message)


def test_a_branch_of_torch_runs_in_plain_pytorch_after_it_was_refused() -> None:
    (case,) = (case for case in CASES if case.model is TorchCond)
    for _ in range(2):
        case.job.model()(**case.job.batch(0, ROWS))
        with pytest.raises(CaptureError, match="cond"):
            capture(case.job, ROWS)

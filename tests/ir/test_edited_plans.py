"""Plans that somebody has edited: slips are named, and not passed over."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damage import GRAPH, PLAN
from refusals import refused
from small import by_hand

from pipeloom.ir.errors import ConfigError, CutError, PipeloomError, PlanError, ScheduleError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan, StagePlan, load_plan
from pipeloom.ir.stages import chain, replicate
from pipeloom.lowering.passes import lower

SLIPS: list[tuple[Callable[[dict[str, Any]], Any], type[PipeloomError], str]] = [
    (lambda p: p.update(microbatchs=4), ConfigError, "did you mean microbatches?"),
    (lambda p: p["stages"][1].update(forwards_s=1.0), ConfigError, r"stages\[1\] has .* 'forwards_s'"),
    (lambda p: p["stages"][0]["memory"].update(x=1), ConfigError, r"stages\[0\]: memory has .* 'x'"),
    (lambda p: p["stages"][0].update(forward_s=-0.5), ConfigError, r"stages\[0\].forward_s is -0.5"),
    (lambda p: p["stages"][0]["memory"].update(residuals=-1), ConfigError, r"0\].memory.residuals is -1"),
    (lambda p: p.update(caps=[5, -5]), ConfigError, r"caps\[1\] is -5"),
    (lambda p: p.update(peaks=[5, 5, 5]), ConfigError, "peaks are of 3 ranks"),
    (lambda p: p.update(predicted_step_s=-1.0), ConfigError, "predicted_step_s is -1.0"),
    (lambda p: p.update(microbatch_size=0), ConfigError, "microbatch_size is 0"),
    (lambda p: p.update(width=2), PlanError, "width 2"),
    (lambda p: p["stages"][1].update(ops=["op1", "op2"]), PlanError, "2 times"),
    (lambda p: p["stages"][1].update(ops=["op7", "op2"]), PlanError, "not in the model"),
    (lambda p: p["stages"][1].update(ops=[]), PlanError, "stage 1 of the plan has no ops"),
    (lambda p: p["stages"][0].update(ops=["op0"]), CutError, "op1 has no stage"),
]


@pytest.mark.parametrize(("edit", "error", "words"), SLIPS, ids=[words for _, _, words in SLIPS])
def test_slips_are_named(tmp_path: Path, edit, error, words) -> None:
    PLAN.save(tmp_path / "plan.json")
    plain = json.loads((tmp_path / "plan.json").read_text())
    edit(plain)
    (tmp_path / "plan.json").write_text(json.dumps(plain))
    with pytest.raises(error, match=words):
        plan = load_plan(tmp_path / "plan.json")
        assert plan.replicas and plan.stage_graph(GRAPH)


def test_what_may_be_left_out_is(tmp_path: Path) -> None:
    plan = {"graph": "g", "planner": "me", "stages": [{"ops": ["a"]}], "placement": [0], "microbatches": 1}
    plan |= {"schedule": "gpipe", "schedule_rows": ["0F0 0B0"], "notes": {"my": "own"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert load_plan(tmp_path / "plan.json").notes == {"my": "own"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"delay_correction": 1.5}, "1.5"), ({"schedule_rows": ("0F999999999 0B0",)}, "1000000000 steps")],
)
def test_numbers_that_no_steady_plan_has_are_refused(fields: dict[str, Any], words: str) -> None:
    step = {"schedule": "1f1b", "schedule_rows": ("0F1 0B0",), "microbatches": 1, "weights": "2bw"} | fields
    plan = Plan(graph="", planner="", stages=(StagePlan(ops=("a",)),), placement=(0,), **step)
    with pytest.raises(ScheduleError, match=words):
        _ = plan.as_schedule


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    content = (tmp_path / "plan.json").read_bytes()
    name = json.dumps(PLAN.planner).encode()
    assert name in content
    (tmp_path / "plan.json").write_bytes(content.replace(name, b'"\xff"'))
    with pytest.raises(ConfigError, match="UTF-8"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": ({}, {"relu": "ofload"})}, "did you mean offload?"),
        ({"stages": ({"relu": "x"},)}, "use keep, recompute, offload"),
        ({"ahead": (-1,)}, "stage -1"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    assert words in refused(PlanError, MemoryPolicy, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": ({}, {}, {"relu": "offload"})}, "residuals of stage 2"),
        ({"ahead": (0, 2)}, "ahead in stage 2"),
    ],
)
def test_a_stage_too_many_is_refused_and_replicas_count_once(fields: dict[str, object], words: str) -> None:
    policy = MemoryPolicy(**fields)
    with pytest.raises(PlanError, match=f"{words}, but the plan has 2 stages"):
        replace(PLAN, memory=policy)
    two, four = by_hand("0F0 0B0", "1F0 1B0"), by_hand("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0")
    for made, graph in ((two, chain(2)), (four, replicate(chain(2), 2))):
        lower(made, graph, policy=MemoryPolicy(stages=({}, {"relu": "offload"})))
        with pytest.raises(PlanError, match=words):
            lower(made, graph, policy=policy)

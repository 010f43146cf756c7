"""Where ranks compile their stages, planners see the times of compiled functions. No test here depends on how
fast anything is: what pieces take compiled is given."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import figures
from compiled import KnownRatios, profile_of
from odd.case import CLASSES, WIDTH, job as job_of
from refusals import refused
from runs import assert_same, capture_of, pipelined, plain
from torch import Tensor, nn

from pipeloom import planning
from pipeloom.caches import kept_profile
from pipeloom.compiled_profiles import compiled_profile, pieces_of
from pipeloom.ir.errors import PlanError
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.plan_request import times_of
from pipeloom.planning import plan as plan_job
from pipeloom.tracer.captured import Captured


class Layered(nn.Module):
    """Three equal layers, one with another activation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        ends = (nn.Tanh, nn.Tanh, nn.Tanh, nn.Sigmoid)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), end()) for end in ends)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def seconds(captured: Captured) -> Profile:
    """Each op takes 1 s forward, 2 s for input gradients, 4 s for weight gradients."""
    return profile_of(captured, forward_s=1.0, input_grad_s=2.0, weight_grad_s=4.0)


JOB = job_of(Layered)


@pytest.fixture
def captured() -> Captured:
    return capture_of(JOB)


@pytest.fixture(autouse=True)
def nothing_was_compiled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIPELOOM_KEEP_PROFILES", raising=False)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> KnownRatios:
    """Known ratios in the place of the compiler."""
    monkeypatch.setattr(planning, "kept_profile", lambda captured, measure: seconds(captured))
    ratios = KnownRatios()
    monkeypatch.setattr("pipeloom.profiler.compiled_pieces.measure_piece", ratios)
    return ratios


def test_costs_are_scaled_and_equal_layers_compiled_once(known: KnownRatios, captured: Captured) -> None:
    found = compiled_profile(captured, seconds(captured))
    for op in captured.graph.ops:
        cost = found.costs[op.name]
        expected = (1.0, 2.0, 4.0) if op.cheap else (0.5, 6.0, 12.0)
        assert (cost.forward_s, cost.input_grad_s, cost.weight_grad_s) == expected
    assert found.compiled == "forwards 0.50 and backwards 3.00 times as long as eager"
    assert replace(found, costs={}, compiled="") == replace(seconds(captured), costs={})
    # Of five pieces the first gives no gradient to what is before it; the second and third are alike.
    pieces = pieces_of(captured.graph).stages
    assert len(pieces) == 5 and len(known.asked) == 4
    assert set(known.asked) == {pieces[index].ops for index in (0, 1, 3, 4)}


def test_ratios_are_kept_for_the_same_model(known, captured, monkeypatch):
    first = compiled_profile(captured, kept_profile(captured, seconds))
    count = len(known.asked)
    assert compiled_profile(captured, seconds(captured)) == first and len(known.asked) == count
    assert kept_profile(captured, seconds) == seconds(captured), "what is kept of eager ops stays what it is"
    wider = capture_of(JOB, 4)
    compiled_profile(wider, seconds(wider))
    assert len(known.asked) == 2 * count
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    compiled_profile(captured, seconds(captured))
    assert len(known.asked) == 3 * count


def test_what_cannot_be_compiled_counts_as_eager(known, captured, caplog):
    failing = pieces_of(captured.graph).stages[3]
    known.fails = failing.ops[0]
    found = compiled_profile(captured, seconds(captured))
    assert "layers.3 stay eager" in caplog.text
    assert all(found.costs[name] == seconds(captured).costs[name] for name in failing.ops)
    assert "1 of 5 pieces could not be compiled" in found.compiled
    # Only that is tried again: a compiler may have been installed.
    compiled_profile(captured, seconds(captured))
    assert known.asked.count(failing.ops) == 2 and len(known.asked) == 4 + 1


def test_compiling_is_bounded(known, captured, monkeypatch):
    monkeypatch.setattr("pipeloom.compiled_profiles.BUDGET_S", 0.0)
    found = compiled_profile(captured, seconds(captured))
    # The one that takes most of the time: that of which there are two.
    assert known.asked == [pieces_of(captured.graph).stages[1].ops]
    assert "3 of 5 pieces could not be compiled" in found.compiled
    compiled_profile(captured, seconds(captured))
    assert len(known.asked) == len(set(known.asked)) == 2, "the next time goes on with what is left"


HOW = {"ranks": 2, "microbatches": 4, "microbatch_size": 2}


def test_planners_see_compiled_times(known: KnownRatios, captured: Captured) -> None:
    eager, compiled = (plan_job(JOB, **HOW, captured=captured, compile=way) for way in (False, True))

    def total(plan: Plan, kind: str) -> float:
        return sum(getattr(stage, kind) for stage in plan.stages)

    assert total(compiled, "forward_s") == pytest.approx(0.5 * total(eager, "forward_s"))
    assert total(compiled, "weight_grad_s") == pytest.approx(3 * total(eager, "weight_grad_s"))
    assert times_of(eager) == []
    assert "forwards 0.50 and backwards 3.00 times as long" in " ".join(times_of(compiled))


def test_times_of_eager_ops_are_refused_for_compiled_plans(known: KnownRatios, captured: Captured) -> None:
    how = HOW | {"ranks": 1, "captured": captured, "compile": True}
    assert "eager ops" in refused(PlanError, plan_job, JOB, **how, cluster="1 x cpu")
    assert "profile --compile" in refused(PlanError, plan_job, JOB, **how, profiled=seconds(captured))
    right = compiled_profile(captured, seconds(captured))
    assert times_of(plan_job(JOB, **how, profiled=right)) == times_of(plan_job(JOB, **how))


def test_caps_are_kept_by_the_stages_that_are_compiled(known, captured, monkeypatch):
    """Their backwards hold all gradients of parameters at once, which eager ones add up one by one."""
    traced = Mock(side_effect=lambda plan, *_, **how: plan.peaks)
    monkeypatch.setattr("pipeloom.plan_request.FAR_BELOW", 0.0)
    monkeypatch.setattr("pipeloom.plan_request.traced_peaks", traced)
    plan = plan_job(JOB, **HOW | {"ranks": 1}, memory="100MiB", compile=True, captured=captured)
    assert [call.kwargs["compiled"] for call in traced.call_args_list] == [True]
    assert plan.caps == (100 << 20,)


def test_a_plan_is_simulated_with_the_times_that_it_was_made_with(known, captured, folder, monkeypatch):
    monkeypatch.setenv("PIPELOOM_CONTENTION", "3")  # ranks slow each other
    monkeypatch.setattr("pipeloom.commands.simulate.job_of", lambda model: JOB)
    for way in (False, True):
        plan = plan_job(JOB, **HOW, captured=captured, compile=way)
        plan.save(folder / "plan.json")
        step = figures("simulate", "plan.json", "mine.py:job")
        assert step["step_s"] == pytest.approx(plan.predicted_step_s)


@pytest.mark.slow
def test_a_plan_made_with_the_compiler_trains_as_plain_pytorch(tmp_path: Path) -> None:
    plan = plan_job(JOB, **HOW, schedule="zb_h1", compile=True)
    assert "could not" not in times_of(plan)[0] and "times as long as eager" in times_of(plan)[0]
    assert len(list(tmp_path.glob("pipeloom/compiled/*"))) == 1
    batches = [JOB.batch(seed, 8) for seed in range(2)]
    assert_same(pipelined(JOB, plan, batches, compile=True), plain(JOB, batches, 4), tolerance=1e-4)

"""Memory optimisation of one stage: it keeps its cap, wastes nothing, and is close to the best choice."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings, strategies as st
from random_stages import random_model

from pipeloom.ir.action import RECOMPUTE
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import Buffer
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import StageGraph, cut
from pipeloom.lowering.passes import lower
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import moments
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage, host_copies, offload_all
from pipeloom.planner.treatments.choose import treat_interval
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate


def two_stages(model: CostModel, end: int) -> StageGraph:
    """The ops before `end`, and the others."""
    return cut(model.graph, {op.name: int(place >= end) for place, op in enumerate(model.readers.ops)})


def peak_of(model: CostModel, treatments: dict, in_flight: int, end: int) -> float:
    """Bytes of the ops before `end` as stage 0, by the way that plans are costed."""
    return estimate_stage(model, two_stages(model, end), 0, treatments).plan(in_flight).memory.total


def seconds_of(model: CostModel, treatments: dict, end: int) -> float:
    found = estimate_stage(model, two_stages(model, end), 0, treatments).treated
    tables = model.tables
    return found.turn_s(model, 0, float(tables.prefix_s[0, end]), float(tables.forward_s[0, :end].sum()))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(4, 20), st.integers(1, 8), st.floats(0.3, 1.0))
def test_what_fits_keeps_its_cap_and_every_pick_is_needed(seed, ops, in_flight, share):
    model, end = random_model(seed, ops), ops - 1
    treat = partial(treat_interval, model, 0, end, 0, in_flight=in_flight)
    free = treat(cap=inf)
    assert free.treatments == {} and free.peak_bytes == peak_of(model, {}, in_flight, end)
    cap = share * free.peak_bytes
    found = treat(cap=cap)
    if not found.fits:
        assert found.peak_bytes > cap
        return
    assert found.peak_bytes <= cap and found.seconds >= free.seconds * (1 - 1e-12)
    assert peak_of(model, found.treatments, in_flight, end) == pytest.approx(found.peak_bytes, abs=1)
    assert seconds_of(model, found.treatments, end) == pytest.approx(found.seconds)
    random_ops = {op.name for op in model.graph.ops if op.random}
    assert not random_ops & {name for name, how in found.treatments.items() if how == "recompute"}
    for name in found.treatments:
        fewer = {other: how for other, how in found.treatments.items() if other != name}
        faster = seconds_of(model, fewer, end) < found.seconds
        assert not faster or peak_of(model, fewer, in_flight, end) > cap, name


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), in_flight=st.integers(2, 8), share=st.floats(0.4, 0.95))
def test_against_all_choices_of_a_small_stage(seed, in_flight, share):
    model, end = random_model(seed, 8), 7
    treat = partial(treat_interval, model, 0, end, 0, in_flight=in_flight)
    cap = share * treat(cap=inf).peak_bytes
    names = candidates(model, end)
    if len(names) > 5:
        return  # 3 ** 6 choices take too long
    every = product(("keep", "recompute", "offload"), repeat=len(names))
    hows = ({n: how for n, how in zip(names, each, strict=True) if how != "keep"} for each in every)
    best = min((seconds_under(cap, model, end, in_flight, how) for how in hows), default=inf)
    found = treat(cap=cap)
    assert found.fits == (best < inf)
    assert not found.fits or best * (1 - 1e-9) <= found.seconds <= 1.5 * best


def seconds_under(cap: float, model: CostModel, end: int, in_flight: int, treatments: dict) -> float:
    try:
        fits = peak_of(model, treatments, in_flight, end) <= cap
    except PlanError:
        return inf  # a chain that cannot be
    return seconds_of(model, treatments, end) if fits else inf


def candidates(model: CostModel, end: int) -> list[str]:
    saved = {v for op in model.readers.ops[:end] for v in model.saves[op.name]}
    return [op.name for op in model.readers.ops[:end] if op.name in saved]


@pytest.mark.parametrize(
    ("link", "allowed", "expected"),
    [(1e6, None, "offload"), (1e-3, None, "recompute"), (1e6, ("recompute",), "recompute")],
)
def test_swaps_are_taken_only_while_hidden_and_then_what_is_worth_most(link, allowed, expected):
    """Twelve residuals of which a few fit beside computing."""
    treat = partial(treat_interval, random_model(3, 30, host_bytes_per_s=link), 0, 29, 0, in_flight=8)
    free = treat(cap=inf)
    found = treat(cap=0.85 * free.peak_bytes, **({"treatments": allowed} if allowed else {}))
    assert found.fits and set(found.treatments.values()) == {expected}
    assert (found.seconds == free.seconds) == (expected == "offload")


@pytest.mark.parametrize("fixed", [{"random": True}, {"random": False, "buffers": ("b",), "updates": ("b",)}])
def test_nothing_random_or_stateful_is_in_a_chain(fixed):
    model = random_model(3, 30, host_bytes_per_s=None)
    ops = tuple(replace(op, **fixed) for op in model.graph.ops)
    graph = replace(model.graph, ops=ops, buffers=(Buffer(name="b", shape=(1,), dtype="float32"),))
    profile = replace(model.profile, graph=graph.fingerprint)
    made = CostModel(graph, [profile] * 8, model.cluster, model.options)
    treat = partial(treat_interval, made, 0, 29, 0, in_flight=8)
    assert not treat(cap=0.95 * treat(cap=inf).peak_bytes).fits


def test_a_switch_is_shared_by_its_devices():
    model = random_model(3, 30, host_bytes_per_s=100.0)
    device = replace(model.cluster.devices[0], switch="s")
    uplink = {"s": Link(bandwidth_bytes_per_s=120.0)}
    lone = replace(device, switch=None)
    for sharing, expected in ((1, 100.0), (2, 60.0), (8, 15.0)):
        devices = (device,) * sharing + (lone,) * (8 - sharing)
        cluster = Cluster(devices=devices, within_node=model.cluster.within_node, switches=uplink)
        shared = CostModel(model.graph, [model.profile] * 8, cluster, model.options)
        copies = host_copies(shared, 0)
        assert copies is not None and 1 / copies.reload_s_per_byte == pytest.approx(100.0)
        assert 1 / (copies.reload_s_per_byte * copies.crowded) == pytest.approx(expected)
        together = CostModel(model.graph, [model.profile] * 8, cluster, model.options, ranks=(0,) * 8)
        assert host_copies(together, 0) == replace(copies, crowded=1.0), "one device has its link alone"


def test_the_host_has_room_for_all_micro_batches_in_flight():
    roomy, cramped = (random_model(3, 30, host_bytes_per_s=1e6, host_memory=room) for room in (0, 200))
    cap = 0.85 * treat_interval(roomy, 0, 29, 0, in_flight=8, cap=inf).peak_bytes
    size = {op.name: op.output_bytes for op in roomy.graph.ops}
    for model, most in ((roomy, inf), (cramped, 200)):
        found = treat_interval(model, 0, 29, 0, in_flight=8, cap=cap)
        away = sum(size[name] for name, how in found.treatments.items() if how == "offload")
        assert found.fits and 8 * away <= most


def test_costs_of_a_treated_stage():
    model = random_model(3, 30, host_bytes_per_s=8.0)
    free = treat_interval(model, 0, 29, 0, in_flight=8, cap=inf)
    found = treat_interval(model, 0, 29, 0, in_flight=8, cap=0.7 * free.peak_bytes)
    assert set(found.treatments.values()) == {"recompute", "offload"}
    stages = two_stages(model, 29)
    treated, last = estimate_stage(model, stages, 0, found.treatments), estimate_stage(model, stages, 1)
    part = treated.plan(8)
    cost, other = treated.simulator_cost(part), last.simulator_cost(last.plan(1))
    size = {op.name: op.output_bytes for op in model.graph.ops}
    early = treated.simulator_cost(part, ahead=True)
    for how, total in (("offload", cost.offloaded_bytes), ("recompute", early.recomputed_bytes)):
        assert total == sum(size[name] for name, own in found.treatments.items() if own == how) > 0
    assert early.residual_bytes == estimate_stage(model, stages, 0).simulator_cost(part).residual_bytes
    assert cost.residual_bytes == early.residual_bytes - early.recomputed_bytes and not cost.recomputed_bytes
    assert early.recompute_s == part.recompute_s > 0 == cost.recompute_s
    for inside_s, ahead_s in ((cost.backward_s, early.backward_s), (cost.input_grad_s, early.input_grad_s)):
        assert inside_s == pytest.approx(ahead_s + early.recompute_s)
    assert cost.reload_s == early.reload_s == cost.offloaded_bytes / 8
    assert early.transient_bytes[RECOMPUTE] >= 0 == cost.transient_bytes[RECOMPUTE]
    assert other.recompute_s == 0 and part.recomputed_bytes == early.recomputed_bytes
    assert part.offloaded_bytes == early.offloaded_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ahead", [False, True])
def test_the_simulator_needs_no_more(seed, schedule, ahead):
    """Messages apart: how long one waits for its receiver depends on the other stages."""
    count, each, microbatches = 4 + 2 * (seed % 2), 8, 12
    how = {"microbatches": microbatches, "equal_times": True, "host_bytes_per_s": (5.0, 40.0, 1e4)[seed % 3]}
    model = random_model(seed, count * each, **how)
    stages = cut(model.graph, {op.name: place // each for place, op in enumerate(model.readers.ops)})
    made = registry.build(schedule, stages, tuple(range(count)), microbatches)
    in_flight = registry.in_flight(made)
    found = []
    for stage, q in enumerate(in_flight):
        own = partial(treat_interval, model, stage * each, (stage + 1) * each, stage, in_flight=q)
        caps = [share * own(cap=inf).peak_bytes for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
        found.append(next(tight for cap in caps if (tight := own(cap=cap)).fits).treatments)
    estimates = [estimate_stage(model, stages, s, treatments) for s, treatments in enumerate(found)]
    early = tuple(range(count)) if ahead else ()
    each_q = [*zip(estimates, in_flight, strict=True)]
    costs = tuple(one.simulator_cost(one.plan(q, ahead=ahead), ahead=ahead) for one, q in each_q)
    program = lower(made, stages, policy=MemoryPolicy(stages=tuple(found), ahead=early))
    drops = any("recompute" in own.values() for own in found)
    assert any(found) and ("RECOMPUTE" in str(program)) == (ahead and drops)
    peaks = simulate(program, stages, costs, model.cluster).peaks
    for estimate, peak, q in zip(estimates, peaks, in_flight, strict=True):
        scratch = estimate.treated.ahead if ahead else None
        each_moment = moments(estimate.treated.footprint, model.options, q, scratch)
        most = max(moment.residuals + moment.transient for moment in each_moment)
        assert peak["residuals"] + peak["transient"] <= most


def test_unknown_or_impossible_treatments_are_refused():
    model = random_model(3, 30, host_bytes_per_s=None)
    names = candidates(model, 29)
    frozen = next(op.name for op in model.graph.ops if op.random and op.name in names)
    for name, how, word in (
        (f"{names[0]}0", "recompute", "no residual named"),
        (names[0], "offload", "link to a host"),
        (frozen, "recompute", "random"),
    ):
        with pytest.raises(PlanError, match=word):
            estimate_stage(model, two_stages(model, 29), 0, {name: how})


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_where_a_schedule_copies_what_is_made_again_takes_less_than_its_copies(seed: int) -> None:
    model = random_model(seed, 8)
    stages, copies = two_stages(model, 7), host_copies(model, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeloom.planner.stage_cost.stage_estimate.SMALL_RESIDUAL", 0)
        treatments = offload_all(model, stages, 0)
    assert copies is not None and set(treatments.values()) <= {"offload", "recompute"}
    whole = estimate_stage(model, stages, 0, treatments).treated  # refuses what cannot be made again
    assert whole.footprint.residuals >= 0
    for name, how in treatments.items():
        alone = estimate_stage(model, stages, 0, {name: "offload"}).treated
        if how == "recompute":
            again = estimate_stage(model, stages, 0, {name: "recompute"}).treated
            assert again.recompute_s < alone.offload_s + alone.reload_s


def test_small_ones_stay() -> None:
    """Random models have a few elements per value."""
    model = random_model(3, 8)
    named = {out.name for op in model.readers.ops[:7] for out in op.outputs}
    assert not named & set(offload_all(model, two_stages(model, 7), 0))


# Which residuals are kept, as checkpoints of what is recomputed.


@pytest.mark.parametrize(
    ("seed", "ops", "in_flight", "share", "best_s"),
    [
        (801710, 21, 1, 0.7011181581941688, 69.13503737605913),
        (782070, 20, 4, 0.4470034551904057, 77.70583186729905),
        (812158, 7, 1, 0.9398580033433368, 16.914608352340434),
    ],
)
def test_what_can_fit_fits(seed, ops, in_flight, share, best_s):
    """best_s: of the best choice there is, by integer programming."""
    treat = partial(treat_interval, random_model(seed, ops), 0, ops - 1, 0, in_flight=in_flight)
    found = treat(cap=share * treat(cap=inf).peak_bytes)
    assert found.fits and best_s * (1 - 1e-9) <= found.seconds <= 1.2 * best_s

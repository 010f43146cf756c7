"""Advice where no plan fits is followed here, and leads to a plan."""

import re
from dataclasses import replace

import pytest
import zoo

from pipeloom import planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planning import captured_model, make_request
from pipeloom.tracer.captured import Captured

SIZE = 4


@pytest.fixture(scope="module")
def captured() -> Captured:
    return planning.capture(zoo.job("gpt2"), SIZE)


def request_for(cluster: str, **more: object) -> PlanRequest:
    options = {"ranks": 2, "microbatches": 4, **more}
    return make_request(zoo.job("gpt2"), cluster=find_cluster(cluster), **options)


def refused(how: PlanRequest, sample: ProfiledModel) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        plan_with_advice(how, sample)
    return caught.value


def followed(how: PlanRequest, advice: str) -> PlanRequest:
    """The request as a piece of advice wants it."""
    devices = how.cluster.devices
    if stages := re.fullmatch(r"use (\d+) (?:stages|ranks \(--ranks \d+\))(?: on \d+ devices)?", advice):
        count = int(stages[1])
        return replace(how.changed(ranks=count), cluster=replace(how.cluster, devices=devices[:1] * count))
    if way := re.search(r"--treatments (\w+)", advice):
        return how.changed(treatments=way[1])
    if other := re.match(r"use planner (\w+)", advice):
        return how.changed(planner=other[1])
    sizes = dict(re.findall(r"(\S+(?: device)?) at least (\S+ \w+)", advice))
    assert sizes, advice
    said = [sizes.get("each device") or sizes.get(device.name) for device in devices]
    given = [parse_bytes(size or device.memory_bytes) for size, device in zip(said, devices, strict=True)]
    own = tuple(replace(d, memory_bytes=size) for d, size in zip(devices, given, strict=True))
    return replace(how, cluster=replace(how.cluster, devices=own))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("share", "how", "kinds"),
    [
        pytest.param(0.9, {}, "give, use, let", marks=pytest.mark.slow),
        (0.9, {"planner": "equal"}, None),
        (0.9, {"planner": "pipedream"}, "give, use, use"),
        pytest.param(0.9, {"schedule": "zb_h1"}, "give, use, let", marks=pytest.mark.slow),
        pytest.param(0.9, {"treatments": ("offload",)}, None, marks=pytest.mark.slow),
        pytest.param(0.6, {"schedule": "zb_v"}, None, marks=pytest.mark.slow),
        (0.001, {}, "give"),
        pytest.param(0.001, {"planner": "dawnpiper"}, "give", marks=pytest.mark.slow),
        pytest.param(0.001, {"planner": "balanced"}, "give", marks=pytest.mark.slow),
    ],
)
def test_every_piece_leads_to_a_plan(
    captured: Captured, share: float, how: dict[str, object], kinds: str | None
) -> None:
    free = request_for("2 x a100-40", **how)
    sample = captured_model(zoo.job("gpt2"), SIZE, free.cluster, captured=captured)
    most = max(free.plan(sample).peaks)
    tight = request_for(f"2 x a100-40 with {int(share * most)}B", **how)
    if tight.fits(sample):
        tight = request_for(f"2 x a100-40 with {int(share * most / 3)}B", **how)
    pieces = str(refused(tight, sample).hint).split(", or ")
    assert kinds is None or ", ".join(piece.split()[0] for piece in pieces) == kinds
    for piece in pieces:
        assert followed(tight, piece).fits(sample), piece


def test_devices_that_differ_are_named(captured: Captured) -> None:
    """The hint said "17.6 MiB to 30.2 MiB", and not of which."""
    how = request_for("a100-40 with 200KiB + v100-32 with 300KiB")
    sample = captured_model(zoo.job("gpt2"), SIZE, how.cluster, captured=captured)
    hint = str(refused(how, sample).hint).split(", or ")[0]
    assert re.fullmatch(r"give each device at least \S+ \S+", hint)
    assert followed(how, hint).fits(sample)


@pytest.mark.slow
def test_only_devices_that_need_more_are_named(captured: Captured) -> None:
    """The hint wanted 624 GiB of the larger device, as much more as the smaller one needs."""
    how = request_for("a100-40 + v100-32 with 1KiB")
    sample = captured_model(zoo.job("gpt2"), SIZE, how.cluster, captured=captured)
    hint = str(refused(how, sample).hint).split(", or ")[0]
    assert re.fullmatch(r"give v100-32-sxm at least \S+ \S+", hint)
    enough = followed(how, hint)
    assert enough.fits(sample)
    large, small = enough.cluster.devices
    tighter = replace(small, memory_bytes=int(small.memory_bytes / 1.05))
    assert not replace(how, cluster=replace(how.cluster, devices=(large, tighter))).fits(sample)


@pytest.mark.slow
def test_the_largest_micro_batch_is_named_by_planners_that_free_nothing() -> None:
    job, how = zoo.job("gpt2"), request_for("2 x a100-40", planner="equal")
    most = max(planning.plan_size(how.changed(microbatch_size=2), job)[0].peaks)
    tight = request_for(f"2 x a100-40 with {most + 50_000}B", planner="equal")
    with pytest.raises(InfeasibleError) as caught:
        planning.plan_size(tight.changed(microbatch_size=16), job)
    size = re.search(r"use micro-batches of (?:at most )?(\d+) row", str(caught.value.hint))
    assert size is not None
    smaller = tight.changed(microbatch_size=int(size[1]))
    assert planning.plan_size(smaller, job)[0].microbatch_size == int(size[1]) >= 2

"""The rule for weight versions, against the published counts and orders."""

from dataclasses import replace

import pytest
import refusals
from small import built, by_hand

from pipeloom.checks.weight_versions import versions, weight_versions
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.weight_policies import Updates
from pipeloom.schedules import registry

STASH = Updates(policy="stash")


def one_f_one_b(depth: int, microbatches: int = 24, split: bool = False) -> Schedule:
    return built("async_1f1b", depth, microbatches, split_backward=split)


def refused(made: Schedule, updates: Updates, stages: StageGraph | None = None) -> str:
    return refusals.refused(ScheduleError, weight_versions, made, stages or chain(made.stages), updates)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_pipedream_keeps_depth_minus_stage_versions(depth: int, split: bool) -> None:
    """d - s versions at stage s (from 0), and gradients that are d - 1 - s updates late."""
    made = one_f_one_b(depth, split=split)
    found = versions(made, STASH)
    assert [stage.needed for stage in found] == [depth - s for s in range(depth)]
    assert [stage.staleness[-1] for stage in found] == [depth - 1 - s for s in range(depth)]
    assert [max(stage.staleness) for stage in found] == [depth - 1 - s for s in range(depth)]
    weight_versions(made, chain(depth), STASH)


@pytest.mark.parametrize("depth", range(2, 7))
def test_2bw_needs_two_versions_and_as_many_micro_batches_as_stages_but_one(depth: int) -> None:
    """Micro-batches per update from d - 1 on do, d - 2 make the version late; delay 1 on all stages."""
    for every in range(max(depth - 2, 1), 2 * depth + 1):
        made = one_f_one_b(depth, 3 * every * (every + 1))
        updates = Updates(policy="2bw", every=every)
        if every < depth - 1:
            message = refused(made, updates)
            assert f"rank 0 runs 0F{2 * every} with weight version 1, but the newest there is 0" in message
            assert f"hint: update every {every + 1} micro-batches" in message
            continue
        for stage in versions(made, updates):
            assert stage.needed == 2
            assert stage.used == tuple(max(k // every - 1, 0) for k in range(made.microbatches))
            assert stage.staleness == (0, *[1] * (made.microbatches // every - 1))


@pytest.mark.sampled("forward_only", "eager_1f1b", "zb_1p", "v_min", "dualpipev", "gis", "chimera", "po_h")
@pytest.mark.parametrize("name", registry.names())
def test_flush_keeps_one_version(name: str) -> None:
    found = versions(built(name, 4, 8), Updates())
    assert {stage.needed for stage in found} == {1}
    assert {late for stage in found for late in stage.staleness} <= {0}


TIED = dag(3, [(0, 1), (1, 2)], params={0: ("wte",), 2: ("wte",)})
LATE = "with weight version 0"


@pytest.mark.parametrize(
    ("made", "stages", "updates", "words"),
    [
        *((one_f_one_b(4, 8), chain(4), Updates(policy="stash", kept=k), f"0B{k} {LATE}") for k in (1, 2, 3)),
        (one_f_one_b(4, 8), chain(4), Updates(policy="stash", kept=4), ""),
        (by_hand("0F0 0F1 0I0 0I1 0W0 0W1"), chain(1), Updates(policy="stash", kept=1), f"0W1 {LATE}"),
        (by_hand("0F0 0B0 0F1 0B1 0F2 0B2"), chain(1), Updates(policy="2bw", kept=1), f"0F1 {LATE}"),
        (by_hand("0F0 0B0 0F1 0B1 0F3 0B3 0F2 0B2"), chain(1), Updates(policy="2bw", every=2), ""),
        (one_f_one_b(2, 10), chain(2), Updates(policy="stash", every=4), "multiple of 4"),
        (one_f_one_b(3, 6), TIED, STASH, "share wte, but 0F1 uses version 0 and 2F1 version 1"),
        (one_f_one_b(3, 6), TIED, Updates(policy="2bw", every=2), ""),
        (one_f_one_b(3, 6), TIED, Updates(), ""),
    ],
)
def test_versions_that_are_kept_and_shared_and_whole_updates(made, stages, updates, words) -> None:
    if words:
        assert words in refused(made, updates, stages)
    else:
        weight_versions(made, stages, updates)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "every"),
    [("1f1b", 8, 2000, 8), ("1f1b", 4, 9, 3), ("gpipe", 2, 9, 0), ("zb_v", 4, 20, 0)],
)
def test_2bw_says_how_seldom_updates_may_be(name: str, ranks: int, microbatches: int, every: int) -> None:
    """Of a long schedule too, without trying each number; all updates have as many micro-batches, and some
    use weights that were made. Where none can be so, no number is told."""
    made, two = built(name, ranks, microbatches), Updates(policy="2bw")
    told = refused(made, two)
    assert (f"update every {every} micro-batches" in told) == bool(every), told
    if every:
        weight_versions(made, chain(ranks), replace(two, every=every))


def test_slices_of_a_micro_batch_share_a_version() -> None:
    found = versions(built("seq1f1b:slices=2", 2, 12), STASH)
    assert [len(stage.used) for stage in found] == [6, 6]
    assert found[0].needed == 2 and found[1].needed >= 1


@pytest.mark.parametrize("wrong", [{"policy": "newest"}, {"every": 0}, {"kept": 0}])
def test_updates_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        Updates(**wrong)  # type: ignore[arg-type]

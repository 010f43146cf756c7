"""Plans for schedules with several stages per rank, or with replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_schedule import gpt_job, plan_of
from runs import capture_of, graph_of as graph_at, shared_captures, threads

from pipeloom import Job, Pipeline, planning, verify
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import InfeasibleError, PlanError, ScheduleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.units import format_bytes
from pipeloom.lowering.passes import lower
from pipeloom.planner.placement import stages_for
from pipeloom.planner.plan_table import limits, plan_rows
from pipeloom.schedules import registry
from pipeloom.schedules.formats import program_text

SEVERAL = ["zb_v", "interleaved_1f1b", "dualpipe"]


@pytest.fixture(scope="module")
def gpt() -> Job:
    return gpt_job()


def planned(job: Job, schedule: str, *, microbatches: int = 4, memory: str | None = None) -> Plan:
    return planning.plan(
        job,
        ranks=2,
        microbatches=microbatches,
        microbatch_size=1,
        schedule=schedule,
        cluster=cpu_cluster(2, memory=memory),
        captured=capture_of(job, 1),
        memory=memory,
    )


def graph_of(job: Job) -> OpGraph:
    return graph_at(job, 1)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_planner_cuts_for_the_placement(gpt: Job, name: str) -> None:
    found = planned(gpt, name)
    stages, placement = registry.default_placement(name, 2)
    assert found.placement == placement and found.schedule == name
    assert len(found.stages) == stages_for(name, 2) == len(stages.stages) // stages.replicas
    graph, cluster = graph_of(gpt), cpu_cluster(2)
    step = planning.simulate(found, graph, planning.estimate(graph, cluster), cluster)
    assert step.ranks == 2 and step.step_s == pytest.approx(found.predicted_step_s)


def test_replicas_cost_what_each_of_them_holds(gpt: Job) -> None:
    """Both ranks of a bidirectional schedule hold all parameters, of a V what its own stages read; a tied
    one that two stages of a rank read is there once."""
    graph, cluster = graph_of(gpt), cpu_cluster(2)
    total = sum(p.bytes for p in graph.parameters)
    costs = planning.estimate(graph, cluster)
    for name in ("dualpipe", "zb_v"):
        plan = planned(gpt, name)
        params = plan.replicated(plan.stage_graph(graph)).params
        for rank, peak in enumerate(planning.simulate(plan, graph, costs, cluster).peaks):
            own = {n for s, home in enumerate(plan.placement) if home == rank for n in params[s]}
            assert peak["parameters"] == sum(graph.parameter[n].bytes for n in own)
            assert (peak["parameters"] == total) == (name == "dualpipe")


@pytest.mark.slow
def test_too_little_memory_is_refused(gpt: Job) -> None:
    with pytest.raises(InfeasibleError, match="cap is"):
        planned(gpt, "dualpipe", memory="20KiB")


def test_an_odd_number_of_microbatches_has_no_two_directions(gpt: Job) -> None:
    with pytest.raises(PlanError, match="chimera runs in 2 directions, there are 3 micro-batches"):
        planned(gpt, "chimera", microbatches=3)


@pytest.mark.parametrize("name", ["dualpipe", pytest.param("zb_v", marks=pytest.mark.slow)])
def test_steps_are_predicted_and_measured(gpt: Job, name: str) -> None:
    plan = plan_of(gpt, name, 2, microbatches=4)

    def work(rank: int, channel: object) -> tuple[set[str], set[str]]:
        with Pipeline(gpt, plan, channel=channel) as pipeline:
            predicted = pipeline.predict()
            pipeline.step(gpt.batch(0, 4))
            measured = pipeline.measured()
        return tuple(
            {e.action for e in timeline.events if e.stream == "compute" and e.action[-1].isdigit()}
            for timeline in (predicted, measured)
        )  # type: ignore[return-value]

    with shared_captures():
        for predicted, measured in threads(2, work):
            assert (
                predicted
                == measured
                == {word for row in plan.schedule_rows for word in row.replace("&", " ").split()}
            )


def test_a_file_of_actions_is_a_schedule(gpt: Job, tmp_path: Path) -> None:
    """As torch writes one: two stages on each of two ranks, with transfers."""
    file = tmp_path / "theirs.csv"
    stages, placement = registry.default_placement("looped_bfs", 2)
    file.write_text(program_text(lower(registry.build("looped_bfs", stages, placement, 4), stages)))
    plan = planned(gpt, str(file))
    assert plan.placement == (0, 1, 0, 1)
    file.unlink()
    verify(gpt, plan).require()


def test_a_file_for_other_numbers_is_refused(gpt: Job, tmp_path: Path) -> None:
    file = tmp_path / "theirs.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match="is for 3 ranks, not 2"):
        planned(gpt, str(file))
    file.write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="is for 1 micro-batches, not 4"):
        planned(gpt, str(file))
    with pytest.raises(ScheduleError, match="cannot read .*none.csv"):
        planned(gpt, str(tmp_path / "none.csv"))


def test_ranks_of_several_stages_are_filled_by_all_of_them(gpt: Job) -> None:
    """Each stage was held against the whole rank's cap, by what it would hold under 1F1B."""
    found = planned(gpt, "zb_v", memory="1MiB")
    graph, cluster = graph_of(gpt), cpu_cluster(2, memory="1MiB")
    step = planning.simulate(found, graph, planning.estimate(graph, cluster), cluster)
    assert found.peaks == tuple(step.peak_bytes(rank) for rank in range(2))
    filled = [row.filled for row in plan_rows(found)]
    assert filled == [found.peaks[rank] / 2**20 for rank in found.placement]
    most = max(found.peaks)
    fullest = f"the fullest is rank {found.peaks.index(most)}, with {format_bytes(most)} of 1.0 MiB ("
    assert limits(found)[-1].startswith(f"no rank is full: {fullest}")
    assert "to spare" not in limits(found)[-1], "memory may bind all the same: cuts that just do not fit"

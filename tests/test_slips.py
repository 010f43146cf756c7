"""Slips in calls and on the command line: they ended in a traceback or in another library's error, or went on
as if nothing were wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zoo
from click.testing import CliRunner
from plain_net import two_linears

from pipeloom import (
    Job,
    Options,
    Pipeline,
    PipeloomError,
    Plan,
    capture,
    load_plan,
    plan,
    profile,
    search_schedule,
)
from pipeloom.cli import main
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import BatchError, CaptureError, ConfigError, InfeasibleError, PlanError
from pipeloom.plan_request import PlanRequest
from pipeloom.tracer.job import load_job

ROWS = 4
STAGES = {"stage": [{"F": 1, "B": 2, "ranks": rank} for rank in range(2)]}


def plan_of(job: Job) -> Plan:
    return plan(job, ranks=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")


def pipeline_of(device: str = "cpu") -> Pipeline:
    return Pipeline(two_linears(), plan_of(two_linears()), options=Options(device=device))


def planned_without_chunks() -> Plan:
    how = {"ranks": 2, "microbatch_size": ROWS, "cluster": "2 x cpu", "schedule": "interleaved"}
    return plan(two_linears(), chunks=0, **how)  # type: ignore[arg-type]


def batch_without_names() -> Plan:
    job = zoo.job("skips")
    bare = Job(model=job.model, batch=lambda seed, rows: next(iter(job.batch(seed, rows).values())))  # type: ignore[return-value]
    return plan(bare, ranks=2, microbatch_size=2)


def batch_without_tensors() -> object:
    with pipeline_of() as pipeline:
        return pipeline.step({})


@pytest.mark.parametrize(
    ("slip", "error", "word"),
    [
        (lambda: capture(two_linears(), 0), CaptureError, "microbatch_size is 0"),
        (planned_without_chunks, ConfigError, "chunks is 0"),
        (lambda: search_schedule(STAGES, 4, shortest="day"), ConfigError, "shortest='day'"),
        (lambda: profile(capture(two_linears(), 2), device="tpu"), ConfigError, "'tpu'"),
        (lambda: profile(capture(two_linears(), 2), device=None), ConfigError, "None"),
        (lambda: profile(capture(two_linears(), 2), device="cuda:99"), ConfigError, "'cuda:99'"),
        (lambda: pipeline_of("xpu"), ConfigError, "'xpu'"),
        (lambda: pipeline_of("cuda:99"), ConfigError, "'cuda:99'"),
        (batch_without_names, CaptureError, "Tensor, not a dictionary"),
        (batch_without_tensors, BatchError, "no tensors"),
    ],
)
def test_slips_in_calls(slip: Callable[[], object], error: type[PipeloomError], word: str) -> None:
    with pytest.raises(error, match=word) as caught:
        slip()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["plan", "-o", ""], "names no file"),
        (["cluster", "show", "2 x a100-40", "-o", ""], "names no file"),
        (["plan", "./mine:job"], "'./mine' is no name of a module"),
        (["plan", "./mine:job"], "did you mean ./mine.py:job?"),
        (["cluster", "show", "1000000 x a100-40"], "1000000 devices"),
    ],
)
def test_slips_on_the_command_line(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "did you mean" in word:
        Path("mine.py").touch()
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert word in done.output


def test_no_checkpoint_to_keep(tmp_path: Path) -> None:
    with pipeline_of() as pipeline, pytest.raises(ConfigError, match="keep=0"):
        pipeline.save(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())


def test_paths_and_clusters_may_be_text(tmp_path: Path) -> None:
    """They gave AttributeError: 'str' object has no attribute ..."""
    job, path, kept = two_linears(), f"{tmp_path}/plan.json", f"{tmp_path}/checkpoints"
    made = plan_of(job)
    made.save(path)
    assert load_plan(path) == made
    with Pipeline(job, path) as pipeline:
        pipeline.step(job.batch(0, 2 * ROWS))
        pipeline.save(kept, extra={"at": 1})
        assert pipeline.load(kept) == {"at": 1}
    file = tmp_path / "two.toml"
    assert CliRunner().invoke(main, ["cluster", "show", "2 x a100-40", "-o", str(file)]).exit_code == 0
    job = zoo.job("skips")
    assert plan(job, ranks=2, microbatch_size=2, cluster=file).stages
    assert plan(job, ranks=2, microbatch_size=2, memory="1GiB", offload_dir=str(tmp_path)).stages


def test_modules_may_have_names_that_are_no_identifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("01-mine.py").write_text("from zoo import job as of\n\ndef job():\n    return of('skips')\n")
    assert load_job("01-mine:job").batch is not None


def test_more_stages_per_rank_than_ops_are_said_in_ranks() -> None:
    """ "80 stages: use at most 19 stages", where 9 ranks with two stages each would do."""
    how = {"microbatch_size": 2, "cluster": find_cluster("40 x cpu"), "schedule": "zb_v"}
    with pytest.raises(PlanError, match="zb_v on 40 ranks is for 80 stages") as caught:
        plan(zoo.job("skips"), ranks=40, **how)
    ranks = int(str(caught.value.hint).split("--ranks ")[1].rstrip(")"))
    assert plan(zoo.job("skips"), ranks=ranks, **how).placement[0] == 0


@pytest.mark.slow
def test_a_cap_whose_unit_was_forgotten_is_what_is_said() -> None:
    """Scaled as the smaller device needs, the larger one would have had more than there can be."""
    job = zoo.job("gpt2")
    with pytest.raises(InfeasibleError, match="cap is 16 B"):
        plan(job, ranks=2, microbatch_size=2, cluster="v100-32 with 16 + a100-80", planner="exact")


def test_a_planner_with_an_account_of_its_own_does_not_say_that_no_cut_fits() -> None:
    """ "no cut fits: stage 1 needs 14.4 KiB, its device's cap is 16.7 KiB", where `exact` had a plan."""
    job, how = zoo.job("skips"), {"ranks": 4, "microbatches": 4, "microbatch_size": 16}
    free = plan(job, cluster="4 x a100-40", **how)  # type: ignore[arg-type]
    how |= {"cluster": "4 x a100-40", "memory": int(0.88 * max(free.peaks))}
    assert plan(job, **how).peaks  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="own account"):
        plan(job, planner="piper-ops", **how)  # type: ignore[arg-type]


def test_what_if_of_a_schedule_whose_groups_are_its_own() -> None:
    """A KeyError, once the plan was made: only planners that choose schedules name them all in one way."""
    words = ["plan", "-p", "2", "-m", "8", "-s", "gis_g", "--cluster", "2 x cpu", "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["what_if"]


@pytest.mark.slow
def test_a_plan_is_there_before_what_if_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a bit more memory was tried lost the plan."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanRequest, "changes", interrupted)
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(main, ["plan", "--cluster", "2 x a100-40", "-o", str(file)])
    assert done.exit_code == 130
    assert file.exists()


def test_writing_leaves_links_and_other_files_alone(tmp_path: Path) -> None:
    real, link, other = tmp_path / "real.toml", tmp_path / "link.toml", tmp_path / "link.toml.partial"
    real.touch()
    link.symlink_to(real)
    other.write_text("mine")
    assert CliRunner().invoke(main, ["cluster", "show", "2 x a100-40", "-o", str(link)]).exit_code == 0
    assert link.is_symlink() and "a100" in real.read_text()
    assert other.read_text() == "mine"


@pytest.mark.parametrize(("target", "status"), [("missing/file.toml", 2), ("link.toml", 0)])
def test_links_that_lead_nowhere(tmp_path: Path, target: str, status: int) -> None:
    """To a folder that is not there, and to itself: the first is refused, the second becomes a file."""
    link = tmp_path / "link.toml"
    link.symlink_to(tmp_path / target)
    done = CliRunner().invoke(main, ["cluster", "show", "2 x a100-40", "-o", str(link)])
    assert done.exit_code == status
    assert ("cannot write" in done.output) == bool(status)
    assert link.exists() == (not status)

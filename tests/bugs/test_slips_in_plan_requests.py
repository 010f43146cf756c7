"""Requests for plans that ended in a traceback, in the wrong number, or without the plan that was made."""

import json
from pathlib import Path

import pytest
import zoo
from click.testing import CliRunner

from pipeloom import Job, plan
from pipeloom.cli import main
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import CaptureError, ConfigError, InfeasibleError, PlanError
from pipeloom.plan_request import PlanRequest
from pipeloom.tracer.job_loader import load_job


def test_more_stages_per_rank_than_ops_are_said_in_ranks() -> None:
    """ "80 stages: use at most 19 stages", where 9 ranks with two stages each would do."""
    how = {"microbatch_size": 2, "cluster": find_cluster("40 x cpu"), "schedule": "zb_v"}
    with pytest.raises(PlanError, match="zb_v on 40 ranks is for 80 stages, the model has") as caught:
        plan(zoo.job("skips"), ranks=40, **how)
    ranks = int(str(caught.value.hint).split("--ranks ")[1].rstrip(")"))
    assert plan(zoo.job("skips"), ranks=ranks, **how).placement[0] == 0


def test_a_batch_that_is_no_dictionary() -> None:
    job = zoo.job("skips")
    bare = Job(model=job.model, batch=lambda seed, rows: next(iter(job.batch(seed, rows).values())))  # type: ignore[return-value]
    with pytest.raises(CaptureError, match="Job.batch returned a Tensor, not a dictionary"):
        plan(bare, ranks=2, microbatch_size=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "-o", ""], "names no file"),
        (["cluster", "show", "2 x a100-40", "-o", ""], "names no file"),
        (["plan", "./mine:job"], "'./mine' is no name of a module"),
        (["cluster", "show", "1000000 x a100-40"], "1000000 devices"),
    ],
)
def test_said_in_a_sentence(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.slow
def test_a_cap_whose_unit_was_forgotten_is_what_is_said() -> None:
    """Scaled as the smaller device needs, the larger one would have had more than there can be."""
    job = zoo.job("gpt2")
    with pytest.raises(InfeasibleError, match="its device's cap is 16 B"):
        plan(job, ranks=2, microbatch_size=2, cluster="v100-32 with 16 + a100-80", planner="exact")


def test_what_if_of_a_schedule_whose_groups_are_its_own() -> None:
    """A KeyError, once the plan was made: only planners that choose schedules name them all in one way."""
    words = ["plan", "-p", "2", "-m", "8", "-s", "gis_g", "--cluster", "2 x cpu", "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["what_if"]


def test_modules_may_have_names_that_are_no_identifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("01-mine.py").write_text("from zoo import job as of\n\ndef job():\n    return of('skips')\n")
    assert load_job("01-mine:job").batch is not None


def test_a_path_of_a_file_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    done = CliRunner().invoke(main, ["plan", "./mine:job"])
    assert "did you mean ./mine.py:job?" in done.output


def test_a_device_that_computes_at_no_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flops_per_s\[float32\] = 0"):
        Device(name="card", memory_bytes=1, flops_per_s={"float32": 0.0})


def test_a_latency_beyond_all_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="latency 1e\\+308"):
        Cluster(
            devices=(Device(name="card", memory_bytes=1),),
            within_node=Link(bandwidth_bytes_per_s=1.0, latency_s=1e308),
        )


def test_clusters_and_folders_are_taken_as_text_and_as_paths(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    assert CliRunner().invoke(main, ["cluster", "show", "2 x a100-40", "-o", str(file)]).exit_code == 0
    job = zoo.job("skips")
    assert plan(job, ranks=2, microbatch_size=2, cluster=file).stages
    assert plan(job, ranks=2, microbatch_size=2, memory="1GiB", offload_dir=str(tmp_path)).stages


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


def test_a_planner_with_an_account_of_its_own_does_not_say_that_no_cut_fits() -> None:
    """ "no cut fits: stage 1 needs 14.4 KiB, its device's cap is 16.7 KiB", where `exact` had a plan."""
    job, how = zoo.job("skips"), {"ranks": 4, "microbatches": 4, "microbatch_size": 16}
    free = plan(job, cluster="4 x a100-40", **how)  # type: ignore[arg-type]
    how |= {"cluster": "4 x a100-40", "memory": int(0.88 * max(free.peaks))}
    assert plan(job, **how).peaks  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="own account"):
        plan(job, planner="piper-ops", **how)  # type: ignore[arg-type]

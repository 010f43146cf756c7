"""Files are written in their own directory, whatever links somebody has put there."""

import os
from pathlib import Path

import pytest

from pipeloom.ir.errors import ConfigError
from pipeloom.ir.text_files import write_whole
from pipeloom.train.run_directory import find_run, new_run


def test_a_name_that_can_be_foreseen_leads_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "plan.json"
    (tmp_path / f"plan.json.{os.getpid()}.partial").symlink_to(victim)
    write_whole(target, "theirs")
    assert victim.read_text() == "mine"
    assert target.read_text() == "theirs" and not target.is_symlink()


def test_files_get_the_rights_that_the_user_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json", "checkpoint"])
def test_a_run_does_not_follow_links_out_of_its_directory(tmp_path: Path, name: str) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    _ = victim.mkdir() if name == "checkpoint" else victim.write_text("mine")
    (run / name).symlink_to(victim)
    if name != "config.toml":
        (run / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=f"{name} is a link to {victim}: a run keeps its files in its own"):
        find_run("run", run)


def test_a_new_run_refuses_a_directory_of_links(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="metrics.jsonl is a link to"):
        new_run("run", tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "summary.json")
    with pytest.raises(ConfigError, match="summary.json is in the way of a run's file"):
        new_run("run", tmp_path)


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "config.toml").write_text("")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert find_run("run", tmp_path / "run") == tmp_path / "run"

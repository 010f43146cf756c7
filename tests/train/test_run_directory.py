"""Which directory a run gets, and which one is resumed."""

from pathlib import Path

import pytest

from pipeloom.ir.errors import ConfigError
from pipeloom.train.run_directory import STARTED, DirectorySnapshot, find_run, new_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(run: Path) -> Path:
    (run / "config.toml").write_text("")
    return run


def test_runs_are_numbered_and_the_newest_is_found() -> None:
    assert new_run("gpt", None) == Path("runs/gpt-1")
    started(Path("runs/gpt-1"))
    started(new_run("gpt-2", None))  # another name, which looks like a number of the first
    for _ in range(9):
        started(new_run("gpt", None))
    assert Path("runs/gpt-10").is_dir() and Path("runs/gpt-2-1").is_dir()
    new_run("gpt", None)  # died before it wrote anything
    assert find_run("gpt", None) == Path("runs/gpt-10")
    assert find_run("gpt-2", None) == Path("runs/gpt-2-1")
    assert find_run("gpt", Path("runs/gpt-3")) == Path("runs/gpt-3")


def test_a_given_directory_is_not_overwritten() -> None:
    out = new_run("gpt", Path("deep/inside"))
    assert out == Path("deep/inside") and out.is_dir()
    started(out)
    with pytest.raises(ConfigError, match="deep/inside holds a run already\nhint: add --resume"):
        new_run("gpt", out)


def test_what_is_wrong_is_said(here: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run runs/gpt-<n> to resume"):
        find_run("gpt", None)
    with pytest.raises(ConfigError, match="nowhere holds no run"):
        find_run("gpt", Path("nowhere"))
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a run directory: file: it is no folder"):
        new_run("gpt", Path("file/out"))


def test_a_start_that_ends_before_training_leaves_nothing() -> None:
    """What the ranks refused left a run behind, and the next try was told "holds a run already"."""
    before = DirectorySnapshot.of(Path("a"))
    started(new_run("gpt", Path("a")))
    before.restore(Path("a"))
    assert not Path("a").exists()

    Path("b").mkdir()
    (Path("b") / "mine.txt").write_text("")
    before = DirectorySnapshot.of(Path("b"))
    started(new_run("gpt", Path("b")))
    before.restore(Path("b"))
    assert [path.name for path in Path("b").iterdir()] == ["mine.txt"]


def test_a_resumed_run_that_ends_before_training_is_as_it_was() -> None:
    out = new_run("gpt", Path("a"))
    for name in ("config.toml", "plan.json", STARTED):
        (out / name).write_text("old")
    before = DirectorySnapshot.of(out)
    (out / "config.toml").write_text("new")
    before.restore(out)
    assert (out / "config.toml").read_text() == "old"
    (out / "config.toml").write_text("new")
    (out / f"{STARTED}.partial").write_text("old")
    (out / f"{STARTED}.partial").replace(out / STARTED)  # as training does it
    before.restore(out)
    assert (out / "config.toml").read_text() == "new"

"""A wheel that is made as `python -m build` makes it, of the source archive, unpacked, and installed where
there is what `pyproject.toml` asks for and no more.

Nothing is downloaded: the environment's only other packages are links to those of this one, and of these only
the dependencies that the project declares, with what they need themselves.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
TINY = ("model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "validation_batches=1")

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a newcomer does: nothing of this test's environment leads to the source tree."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done


def required(names: list[str]) -> Iterator[Distribution]:
    """The distributions of these requirements, and of theirs, as far as they are installed here."""
    waiting, seen = [Requirement(name) for name in names], set()
    while waiting:
        requirement = waiting.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in seen:
            seen.add(requirement.name.lower())
            found = distribution(requirement.name)
            yield found
            waiting += [Requirement(text) for text in found.requires or ()]


def environment(folder: Path) -> Path:
    """A new environment with the project's dependencies; its folder of programs."""
    venv.create(folder, with_pip=True, symlinks=True)
    run(folder / "bin" / "python", "-m", "pip", "uninstall", "-yq", "setuptools", folder=folder)  # an old one
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in required([*DECLARED["project"]["dependencies"], *DECLARED["build-system"]["requires"]]):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link, target = packages / top, Path(str(found.locate_file(top)))
            if target.exists() and not link.exists() and top != "__pycache__":
                link.symlink_to(target)
    return folder / "bin"


def built(what: str, source: Path, target: Path) -> Path:
    """What the build backend's hook makes of a source tree: "sdist" or "wheel"."""
    backend = DECLARED["build-system"]["build-backend"]
    code = f"import {backend} as backend, sys; backend.build_{what}(sys.argv[1])"
    target.mkdir()
    run(sys.executable, "-c", code, target, folder=source)
    (made,) = target.iterdir()
    return made


def test_installing_a_wheel(tmp_path: Path) -> None:
    """`python -m build` makes the source archive, unpacks it, and makes the wheel of what is in there."""
    (source := tmp_path / "source").mkdir()  # a copy, as a build leaves folders behind
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    with tarfile.open(built("sdist", source, tmp_path / "archive")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = built("wheel", unpacked, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as files:
        packed = {name for name in files.namelist() if name.startswith("pipeloom/")}
    package = source / "src" / "pipeloom"
    files = (f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    assert packed == {str(Path("pipeloom", f.relative_to(package))) for f in files}
    programs = environment(tmp_path / "env")
    plain = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "-q")
    run(programs / "python", "-m", "pip", "install", *plain, wheel, folder=tmp_path)
    code = "import importlib.util; print(importlib.util.find_spec('transformers'))"
    assert run(programs / "python", "-c", code, folder=tmp_path).stdout == "None\n", "it was not declared"
    # What a newcomer does first, from a folder of their own.
    (mine := tmp_path / "mine").mkdir()
    where = run(programs / "python", "-c", "import pipeloom; print(pipeloom.__file__)", folder=mine)
    assert Path(where.stdout.strip()).is_relative_to(programs.parent)
    assert "a100-80-sxm" in run(programs / "pipeloom", "cluster", "show", "a100-80", folder=mine).stdout
    flags = [word for setting in TINY for word in ("--set", setting)]
    done = run(programs / "pipeloom", "train", "--steps", "2", "--json", *flags, folder=mine)
    assert json.loads(done.stdout)["steps"] == 2
    assert (mine / "runs" / "gpt-1" / "report.html").is_file()

"""The repository builds anywhere: no file names a place that only one machine has."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ON_EVERY_MACHINE = {"bin", "dev", "etc", "path", "proc", "sys", "usr"}
"""Top folders that a file may name; `/path/to/...` is the usual placeholder."""

ABSOLUTE = re.compile(r"""(?:^|(?<=[\s"'`(=,:\[]))/([a-z][\w.-]*)/[\w.-]+""", re.MULTILINE)
INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|--trusted-host")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [f for f in files if f.is_file() and f != Path(__file__)]


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError:
        return ""


def machine_paths(text: str) -> list[str]:
    return [m[0] for m in ABSOLUTE.finditer(text) if m[1] not in ON_EVERY_MACHINE]


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = [f"{f.relative_to(ROOT)}: {path}" for f in tracked_files() for path in machine_paths(text_of(f))]
    assert not found, "use a relative path, an option or tmp_path:\n" + "\n".join(found)


def test_no_file_names_a_package_index() -> None:
    found = [str(f.relative_to(ROOT)) for f in tracked_files() if INDEX.search(text_of(f))]
    assert not found, f"{found} choose where packages come from; that is for each machine's own pip"


def test_a_wheel_has_all_files_of_the_package() -> None:
    package = ROOT / "src" / "pipeloom"
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = tools["setuptools"]["package-data"]["pipeloom"]
    packed = {file for pattern in patterns for file in package.glob(pattern)}
    files = {file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert not {str(file.relative_to(package)) for file in files - packed if file.suffix != ".py"}


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if not x.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)]
    assert not loose, f"write name==version, without a local suffix: {loose}"
    pinned = {re.sub(r"[._-]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    missing = {re.split(r"[<>=!\[ ]", name)[0] for name in wanted} - pinned
    assert not missing, f"not pinned in constraints.txt: {sorted(missing)}"

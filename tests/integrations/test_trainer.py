"""PipelineTrainer gives what transformers' Trainer gives in one process: numbers, log keys and files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer wants accelerate, which is not installed")

SCRIPT = str(Path(__file__).parent / "trainer_script.py")
RECIPES = ("language_modelling", "sequence_classification", "image_classification")
TIMES = ("runtime", "per_second")


def run(folder: Path, *words: str, ranks: int | None = None) -> None:
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, SCRIPT, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def log(folder: Path, recipe: str) -> list[dict[str, Any]]:
    return json.loads((folder / recipe / "log.json").read_text())


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def assert_same_logs(piped: Path, plain: Path) -> None:
    for recipe in RECIPES:
        for ours, theirs in zip(log(piped, recipe), log(plain, recipe), strict=True):
            assert ours.keys() == theirs.keys()
            for key in theirs:
                if not key.endswith(TIMES) and not key.startswith("eval_steps"):
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), (recipe, key)


@pytest.mark.slow
def test_three_recipes_give_what_one_process_gives_and_go_on_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    plain, piped = tmp_path / "plain", tmp_path / "piped"
    run(plain)
    run(piped, ranks=2)
    assert files(piped) == files(plain)
    assert_same_logs(piped, plain)
    reference = resumed(plain)
    assert_same_logs(resumed(piped, ranks=3), reference)
    assert_same_logs(resumed(piped), reference)  # by the plain Trainer, from what the pipeline wrote


def resumed(folder: Path, *, ranks: int | None = None) -> Path:
    copy = folder.with_name(f"{folder.name} on {ranks}")
    shutil.copytree(folder, copy)
    run(copy, "resume", ranks=ranks)
    return copy

"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import good
from tiny_run import TRAIN

EXAMPLES = Path(__file__).parents[1] / "examples"


def output(*words: str, cwd: Path | None = None) -> str:
    """In the environment of a user, without what only tests can import."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(*words: str) -> list[float]:
    return [float(n) for n in re.findall(r"^(?:.*RayTrainWorker.* )?loss (\S+)", output(*words), re.M)]


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "better", "wanted"),
    [("plain_script.py", 20, 1.0, "torch"), ("lora.py", 11, 0.3, "peft")],
)
def test_a_script_learns_the_same_on_two_ranks(tmp_path, monkeypatch, name, count, better, wanted):
    pytest.importorskip(wanted, reason=f"{name} wants {wanted}, which is not installed")
    monkeypatch.chdir(tmp_path)
    script = str(EXAMPLES / name)
    plain, piped = losses(script, "--plain"), losses(*TORCHRUN, script)
    assert len(plain) == count and plain[-1] < plain[0] - better
    assert piped == pytest.approx(plain, abs=2e-4)  # they are printed with four digits


@pytest.mark.slow
def test_two_workers_of_ray_learn_the_same() -> None:
    missing = 'ray_train.py wants "ray[train]", which is not installed'
    pytest.importorskip("ray.train", reason=missing, exc_type=ImportError)
    script = str(EXAMPLES / "ray_train.py")
    plain = losses(script, "--plain")
    piped = list(dict.fromkeys(losses(script)))  # Ray may show what a worker prints twice
    assert len(plain) == 20 and piped == pytest.approx(plain, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start", "wanted"),
    [("hf_trainer.py", "eval losses 5.", "accelerate"), ("lightning_module.py", "validation ", "lightning")],
)
def test_a_trainers_script_gives_the_same_on_two_ranks(tmp_path, name, start, wanted):
    pytest.importorskip(wanted, reason=f"{name} wants {wanted}, which is not installed")
    script = str(EXAMPLES / name)
    plain, piped = (
        output(*words, cwd=tmp_path).splitlines()[-1] for words in ([script, "--plain"], [*TORCHRUN, script])
    )
    assert plain.startswith(start) and piped == plain


def test_the_own_model_is_verified() -> None:
    words = ("verify", f"{EXAMPLES / 'own_model.py'}:job", "--ranks", "3", "--microbatch-size", "16")
    assert "equal within" in good(*words)


@pytest.mark.slow
def test_the_own_model_learns(tmp_path: Path) -> None:
    settings = ["steps=300", "pipeline.microbatch_size=16", "optimizer.clip_norm=0"]
    words = [f"{EXAMPLES / 'own_model.py'}:job", "--ranks", "3"]
    words += [word for setting in settings for word in ("--set", setting)]
    told = output(*TRAIN[1:], *words, cwd=tmp_path)
    page = (tmp_path / "runs" / "spiral-1" / "report.html").read_text()
    assert 'data-edge="0-1"' in page and page.count('class="stage"') == 3
    line = next(line for line in told.splitlines() if line.startswith("validation loss"))
    first, last = float(line.split()[2]), float(line.split()[6])
    assert first > 0.6 and last < 0.3, line

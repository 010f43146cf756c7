"""The command line: files, exit statuses, and one sentence for each mistake. Screens: test_screens.py."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from pipeloom.cli import main
from pipeloom.commands.common import emit
from pipeloom.commands.plan import stages_table
from pipeloom.planner.plan_table import PlannedStage
from pipeloom.runtime import checkpoint
from pipeloom.runtime.checkpoint import TrainState

JOB = """
import torch
from torch import nn
from pipeloom import Job

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def batch(seed, size):
    return {"x": torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))}

def loss(outputs, batch):
    return outputs

def job(width=8):
    return Job(name="tiny", model=lambda: Net(width), batch=batch, loss=loss)

class Deeper(Net):
    def forward(self, x):
        return super().forward(self.layers[0](x))

def other():
    return Job(name="other", model=lambda: Deeper(8), batch=batch, loss=loss)
"""

CLUSTER = """
[[device]]
name = "slow"
count = 2
memory = "1GiB"
flops_per_s = { float32 = 1e9 }
memory_bytes_per_s = 1e9
[within_node]
bandwidth = "1GB"
"""

PLAN = ["plan", "tiny_job.py:job", "--cluster", "cluster.toml", "--microbatches", "2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny_job.py").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tiny_job", raising=False)
    return tmp_path


def run(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def good(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def bad(status: int, *words: str) -> str:
    result = run(*words)
    assert result.exit_code == status, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help_describes_every_option(command: str) -> None:
    text = good(command, "--help")
    for option in main.commands[command].params:
        if option.param_type_name == "option":
            assert option.help, f"{command} {option.name} has no help"
            assert option.opts[0] in text


@pytest.mark.parametrize("command", ["train", "plan", "verify", "bench"])
def test_help_says_that_a_rank_may_have_several_stages(command: str) -> None:
    option = next(one for one in main.commands[command].params if one.name == "ranks")
    assert "Ranks" in option.help and "--chunks" in option.help
    assert "--chunks" in good(command, "--help")


def test_help_imports_no_torch() -> None:
    code = "import sys; from pipeloom.cli import main; main(['train', '--help'], standalone_mode=False)"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)


def test_profile_and_plan_add_up_and_save(folder: Path) -> None:
    words = ["profile", "tiny_job.py:job", "--cluster", "cluster.toml"]
    figures = json.loads(good(*words, "--save", "p.json", "--save-graph", "g.json", "--json"))
    assert sum(k["forward_s"] for k in figures["kinds"]) == pytest.approx(figures["forward_s"])
    assert figures["parameters"] == 4 * (8 * 8 + 8) and figures["batch"] == ["x[4,8]float32"]
    planned = json.loads(good(*PLAN, "--profile", "p.json", "-o", "plan.json", "--json"))
    assert sum(stage["ops"] for stage in planned["stages"]) == figures["ops"] == 11
    assert all((folder / name).is_file() for name in ("p.json", "g.json", "plan.json"))


def test_planners_are_listed() -> None:
    names = [row["name"] for row in json.loads(good("plan", "--planners", "--json"))["planners"]]
    assert "exact" in names and all(name in good("plan", "--planners") for name in names)


@pytest.mark.parametrize("ways", [(), ("recomputed",), ("offloaded",), ("recomputed", "offloaded")])
@pytest.mark.parametrize("reads", [(), (7,)])
def test_sizes_of_a_plan_are_in_full_and_only_what_there_is_has_a_column(
    ways: tuple[str, ...], reads: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last letters of caps were cut off, as "12.0 M…", where a table was wider than 120 letters."""
    mib = 2**20
    sizes = {f"{way}_bytes": 1000 * mib + 2**17 for way in ways} | {"cap_bytes": 999 * mib}
    texts = {"layers": "encoder.layers.10 .. 19", "reads": reads, "depth": 2}
    zeros = {one.name: 1 for one in fields(PlannedStage)} | {"offload_ratio": None, "link_use": None}
    zeros |= {name: 0 for name in ("stage", "rank", "recomputed_bytes", "offloaded_bytes")}
    emit(None, [stages_table([PlannedStage(**(zeros | texts | sizes))])], as_json=False)
    shown = capsys.readouterr().out
    assert "…" not in shown and "999.0 MiB" in shown and "encoder.layers.10 .. 19" in shown
    heads = shown.split("\n")[0].split()
    assert [way for way in ("recomputed", "offloaded") if way in heads] == list(ways)
    assert ("residuals" in heads) == (not ways) and ("reads" in heads) == ("depth" in heads) == bool(reads)


def test_simulate_needs_neither_torch_nor_the_model(folder: Path) -> None:
    good("profile", "tiny_job.py:job", "--cluster", "cluster.toml", "--save-graph", "g.json")
    good(*PLAN, "-o", "plan.json")
    words = ["simulate", "plan.json", "--graph", "g.json", "--cluster", "cluster.toml"]
    words += ["--trace", "t.json", "--html", "r.html", "--json"]
    code = (
        f"import sys; from pipeloom.cli import main; main({words}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert 0 < figures["bubble"] < 1 and figures["ranks"][0]["peak_bytes"] > 0
    assert "PP:0F0" in (folder / "t.json").read_text()
    page = (folder / "r.html").read_text()
    assert "why ranks are idle" in page
    assert page.count('class="edge"') == 1 and page.count('class="stage"') == 2


def test_simulate_refuses_eager_times_for_a_plan_of_compiled_stages(folder: Path) -> None:
    good(*PLAN, "-o", "plan.json")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"notes": {"compiled": "as long as eager"}}))
    good("profile", "tiny_job.py:job", "--cluster", "cluster.toml", "--save", "eager.json")
    for words in (["--cluster", "cluster.toml"], ["--profile", "eager.json"]):
        assert "of eager ops" in bad(1, "simulate", "plan.json", "tiny_job.py:job", *words)


def test_simulate_with_the_model(folder: Path) -> None:
    good(*PLAN, "-o", "plan.json")
    assert "simulated:" in good("simulate", "plan.json", "tiny_job.py:job", "--cluster", "cluster.toml")


def test_verify_passes_and_fails(folder: Path) -> None:
    words = ["verify", "tiny_job.py:job", "--ranks", "3", "--microbatches", "2"]
    figures = json.loads(good(*words, "--split-backward", "--json"))
    assert figures["passed"] and len(figures["gradients"]) == len(figures["parameters"]) == 8
    assert "equal within the tolerance 1e-05" in good(*words)
    failed = run(*words, "--tolerance", "-1")
    assert failed.exit_code == 1 and "NOT equal" in failed.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", "none.toml"], 2, "none.toml"),
        (["train", "--set", "modle.width=3"], 2, "model.width?"),
        (["train", "--memory", "300apples"], 2, "'apples'"),
        (["train", "--data", "nowhere"], 2, "nowhere"),
        (["train", "--job", "tiny_job.py:jbo"], 2, "did you mean job?"),
        (["train", "--resume"], 2, "runs/gpt-<n>"),
        (["train", "--resume", "--out", "."], 2, ". holds no run"),
        (["train", "--set", "pipeline.plan=none.json"], 2, "none.json"),
        (["plan", "tiny_job.py:job", "--cluster", "cluster.toml", "--ranks", "99"], 1, "99 stages"),
        ([*PLAN, "--memory", "1GiB"], 2, "--memory and --cluster"),
        ([*PLAN[:2], "--pair-nodes"], 2, "--pair-nodes without --cluster"),
        ([*PLAN, "--compile"], 1, "roofline"),
        (["plan", "--compile", "--max-batch"], 2, "--compile and --max-batch"),
        ([*PLAN[:4], "--compile", "--ranks", "auto"], 2, "--ranks auto and --compile"),
        (["profile", "--compile", "--cluster", "1 x cpu"], 2, "--cluster and --compile"),
        ([*PLAN, "--pair-nodes", "--replicas", "2"], 2, "--replicas and --pair-nodes"),
        ([*PLAN, "--schedule", "1f1"], 1, "did you mean 1f1b?"),
        (["verify", "none.py:job"], 2, "none.py"),
        (["verify", "tiny_job.py:job", "--plan", "none.json"], 2, "none.json"),
        (["simulate", "none.json"], 2, "none.json"),
        (["simulate", "cluster.toml"], 2, "not a valid Plan"),
        ([*PLAN, "-o", "no/p.json"], 2, "no folder no"),
        (["profile", "--save", "no/p.json"], 2, "no folder no"),
        (["cluster", "detect", "-o", "no/c.toml"], 2, "no folder no"),
        (["train", "--out", "cluster.toml/a"], 2, "Not a directory"),
        (["profil"], 2, "'profil'"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, words: list[str], status: int, message: str) -> None:
    assert message in bad(status, *words)


def test_first_and_last_ranks_share_nodes_if_asked(folder: Path) -> None:
    words = [*PLAN[:2], "--cluster", "2 nodes of 2 x a100-40", "--ranks", "4", "-m", "4", "--no-what-if"]

    def nodes(*more: str) -> list[int]:
        return [stage["node"] for stage in json.loads(good(*words, "--json", *more))["stages"]]

    assert (nodes(), nodes("--pair-nodes")) == ([0, 0, 1, 1], [0, 1, 1, 0])
    assert "node" in good(*words).split() and "node" not in good(*PLAN).split()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        ["verify", "--plan", "none.json"],
        ["plan", "--profile", "none.json"],
        ["plan", "-o", "no/p.json"],
        ["train", "none.toml"],
        ["train", "--set", "pipeline.plan=none.json"],
    ],
)
def test_files_are_looked_at_before_torch_is_loaded(folder: Path, words: list[str]) -> None:
    """A missing file was said after half a minute: after capture, or what was to be written after all."""
    code = f"import sys; from pipeloom.cli import main\ntry: main({words})\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: cannot "), done.stderr
    assert "torch" not in done.stdout.split()


def test_output_that_cannot_be_written_is_one_sentence(folder: Path) -> None:
    """A full disk under standard output gave our traceback."""
    command = [sys.executable, "-m", "pipeloom", "schedule", "show", "1f1b"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_ctrl_c_is_one_word(folder: Path) -> None:
    (folder / "broken.py").write_text("def job():\n    raise KeyboardInterrupt\n")
    assert bad(130, "verify", "broken.py:job") == "interrupted\n"


def test_what_is_no_plain_file_is_not_replaced(folder: Path) -> None:
    """`-o /dev/null` put a plain file in the place of the device, where that is allowed."""
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)
    good("cluster", "show", "cluster.toml", "-o", "pipe")
    assert os.read(pipe, 1 << 16).startswith(b"# cluster.toml")
    os.close(pipe)
    assert Path("pipe").is_fifo() and not Path("pipe.partial").exists()


def test_a_plan_of_another_model_is_refused(folder: Path) -> None:
    good(*PLAN, "-o", "plan.json")
    for words in (
        ["verify", "tiny_job.py:other", "--plan", "plan.json"],
        ["simulate", "plan.json", "tiny_job.py:other", "--cluster", "cluster.toml"],
    ):
        assert "error: this plan was made for model" in bad(1, *words)


def test_a_graph_alone_has_no_costs(folder: Path) -> None:
    good(*PLAN, "-o", "plan.json")
    good("profile", "tiny_job.py:job", "--cluster", "cluster.toml", "--save-graph", "g.json")
    assert "--graph alone does not say" in bad(2, "simulate", "plan.json", "--graph", "g.json")
    both = ["simulate", "plan.json", "tiny_job.py:job", "--graph", "g.json"]
    assert "MODEL and --graph were both given" in bad(2, *both)


def test_export_takes_a_run_or_a_checkpoint(folder: Path) -> None:
    state = TrainState(parameters={"w": torch.nn.Parameter(torch.ones(2))})
    checkpoint.save(folder / "run" / "checkpoint", state, step=3, extra={})
    for source in ("run", "run/checkpoint", "run/checkpoint/step-00000003"):
        printed = good("export", source, "model.safetensors")
        assert printed == "run/checkpoint/step-00000003 -> model.safetensors\n"
        assert load_file("model.safetensors")["w"].tolist() == [1.0, 1.0]
    assert "error: checkpoint directory nowhere does not exist" in bad(
        1, "export", "nowhere", "m.safetensors"
    )


def test_errors_of_the_users_code_keep_their_traceback(folder: Path) -> None:
    (folder / "broken.py").write_text("def job():\n    raise RuntimeError('mine')\n")
    with pytest.raises(RuntimeError, match="mine"):
        run("verify", "broken.py:job")

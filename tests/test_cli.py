"""The command line: files, exit statuses, and one sentence for each mistake. Screens: test_screens.py."""

import json
import os
from pathlib import Path

import processes
import pytest
import torch
from commands import bad, figures, good, run
from processes import output
from safetensors.torch import load_file

from pipeloom import plan_request
from pipeloom.cli import main
from pipeloom.clusters.devices import built_in, built_in_devices
from pipeloom.clusters.files import load_cluster
from pipeloom.clusters.names import find_cluster
from pipeloom.runtime import checkpoint
from pipeloom.runtime.checkpoint import TrainState

PLAN = ["plan", "mine.py:job", "--cluster", "cluster.toml", "--microbatches", "2"]
EVERY = {**main.commands} | {
    f"{name} {inner}": command
    for name, group in main.commands.items()
    for inner, command in getattr(group, "commands", {}).items()
}
"""Every command and subcommand, by its words."""
PROFILE = ["profile", "mine.py:job", "--cluster", "cluster.toml"]


@pytest.mark.parametrize("command", sorted(EVERY))
def test_help_describes_every_option(command: str) -> None:
    text = good(*command.split(), "--help")
    for option in EVERY[command].params:
        if option.param_type_name == "option":
            assert option.help and option.opts[0] in text, option.name


def test_the_largest_micro_batch_that_is_looked_at_is_told(folder, monkeypatch, caplog):
    monkeypatch.setattr(plan_request, "LARGEST_MICROBATCH", 8)
    words = ("plan", "mine.py:job", "--cluster", "2 x a100-40", "--max-batch", "--no-what-if")
    assert figures(*words)["microbatch_size"] == 8 and "8 rows are the largest" in caplog.text


@pytest.mark.parametrize("words", ["plan mine.py:job --planner auot", "train --job mine.py:job -s 1f2b"])
def test_names_are_looked_up_before_the_model_is_captured(words, folder, monkeypatch):
    for module in ("pipeloom.planning", "pipeloom.train.run"):
        monkeypatch.setattr(f"{module}.capture", None)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # so that no ranks start beside it
    assert "did you mean" in bad(1, *words.split())


def test_planners_are_listed() -> None:
    names = [row["name"] for row in figures("plan", "--planners")["planners"]]
    assert "exact" in names and all(name in good("plan", "--planners") for name in names)


def test_simulate_draws_a_step_and_says_which_rank_holds_too_much(folder: Path) -> None:
    profile = figures(*PROFILE, "--save", "p.json")
    assert sum(k["forward_s"] for k in profile["kinds"]) == pytest.approx(profile["forward_s"])
    planned = figures(*PLAN, "--profile", "p.json", "-o", "plan.json")
    assert sum(stage["ops"] for stage in planned["stages"]) == profile["ops"] == 11
    words = ["simulate", "plan.json", "mine.py:job", "--cluster", "cluster.toml"]
    step = figures(*words, "--trace", "t.json", "--html", "r.html")
    assert 0 < step["bubble"] < 1 and step["ranks"][0]["peak_bytes"] > 0
    assert "PP:0F0" in (folder / "t.json").read_text()
    page = (folder / "r.html").read_text()
    assert "why ranks are idle" in page and "cap<" in page
    assert page.count('class="edge"') == 1 and page.count('class="stage"') == 2
    assert "simulated:" in (drawn := good(*words)) and "than its cap" not in drawn
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"caps": [plan["caps"][0], 1]}))
    assert "\nrank 1 holds" in good(*words) and figures(*words)["caps"][1] == 1
    assert "\nrank 0 holds" in good(*words[:-1], "2 x a100-40 with 1KiB")


def test_simulate_refuses_what_does_not_belong_together(folder: Path) -> None:
    good(*PLAN, "-o", "plan.json")
    good(*PROFILE, "--save", "eager.json")
    for command in ("show", "check"):
        assert "`pipeloom simulate plan.json MODEL`" in bad(1, "schedule", command, "plan.json")
    for words in (
        ["verify", "mine.py:other", "--plan", "plan.json"],
        ["simulate", "plan.json", "mine.py:other", "--cluster", "cluster.toml"],
    ):
        assert "error: this plan was made for model" in bad(1, *words)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"notes": {"compiled": "as long as eager"}}))
    for words in (["--cluster", "cluster.toml"], ["--profile", "eager.json"]):
        assert "of eager ops" in bad(1, "simulate", "plan.json", "mine.py:job", *words)


def test_verify_passes_and_fails(folder: Path) -> None:
    words = ["verify", "mine.py:job", "--ranks", "3", "--microbatches", "2"]
    result = figures(*words, "--split-backward")
    assert result["passed"] and len(result["gradients"]) == len(result["parameters"]) == 8
    assert "equal within the tolerance 1e-05" in good(*words)
    failed = run("verify", "mine.py:counting", *words[2:])
    assert failed.exit_code == 1 and "NOT equal" in failed.stdout and "hint: " in failed.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", "--set", "modle.width=3"], 2, "model.width?"),
        (["train", "--data", "nowhere"], 2, "nowhere"),
        (["train", "mine.py:jbo"], 2, "did you mean job?"),
        (["train", "--resume"], 2, "runs/gpt-<n>"),
        (["train", "--resume", "--out", "."], 2, ". holds no run"),
        (["train", "--out", "cluster.toml/a"], 2, "Not a directory"),
        (["plan", "mine.py:job", "--cluster", "cluster.toml", "--ranks", "99"], 1, "99 stages"),
        ([*PLAN, "--memory", "1GiB"], 2, "--memory and --cluster"),
        ([*PLAN[:2], "--pair-nodes"], 2, "--pair-nodes without --cluster"),
        ([*PLAN, "--compile"], 1, "roofline"),
        (["plan", "--microbatches", "2", "--global-batch", "16"], 2, "--microbatches and --global-batch"),
        ([*PLAN, "--planner", "exact", "--time-limit", "9"], 2, "9 s is given, and planner exact takes none"),
        (["plan", "./mine:job"], 2, "did you mean ./mine.py:job?"),
        (["plan", "-o", ""], 2, "names no file"),
        ([*PLAN, "-o", "no/p.json"], 2, "no folder no"),
        (["verify", "none.py:job"], 2, "none.py"),
        (["verify", "--seed", "9" * 20], 2, "'--seed'"),
        (["verify", "mine.py:job", "--plan", "plan.json", "-p", "2"], 2, "--ranks and --plan"),
        (["simulate", "cluster.toml"], 2, "not a valid Plan"),
        (["cluster", "show", "1000000 x a100-40"], 2, "1000000 devices"),
        (["export", "nowhere", "m.safetensors"], 1, "checkpoint directory nowhere does not exist"),
        (["profil"], 2, "'profil'"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, words: list[str], status: int, message: str) -> None:
    assert message in bad(status, *words)


def test_help_and_files_that_cannot_be_read_come_before_torch_is_loaded(folder: Path) -> None:
    plans = ("verify --plan none.json", "plan --profile none.json", "plan -o no/p.json")
    commands = ("train --help", *plans, "train none.toml", "train --set pipeline.plan=none.json")
    code = f"""import sys
from click.testing import CliRunner
from pipeloom.cli import main
for words in {commands}:
    done = CliRunner().invoke(main, words.split())
    print(done.exit_code, done.stderr[:13])
print(*sys.modules)
"""
    *told, modules = output("-c", code).splitlines()
    assert told == ["0 ", *["2 error: cannot"] * 5] and "torch" not in modules.split()


@pytest.mark.slow
def test_first_and_last_ranks_share_nodes_if_asked(folder: Path) -> None:
    words = [*PLAN[:2], "--cluster", "2 nodes of 2 x a100-40", "--ranks", "4", "-m", "4", "--no-what-if"]
    for more, nodes in ([], [0, 0, 1, 1]), (["--pair-nodes"], [0, 1, 1, 0]):
        assert [stage["node"] for stage in figures(*words, *more)["stages"]] == nodes
    assert "node" in good(*words).split() and "node" not in good(*PLAN).split()


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        status, _, told = processes.run("-m", "pipeloom", "schedule", "show", "1f1b", stdout=full)
    assert (status, told) == (1, "error: cannot write the output: No space left on device\n")


def test_what_is_not_read_any_more_changes_neither_the_exit_status_nor_files(folder: Path) -> None:
    """`| head -1`."""
    reads, writes = os.pipe()
    os.close(reads)  # nobody reads from the first byte on
    words = ("-m", "pipeloom", "schedule", "show", "1f1b", "--html", "s.html")
    assert processes.run(*words, stdout=writes) == (0, None, "")
    os.close(writes)
    assert (folder / "s.html").is_file()


def test_ctrl_c_is_one_word_and_errors_of_the_users_code_name_their_line(folder: Path) -> None:
    lines = ("def stops():", "    raise KeyboardInterrupt", "def fails():", "    raise RuntimeError('mine')")
    (folder / "broken.py").write_text("\n".join(lines))
    assert bad(130, "verify", "broken.py:stops") == "interrupted\n"
    told = bad(2, "verify", "broken.py:fails")
    assert told == "error: broken.py:fails fails: RuntimeError: mine (broken.py:4)\n"


def test_writing_leaves_links_pipes_and_other_files_alone(folder: Path) -> None:
    """`-o /dev/null` put a plain file in the place of the device, where that is allowed."""
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)
    good("cluster", "show", "cluster.toml", "-o", "pipe")
    assert os.read(pipe, 1 << 16).startswith(b"# cluster.toml")
    os.close(pipe)
    assert Path("pipe").is_fifo() and not Path("pipe.partial").exists()
    link, other = Path("link.toml"), Path("link.toml.partial")
    other.write_text("mine")
    for target, status in (("real.toml", 0), ("gone/file.toml", 2), ("link.toml", 0)):
        link.unlink(missing_ok=True)
        link.symlink_to(folder / target)
        done = run("cluster", "show", "2 x a100-40", "-o", link)
        assert done.exit_code == status and ("cannot write" in done.output) == bool(status)
        assert link.exists() == (not status) and link.is_symlink() == (target != "link.toml")
    assert "a100" in Path("real.toml").read_text() and other.read_text() == "mine"


def test_export_takes_a_run_or_a_checkpoint(folder: Path) -> None:
    state = TrainState(parameters={"w": torch.nn.Parameter(torch.ones(2))})
    checkpoint.save(folder / "run" / "checkpoint", state, step=3, extra={})
    for source in ("run", "run/checkpoint", "run/checkpoint/step-00000003"):
        printed = good("export", source, "model.safetensors")
        assert printed == "run/checkpoint/step-00000003 -> model.safetensors\n"
        assert load_file("model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_clusters_are_listed_shown_with_their_sources_and_saved(folder: Path) -> None:
    devices = figures("cluster", "list")["devices"]
    assert [d["name"] for d in devices] == list(built_in_devices())
    assert all(name in good("cluster", "list") for name in built_in_devices())
    shown = good("cluster", "show", "8 x v100-32")
    for figure in built_in("v100-32").figures.values():
        assert figure.name in shown
        assert "".join(figure.source.split())[:25] in "".join(shown.split())
    sources = figures("cluster", "show", "2 nodes of 2 x a100-80-pcie")["sources"]
    assert sources["a100-80-pcie"]["memory_bytes_per_s"]["source"].startswith("NVIDIA")
    good("cluster", "show", "4 x rtx-4090", "-o", "four.toml")
    assert load_cluster(folder / "four.toml") == find_cluster("4 x rtx-4090")
    changed = (folder / "four.toml").read_text().replace("launch_s = ", "launch_s = 1.5e-3  #")
    (folder / "changed.toml").write_text(changed)
    assert figures("cluster", "show", "four.toml")["sources"]
    assert "1500 us" in good("cluster", "show", "changed.toml")
    assert figures("cluster", "show", "changed.toml")["sources"] == {}  # its figures are its own
    profile = figures("profile", "mine.py:job", "--cluster", "four.toml")
    assert (profile["device"], profile["source"]) == ("rtx-4090", "roofline")

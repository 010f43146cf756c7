"""What commands print, and their `--json`, against tests/snapshots: one file for each command.

After a change that is meant: RENEW_SNAPSHOTS=1 make test ARGS=tests/test_screens.py, and read the diff.
"""

import json
import os
from pathlib import Path
from typing import Any

import commands
import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"

CLUSTER = commands.CLUSTER.replace("1GiB", "10MiB")

PLAN = "plan mine.py:wide --cluster cluster.toml --ranks 2 -m 4"
SCREENS = {
    "schedule show": "schedule show async_1f1b -p 2 -m 3",
    "schedule compare": "schedule compare 1f1b zb_h1 -p 2 -m 4",
    "schedule explain": "schedule explain 1f1b -p 3 -m 4",
    "schedule diff": "schedule diff 1f1b zb_h1 -p 2 -m 3",
    "schedule why": "schedule why 1f1b 1B1 -p 2 -m 3",
    "schedule sensitivity": "schedule sensitivity 1f1b -p 2 -m 4 -F 1,2 -I 1,2 -W 1,2 -T 0.25",
    "cluster show": "cluster show cluster.toml",
    "profile": "profile mine.py:wide --cluster cluster.toml --top 3",
    "plan": PLAN,
    "plan auto": "plan mine.py:wide --cluster cluster.toml --global-batch 16 --ranks auto --closed-form",
    "simulate": "simulate plan.json mine.py:wide --cluster cluster.toml",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a cluster and a plan."""
    folder = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        commands.prepare(folder, patch, CLUSTER)
        commands.good(*f"{PLAN} --planner exact --schedule 1f1b --no-what-if -o plan.json".split())
    return folder


def shortened(value: Any) -> Any:
    """Numbers with four digits, and of long lists the first entry: enough to see that a key is there."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        few = value if len(value) <= 4 and not any(isinstance(v, dict) for v in value) else value[:1]
        return [*map(shortened, few), *([f"{len(value)} in all"] if len(few) < len(value) else [])]
    return value


@pytest.mark.parametrize("name", SCREENS)
def test_a_command_prints_what_its_snapshot_has(name, made, monkeypatch):
    monkeypatch.chdir(made)
    words = SCREENS[name].split()
    figures = commands.figures(*words)
    rows = figures.items() if isinstance(figures, dict) else enumerate(figures)
    lines = [f"$ pipeloom {SCREENS[name]}", *commands.good(*words).splitlines(), "", "--json:"]
    lines += [f"{key}: {json.dumps(shortened(value), ensure_ascii=False)}" for key, value in rows]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    file = SNAPSHOTS / f"{name.replace(' ', '-')}.txt"
    if "RENEW_SNAPSHOTS" in os.environ:
        file.write_text(text)
    assert text == file.read_text()

"""Op times are measured once a day for a model, and never taken for those of other ops."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_net import PlainNet, job_of
from runs import capture_of
from torch import Tensor

from pipeloom import planning
from pipeloom.caches import daily, kept_profile
from pipeloom.ir.profile import OpCost, Profile, batch_text
from pipeloom.profiler.compiled_pieces import CompiledRatio
from pipeloom.tracer.captured import Captured


class Measured:
    """Measures nothing, and counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, captured: Captured) -> Profile:
        self.times += 1
        costs = {op.name: OpCost(forward_s=float(self.times)) for op in captured.graph.ops}
        return Profile(
            device="cpu",
            source="measured",
            graph=captured.graph.fingerprint,
            batch=batch_text(captured.graph.inputs),
            costs=costs,
        )


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIPELOOM_KEEP_PROFILES", raising=False)
    return Measured()


def files(folder: Path) -> list[Path]:
    return list(folder.glob("pipeloom/profiles/*"))


def test_times_are_measured_once_a_day(measured: Measured, tmp_path: Path) -> None:
    captured = capture_of(job_of(PlainNet))
    assert kept_profile(captured, measured) == kept_profile(captured, measured)
    (file,) = files(tmp_path)
    assert measured.times == 1
    os.utime(file, (0, time.time() - 2 * 24 * 3600))
    kept_profile(captured, measured)
    assert measured.times == 2 and files(tmp_path) == [file]


def test_what_is_too_old_for_use_is_removed(measured: Measured, tmp_path: Path) -> None:
    kept_profile(capture_of(job_of(PlainNet)), measured)
    (old,) = files(tmp_path)
    os.utime(old, (0, 0))
    kept_profile(capture_of(job_of(PlainNet), 4), measured)
    assert len(files(tmp_path)) == 1 and not old.exists()


def test_times_of_hours_ago_are_mentioned(
    measured: Measured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    captured = capture_of(job_of(PlainNet))
    kept_profile(captured, measured)
    for hours, said in ((0, ""), (3, "measured 3 h ago; PIPELOOM_KEEP_PROFILES=0 measures them again")):
        os.utime(files(tmp_path)[0], (0, time.time() - hours * 3600))
        with caplog.at_level(logging.WARNING, logger="pipeloom"):
            kept_profile(captured, measured)
        assert said in caplog.text and bool(said) == bool(caplog.text)


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{}", "[" * 200_000, '{"device": 1}', "costs", "graph", "batch", "negative", "roofline"],
)
def test_a_damaged_file_is_measured_again(measured: Measured, tmp_path: Path, damage: str) -> None:
    captured = capture_of(job_of(PlainNet))
    right = kept_profile(captured, measured)
    (file,) = files(tmp_path)
    whole = json.loads(file.read_text())
    first = next(iter(whole["costs"]))
    changed = {
        "costs": {"costs": {name: cost for name, cost in whole["costs"].items() if name != first}},
        "graph": {"graph": "another"},
        "batch": {"batch": ["x[9,6]float32"]},
        "negative": {"costs": whole["costs"] | {first: {"forward_s": -1.0}}},
        "roofline": {"source": "roofline"},
    }
    file.write_text(json.dumps(whole | changed[damage]) if damage in changed else damage)
    again = kept_profile(captured, measured)
    assert measured.times == 2 and again.costs.keys() == right.costs.keys()


class OtherArguments(PlainNet):
    """The same names, wiring and parameters as those of `Softmax`: a graph's fingerprint is the same."""

    dim = 0

    def run(self, h: Tensor) -> Tensor:
        return torch.softmax(super().run(h), self.dim)


class Softmax(OtherArguments):
    dim = 1


def test_times_hold_for_the_same_ops_only(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (capture_of(job_of(model)) for model in (Softmax, OtherArguments))
    assert ours.graph.fingerprint == theirs.graph.fingerprint
    wider, halved = capture_of(job_of(Softmax), 4), capture_of(job_of(Softmax), autocast=torch.bfloat16)
    for count, captured in enumerate((ours, theirs, wider, halved), start=1):
        kept_profile(captured, measured)
        assert measured.times == count
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    kept_profile(ours, measured)
    assert measured.times == 5


def test_ops_of_others_are_measured_each_time(measured: Measured, tmp_path: Path) -> None:
    captured = capture_of(job_of(PlainNet))
    op = replace(captured.graph.ops[0], target="mine.kernel.default")
    others = replace(captured, graph=replace(captured.graph, ops=(op, *captured.graph.ops[1:])))
    for model in (others, replace(captured, graph=replace(captured.graph, fallback="it cannot be traced"))):
        kept_profile(model, measured)
        kept_profile(model, measured)
    assert measured.times == 4 and not files(tmp_path)


def test_it_can_be_turned_off(measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELOOM_KEEP_PROFILES", "0")
    captured = capture_of(job_of(PlainNet))
    kept_profile(captured, measured)
    kept_profile(captured, measured)
    assert measured.times == 2 and not files(tmp_path)


def test_plans_take_them_and_profiles_never_do(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(PlainNet)
    captured = capture_of(job)
    real = planning.profile
    monkeypatch.setattr(planning, "profile", measured)
    models = [planning.captured_model(job, 2, None, captured=captured) for _ in range(2)]
    assert measured.times == 1 and models[0].profiles == models[1].profiles
    assert real(captured).costs != models[0].profiles["cpu"].costs


def test_where_nothing_can_be_written_it_is_measured_again(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "pipeloom").write_text("a file where the folder would be")
    captured = capture_of(job_of(PlainNet))
    kept_profile(captured, measured)
    kept_profile(captured, measured)
    assert measured.times == 2


@pytest.mark.parametrize("text", ['[{"forward": 1.0}]', '[{"forward": 0.0, "backward": 1.0}, {}]'])
def test_what_is_too_short_or_impossible_is_measured_again(tmp_path: Path, text: str) -> None:
    file, whole = tmp_path / "ratios.json", [CompiledRatio(forward=0.5), CompiledRatio(backward=0.5)]
    file.write_text(text)
    known = [
        daily(file, list[CompiledRatio], lambda _: whole, lambda ratios: len(ratios) == 2) for _ in range(2)
    ]
    assert known == [whole, whole] and len(json.loads(file.read_text())) == 2

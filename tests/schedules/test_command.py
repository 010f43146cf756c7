"""pipeloom schedule: what each command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeloom import schedules
from pipeloom.cli import main


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *words])


def test_list_names_everything_and_what_cannot_run_yet() -> None:
    found = json.loads(call("list", "--json").output)
    assert tuple(found) == schedules.names()
    assert found["seq1f1b"]["lacks"] == "sequence slices"
    assert "zb_v" in call("list").output


@pytest.mark.parametrize("name", schedules.names())
def test_show_draws_every_schedule(name: str) -> None:
    result = call("show", name, "-p", "2", "-m", "4")
    assert result.exit_code == 0, result.output
    assert "rank 1 " in result.output and "peak" in result.output


def test_show_writes_a_page_and_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    result = call("show", "zb_h1", "--html", str(page), "--trace", str(trace), "--json")
    assert json.loads(result.output)["rows"][3].startswith("3F0 3I0 3F1")
    assert "<html" in page.read_text() and json.loads(trace.read_text())["traceEvents"]


def test_compare_prints_both_bubbles_and_peaks() -> None:
    found = json.loads(call("compare", "1f1b", "zb_2p", "zb_v", "--json").output)
    assert found["1f1b"]["step_s"] == 33.0 and found["1f1b"]["peak"] == 4.0
    assert found["zb_2p"]["step_s"] == 27.0 and found["zb_2p"]["span_bubble"] == pytest.approx(0.0)
    assert found["zb_v"]["step_s"] == 25.5
    assert "27.3 %" in call("compare", "1f1b").output


def test_explain_names_the_reasons_and_they_add_up() -> None:
    found = json.loads(call("explain", "1f1b", "--json").output)
    assert sum(found.values()) == pytest.approx(4 * 33 - 4 * 24)
    assert "rank 0 waits to run B" in call("explain", "1f1b").output


def test_export_then_check(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    assert call("export", "v_half", "-o", str(file)).exit_code == 0
    result = call("check", str(file))
    assert result.exit_code == 0 and "are complete and cannot block" in result.output
    file.write_text("0F0,0B0\n1B0,1F0\n")
    result = call("check", str(file))
    assert result.exit_code == 1
    assert "rank 1 runs 1B0 before 1F0, which it needs" in result.output

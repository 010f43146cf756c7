"""The weight versions that `schedule show` follows."""

import json
import sys

import pytest
from click.testing import CliRunner

from pipeloom.cli import main
from pipeloom.schedules.scenario import weights


def test_with_a_flush_no_weight_versions_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`schedule show 1f1b -p 1024 -m 8192` followed the weight versions of each stage, quadratically, and
    dropped them: with a flush there is one."""

    def refused(*_: object) -> None:
        raise AssertionError("weight versions were followed")

    module = sys.modules[weights.__module__]
    monkeypatch.setattr(module, "versions", refused)
    monkeypatch.setattr(module, "weight_versions", refused)
    words = ["schedule", "show", "1f1b", "-p", "3", "-m", "4", "--json"]
    shown = CliRunner().invoke(main, words, catch_exceptions=False)
    assert json.loads(shown.stdout)["weights"] is None

"""Files of brackets within brackets gave a RecursionError instead of a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.ir.errors import CheckpointError, PlanError
from pipeloom.planner.piper_graphs import read_piper_graph
from pipeloom.runtime.checkpoint.files import read_index

NESTED = "[" * 200_000


def test_the_index_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(NESTED)
    with pytest.raises(CheckpointError, match="corrupt: index.json"):
        read_index(tmp_path)


def test_a_graph_of_piper(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(NESTED)
    with pytest.raises(PlanError, match="graph.json"):
        read_piper_graph(file)

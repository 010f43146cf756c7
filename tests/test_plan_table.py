"""The table of `pipeloom plan` names every size in full, and only the treatments that there are."""

from types import SimpleNamespace

import pytest

from pipeloom.commands.plan import _print

MiB = 2**20


def row(**sizes: int) -> dict[str, object]:
    times = {f"{name}_s": 1234.5 for name in ("forward", "input_grad", "weight_grad", "recompute")}
    names = ("parameters", "residuals", "kept", "recomputed", "offloaded", "peak", "cap")
    return {
        "stage": 10,
        "rank": 10,
        "ops": 100_000,
        "layers": "encoder.layers.10 .. 19",
        "offload_ratio": None,
        **times,
        **{f"{name}_bytes": sizes.get(name, 0) for name in names},
    }


@pytest.mark.parametrize("ways", [(), ("recomputed",), ("offloaded",), ("recomputed", "offloaded")])
def test_sizes_are_in_full(ways: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The last letters of caps were cut off, as "12.0 M…", where a table was wider than 120 letters."""
    sizes = {name: 1000 * MiB + at * 2**17 for at, name in enumerate(ways)}
    made = SimpleNamespace(microbatches=8, microbatch_size=4, predicted_step_s=1.0, width=1)
    _print([row(**sizes, cap=999 * MiB, peak=998 * MiB)], made, [], [])
    said = capsys.readouterr().out
    assert "…" not in said and "998.0 MiB" in said and "999.0 MiB" in said
    for name in ("recomputed", "offloaded"):
        assert (name in said) == (name in ways)
    assert ("of one micro-batch's residuals" in said) == bool(ways)


def test_of_stages_that_are_no_chain_it_says_what_each_reads_and_how_deep_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = SimpleNamespace(microbatches=8, microbatch_size=4, predicted_step_s=1.0, width=1)
    towers = [((), 2), ((), 2), ((0, 1), 1)]
    rows = [row() | {"stage": s, "reads": reads, "depth": depth} for s, (reads, depth) in enumerate(towers)]
    _print(rows, made, [], [])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["stage", "rank", "reads", "depth"]
    assert [line[2:4] for line in lines[2:4]] == [["–", "2"], ["–", "2"]] and lines[4][2:5] == [
        "0,",
        "1",
        "1",
    ]
    chain = [row() | {"stage": s, "reads": (s - 1,) if s else (), "depth": 3 - s} for s in range(3)]
    _print(chain, made, [], [])
    said = capsys.readouterr().out
    _print([row() | {"stage": s} for s in range(3)], made, [], [])
    assert said == capsys.readouterr().out and "reads" not in said

"""CSV files go to torch.distributed.pipelining's own loader and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, strategies as st

from pipeloom.ir.action import Action
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.formats import csv
from pipeloom.schedules.formats.csv import parse_schedule, schedule_text
from pipeloom.schedules.formats.plain import parse_plain

NAMES = [
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_2p",
    "zb_v",
    "v_half",
    "v_min",
    "1f1b_v",
    "dualpipev",
    "hanayo",
    "gis",
    "gis_h",
    "po",
]


def torch_loader(ranks: int, stages: int, microbatches: int) -> Any:
    """Torch's runtime without its stages: enough to load, check and lower a file."""
    loader: Any = object.__new__(torch_schedules._PipelineScheduleRuntime)
    loader.pp_group_size, loader._num_stages, loader._n_microbatches = ranks, stages, microbatches
    loader.rank, loader._stages, loader._defer_pp_recv, loader.pipeline_order = 0, [], False, {}
    loader._stage_forward_initialized = loader._stages_forward_initialized = False
    return loader


@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_ours_and_we_load_what_it_makes_of_it(name: str, tmp_path: Path) -> None:
    ranks, m = 4, 8
    stages, placement = registry.default_placement(name, ranks)
    ours = registry.build(name, stages, placement, m)
    file = tmp_path / "ours.csv"
    csv.write_schedule(ours, file)
    loader = torch_loader(ranks, len(placement), m)
    loader._load_csv(str(file), format="compute_only")
    read = {
        rank: [
            str(Action(a.stage_index, a.computation_type.value, a.microbatch_index))
            for cell in row
            for a in cell.sub_actions or (cell,)
        ]
        for rank, row in loader.pipeline_order.items()
    }
    assert [read[rank] for rank in range(ranks)] == [[str(a) for a in r] for r in ours.rows]

    lowered = tmp_path / "torch.csv"
    loader._dump_csv(str(lowered), format="compute_comms")
    back = csv.read_schedule(lowered)
    assert (back.placement, back.microbatches) == (ours.placement, m)
    assert set(back.rows[0]) == set(ours.rows[0]) and set(back.pairs) == set(ours.pairs)
    lower(back, stages)


def test_torch_loads_our_transfers(tmp_path: Path) -> None:
    stages, placement = registry.default_placement("zb_v", 2)
    made = registry.build("zb_v", stages, placement, 4)
    file = tmp_path / "comms.csv"
    file.write_text(csv.program_text(lower(made, stages)))
    loader = torch_loader(2, 4, 4)
    loader._validate_and_set_stage_mapping = lambda actions: None
    loader._load_csv(str(file), format="compute_comms")
    assert sum(map(len, loader.pipeline_order_with_comms.values())) == sum(
        len(line.split(",")) for line in file.read_text().splitlines()
    )
    assert csv.read_schedule(file).rows == made.rows


def test_it_is_strict() -> None:
    for text, message in (
        ("0F0,0FOO", "row 1, cell 2: cannot read '0FOO'"),
        ("0F0\n1F0,1F1junk", "row 2, cell 2: cannot read '1F1junk'"),
        ("0F0\n0B0", "stage 0 stands in the rows of ranks 0 and 1"),
        ("0F0\n2F0", "the stages are not numbered from 0"),
    ):
        with pytest.raises(ScheduleError, match=message):
            csv.parse_schedule(text)
    with pytest.raises(ScheduleError, match="cannot read"):
        csv.read_schedule(Path("no such file.csv"))


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_file_is_a_schedules_name(ending: str, tmp_path: Path) -> None:
    """Pairs included; its shape is the only one that it is for."""
    stages, placement = registry.default_placement("dualpipev", 2)
    ours = registry.build("dualpipev", stages, placement, 4)
    file = tmp_path / f"mine{ending}"
    file.write_text(f"{ours}\n" if ending == ".txt" else csv.schedule_text(ours))
    stages, placement = registry.default_placement(str(file), 2)
    read = registry.build(str(file), stages, placement, 4)
    assert (read.rows, placement) == (ours.rows, ours.placement)
    assert set(read.pairs) == set(ours.pairs) != set()
    with pytest.raises(ScheduleError, match="is for 2 ranks, not 3") as caught:
        registry.default_placement(str(file), 3)
    assert caught.value.hint == "use as many: -p 2"
    with pytest.raises(ScheduleError, match="is for 4 micro-batches, not 8"):
        registry.build(str(file), stages, placement, 8)


def test_what_torch_writes_besides_is_passed_over() -> None:
    text = "0UNSHARD,0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD,0RESHARD\n"
    assert str(csv.parse_schedule(text)) == "0F0 0F1 0F2&0B0 0B1 0B2"


def test_a_skip_connection_has_no_transfers_in_this_format() -> None:
    skip = dag(3, [(0, 1), (1, 2), (0, 2)])
    program = lower(registry.build("1f1b", skip, (0, 1, 2), 2), skip)
    with pytest.raises(ScheduleError, match="does not go to a neighbour in a chain"):
        csv.program_text(program)


@pytest.mark.parametrize("name", ["zb_v", "gis", "hanayo"])
def test_receives_are_posted_in_the_order_of_the_sends(name: str) -> None:
    """torch matches messages by order; in a V a rank may wait for its neighbour's second message first."""
    stages, placement = registry.default_placement(name, 2)
    program = lower(registry.build(name, stages, placement, 4), stages)
    rows = [line.split(",") for line in csv.program_text(program).splitlines()]
    posted = [cell for cell in rows[1] if "RECV" in cell]
    assert posted == [f"{s.peer}{s.other_end.kind}{s.microbatch}" for s in program.messages[0, 1]]
    waited = [f"{s.stage}{s.kind}{s.microbatch}" for s in program.rows[1] if str(s.kind).startswith("RECV")]
    assert posted != waited and sorted(posted) == sorted(waited)


CELLS = st.one_of(
    st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 3)),
    st.sampled_from(["", " 0F0", "00F01", "0SEND_F0", "(0F1;0B0)OVERLAP_F_B", "0X1", "1F9999999999"]),
)


@given(st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=3).map("\n".join), st.booleans())
def test_plain_files_read_as_any_other(text: str, ends: bool) -> None:
    """With an object for each action or without: both say the same, or the first says what is wrong."""
    text += "\n" * ends
    plain = parse_plain(text, name="x")
    with patch("pipeloom.schedules.formats.csv.parse_plain", return_value=None):
        try:
            slow = parse_schedule(text, name="x")
        except ScheduleError:
            assert plain is None
        else:
            assert plain is None or (plain.rows == slow.rows and plain.placement == slow.placement)
            assert plain is None or plain.microbatches == slow.microbatches


def test_plain_files_are_read_as_columns() -> None:
    graph, placement = registry.default_placement("zb_h1", 4)
    made = registry.build("zb_h1", graph, placement, 6)
    found = parse_plain(schedule_text(made), name=made.name)
    assert found is not None and found == made

"""CSV files go to torch.distributed.pipelining's own loader and come back."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from small import built

from pipeloom.ir.action import Action
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import formats, registry

NAMES = """gpipe 1f1b eager_1f1b interleaved_1f1b looped_bfs zb_h1 zb_2p zb_v v_half v_min 1f1b_v dualpipev
hanayo gis gis_h po""".split()


def torch_loader(ranks: int, stages: int, microbatches: int) -> Any:
    """Torch's runtime without its stages: enough to load, check and lower a file."""
    loader: Any = object.__new__(torch_schedules._PipelineScheduleRuntime)
    loader.pp_group_size, loader._num_stages, loader._n_microbatches = ranks, stages, microbatches
    loader.rank, loader._stages, loader._defer_pp_recv, loader.pipeline_order = 0, [], False, {}
    loader._stage_forward_initialized = loader._stages_forward_initialized = False
    return loader


@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_ours_and_we_load_what_it_makes_of_it(name: str, tmp_path: Path) -> None:
    ours = built(name, 4, 8)
    (tmp_path / "ours.csv").write_text(formats.schedule_text(ours))
    loader = torch_loader(4, ours.stages, 8)
    loader._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    read = [
        [
            str(Action(a.stage_index, a.computation_type.value, a.microbatch_index))
            for cell in loader.pipeline_order[rank]
            for a in cell.sub_actions or (cell,)
        ]
        for rank in range(4)
    ]
    assert read == [[str(a) for a in row] for row in ours.rows]

    loader._dump_csv(str(tmp_path / "torch.csv"), format="compute_comms")
    back = formats.read_schedule(tmp_path / "torch.csv")
    assert (back.placement, back.microbatches) == (ours.placement, 8)
    assert set(back.rows[0]) == set(ours.rows[0]) and set(back.pairs) == set(ours.pairs)
    lower(back, registry.default_placement(name, 4)[0])


def test_torch_loads_our_transfers(tmp_path: Path) -> None:
    made, file = built("zb_v", 2, 4), tmp_path / "comms.csv"
    file.write_text(formats.program_text(lower(made, chain(4))))
    loader = torch_loader(2, 4, 4)
    loader._validate_and_set_stage_mapping = lambda actions: None
    loader._load_csv(str(file), format="compute_comms")
    cells = sum(len(line.split(",")) for line in file.read_text().splitlines())
    assert sum(map(len, loader.pipeline_order_with_comms.values())) == cells
    assert formats.read_schedule(file).rows == made.rows


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_file_is_a_schedules_name(ending: str, tmp_path: Path) -> None:
    """Pairs included; its shape is the only one that it is for."""
    ours, file = built("dualpipev", 2, 4), tmp_path / f"mine{ending}"
    file.write_text(f"{ours}\n" if ending == ".txt" else formats.schedule_text(ours))
    read = built(str(file), 2, 4)
    assert (read.rows, read.placement) == (ours.rows, ours.placement)
    assert set(read.pairs) == set(ours.pairs) != set()
    for ranks, microbatches, words in ((3, 4, "2 ranks, not 3"), (2, 8, "4 micro-batches, not 8")):
        with pytest.raises(ScheduleError, match=words) as caught:
            built(str(file), ranks, microbatches)
        assert caught.value.hint


def test_what_torch_writes_besides_is_passed_over() -> None:
    text = "0UNSHARD,0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD,0RESHARD\n"
    assert str(formats.parse_schedule(text)) == "0F0 0F1 0F2&0B0 0B1 0B2"


def test_a_skip_connection_has_no_transfers_in_this_format() -> None:
    skip = dag(3, [(0, 1), (1, 2), (0, 2)])
    with pytest.raises(ScheduleError, match="neighbour"):
        formats.program_text(lower(registry.build("1f1b", skip, (0, 1, 2), 2), skip))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0F0,0SEND_F0", "0SEND_F0,0F0"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0"),
        ("0SEND_F1,", ""),
        ("0SEND_F1,", "0SEND_F1,0SEND_F1,"),
        ("0SEND_F1,", "0SEND_F7,"),
        ("1SEND_B0,", "1SEND_F0,"),
    ],
)
def test_transfers_that_are_not_those_of_the_chain_are_refused(old: str, new: str) -> None:
    text = formats.program_text(lower(built("1f1b", 2, 2), chain(2)))
    assert formats.parse_schedule(text).rows == built("1f1b", 2, 2).rows and old in text
    with pytest.raises(ScheduleError):
        formats.parse_schedule(text.replace(old, new))
    with pytest.raises(ScheduleError, match="no other end"):
        formats.parse_schedule(text.splitlines()[0])


@pytest.mark.parametrize("name", ["zb_v", "gis", "hanayo"])
def test_receives_are_posted_in_the_order_of_the_sends(name: str) -> None:
    """torch matches messages by order; in a V a rank may wait for its neighbour's second message first."""
    made = built(name, 2, 4)
    program = lower(made, chain(made.stages))
    posted = [cell for cell in formats.program_text(program).splitlines()[1].split(",") if "RECV" in cell]
    assert posted == [f"{s.peer}{s.other_end.kind}{s.microbatch}" for s in program.messages[0, 1]]
    waited = [f"{s.stage}{s.kind}{s.microbatch}" for s in program.rows[1] if str(s.kind).startswith("RECV")]
    assert posted != waited and sorted(posted) == sorted(waited)

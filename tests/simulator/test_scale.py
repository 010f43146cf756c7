"""Large programs: compiled kernels say what the plain ones do; what loads, and where it may be kept."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from processes import output
from shared_links import treated
from small import built, whole_costs

from pipeloom.checks.schedules import check
from pipeloom.ir import kernels
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.columns import Rows
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate
from pipeloom.simulator.summary import summarise


def odd_timeline() -> Timeline:
    """Skips, an edge without gradient, tied parameters, two stages on one of the ranks, some residuals copied
    and some made again, and links that ranks share."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 3), (1, 4)]
    stages = dag(5, edges, no_gradient=[(0, 3)], params={0: ("x",), 2: ("x", "y"), 4: ("y",)})
    made = registry.build("1f1b", stages, (0, 1, 2, 0, 3), 12, split_backward=True)
    copied = {"offloaded_bytes": 4, "offload_s": 2.0, "reload_s": 3.0, "recompute_s": 1.0}
    costs = tuple(replace(cost, residual_bytes=9, **copied) for cost in whole_costs(5, 0))
    devices = tuple(Device(name="d", memory_bytes=1, node=r // 2, switch=f"s{r // 2}") for r in range(4))
    link = Link(bandwidth_bytes_per_s=8.0, latency_s=0.25, overhead_s=0.125)
    where = Cluster(devices=devices, within_node=link, node_link=link, switches={"s0": link, "s1": link})
    return simulate(treated(lower(made, stages), Random(3)), stages, costs, where)


@pytest.mark.slow
def test_compiled_kernels_say_what_the_plain_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Kernel, "_compiled_from", 1 << 62)
    plain = odd_timeline()
    monkeypatch.setattr(kernels.Kernel, "_compiled_from", 0)
    compiled = odd_timeline()
    for figure in ("events", "peaks", "memory", "totals"):
        assert getattr(compiled, figure) == getattr(plain, figure)
    assert any(rank.wait_s for rank in summarise(plain).ranks)


def test_totals_of_arrays_are_those_of_the_events() -> None:
    made = odd_timeline()
    events, memory = tuple(made.events), tuple(made.memory)
    again = Timeline(source="predicted", ranks=made.ranks, events=events, memory=memory)
    assert made.totals == again.totals
    assert [made.peak_bytes(r) for r in range(4)] == [again.peak_bytes(r) for r in range(4)]


def test_a_deadlock_in_a_large_schedule_is_found_and_named() -> None:
    made = built("1f1b", 20, 1000).columns
    order = np.arange(len(made))
    low = int(made.offsets[7])
    first_back = low + int(np.argmax(made.kind[low:] == 1))
    order[[low + 1, first_back]] = order[[first_back, low + 1]]
    swapped = replace(made, kind=made.kind[order], microbatch=made.microbatch[order])
    bad = Schedule(name="bad", microbatches=1000, placement=tuple(range(20)), rows=Rows(swapped))
    with pytest.raises(DeadlockError, match="rank 7 at 7B0 needs 8B0") as caught:
        check(bad, chain(20))
    assert "circle" in caught.value.hint


def test_kernels_work_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """The file of the kernel lies where nothing can be written, and so does the user's cache folder."""
    file = tmp_path / "alone.py"
    file.write_text(
        "import numpy as np\n"
        "from pipeloom.ir.kernels import kernel\n"
        "@kernel\n"
        "def total(values):\n"
        "    found = 0\n"
        "    for value in values:\n"
        "        found += value\n"
        "    return found\n"
        "print(total(np.ones(1_000_000, np.int64)), total.compiled.stats.cache_path)\n"
    )
    (tmp_path / "__pycache__").write_text("a file, so that no folder can be made in its place")
    nowhere = {"NUMBA_CACHE_DIR": "", "HOME": str(file), "XDG_CACHE_HOME": str(file)}
    code = f"import runpy; runpy.run_path({str(file)!r}, run_name='alone')"
    assert output("-c", code, env=nowhere) == "1000000 None\n"


def test_small_schedules_load_no_compiler() -> None:
    code = (
        "import sys\n"
        "from pipeloom.schedules import registry\n"
        "from pipeloom.ir.stages import chain\n"
        "from pipeloom.lowering.passes import lower\n"
        "lower(registry.build('1f1b', chain(4), (0, 1, 2, 3), 8), chain(4))\n"
        "assert 'numba' not in sys.modules\n"
    )
    output("-c", code)

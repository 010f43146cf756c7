import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from drawings import MiB, computing

from pipeloom.ir.errors import ConfigError
from pipeloom.ir.explanation import Explanation, Idle
from pipeloom.ir.text import SizeUnit
from pipeloom.ir.timeline import Event, MemoryCurve, Timeline
from pipeloom.viewer.comparisons import Comparison, StageRow
from pipeloom.viewer.html import write_report
from pipeloom.viewer.picture import legend, memory_panels, pictures

Page = Callable[..., str]


def figure_in(page: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>([^<]*)</td>", page)


def test_the_page_tells_prediction_and_measurement(two_ranks: Timeline, page_of: Page) -> None:
    measured = replace(
        two_ranks,
        source="measured",
        events=tuple(replace(e, start_s=e.start_s * 1.25, end_s=e.end_s * 1.25) for e in two_ranks.events),
    )
    page = page_of(
        predicted=two_ranks,
        measured=measured,
        stages=[StageRow(stage=0, rank=0, ops=12, parameters=1_250_000, contents="blocks.0")],
        losses={"train": [(0, 5.5), (10, 2.25)], "validation": []},
        config={"model": {"width": 256}, "steps": 10},
        caps=[40 * MiB, 40 * MiB],
    )
    assert "11.88 s" in page and "predicted 9.50 s" in page and "-20.0 %" in page
    assert "<h3>stages, ms per micro-batch</h3>" in page
    assert ["0", "0", "12", "1.25 M", "1000.00", "1250.00", "-20.0 %"] == cells(page)[-11:-4]
    assert ["0", "0", "predicted", "10.0", "20.0", "30.0", "", "40.0"] == cells(page)[:8]
    assert "<dt>model.width</dt><dd>256</dd>" in page
    assert "from 5.5 at step 0" in page and "validation" not in page
    names = [action for one in figure_in(page, "timelines") for action in one["blocks"]["action"]]
    assert sorted(names) == sorted(e.action for t in (two_ranks, measured) for e in t.events)
    # The first card is the step time that is given.
    middle = Comparison(name="middle step", predicted=8.0, measured=10.0)
    page = page_of(predicted=two_ranks, measured=measured, step_time=middle)
    assert "-20.0 %" in page and "predicted 8.00 s" in page and "predicted 9.50 s" not in page


def test_reasons_for_idle_time_stand_in_one_table_and_add_up(two_ranks: Timeline, page_of: Page) -> None:
    def explained(source: str, *parts: tuple[str, float]) -> Explanation:
        idle = [Idle(rank=0, start_s=0.0, end_s=end, reason=why) for why, end in parts]  # type: ignore[arg-type]
        return Explanation(source=source, ranks=2, step_s=10.0, idle=tuple(idle), path=())

    both = [explained("predicted", ("order", 2.0), ("drain", 1.0)), explained("measured", ("drain", 4.0))]
    page = page_of(predicted=two_ranks, measured=two_ranks, explanations=both)
    table = cells(page[page.index("why ranks are idle") :])
    assert [row[0] for row in zip(*[iter(table)] * 5, strict=False)][:3] == ["drain", "order", "all"]
    assert (table[3:5], table[8:10]) == (["5.0 %", "20.0 %"], ["10.0 %", "–"])
    assert table[13:15] == ["15.0 %", "20.0 %"]
    assert "bubble of the longest span" in page and "predicted 15.0 %" in page


def test_memory_can_be_counted_in_another_unit(two_ranks: Timeline, page_of: Page) -> None:
    unit = SizeUnit(name="micro-batches", bytes=20 * MiB)
    page = page_of(predicted=two_ranks, size_unit=unit, caps=[30 * MiB, 30 * MiB])
    assert "peak memory, rank 0, micro-batches" in page and "MiB" not in page


def test_what_is_not_given_is_left_out(two_ranks: Timeline, page_of: Page) -> None:
    page = page_of(predicted=replace(two_ranks, memory=(), peaks=()))
    assert page.count("<h2>") == 1 and "Timelines, rank by rank" in page
    assert "<h2>" not in page_of()
    settings = {"tf32": True, "plan": None, "paths": (), "steps": 3}
    shown = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page_of(config=settings))
    assert shown == [("tf32", "yes"), ("steps", "3")]


def test_text_cannot_break_out_of_the_page_which_asks_for_nothing_from_outside(page_of: Page) -> None:
    evil = "</script><script>alert(1)</script>"
    page = page_of(title=evil, predicted=computing((0, evil, 0.0, 1.0)), config={"text": evil})
    assert evil not in page
    assert figure_in(page, "timelines")[0]["blocks"]["action"] == [evil]
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "default-src 'none'" in page


def test_a_failed_write_is_said_and_leaves_the_old_page(two_ranks: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write .*No such file or directory"):
        write_report(tmp_path / "no" / "report.html", title="x", predicted=two_ranks)
    path = tmp_path / "report.html"
    path.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(Path, "replace", side_effect=full), pytest.raises(ConfigError, match="No space left"):
        write_report(path, title="x", predicted=two_ranks)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_waits_too_short_to_see_are_not_drawn(two_ranks: Timeline) -> None:
    blink = Event(rank=1, stream="recv", action="1RECV_F0<0", start_s=1.0, end_s=1.000001)
    (one,) = pictures([replace(two_ranks, events=(*two_ranks.events, blink))])
    drawn = one["blocks"]["action"]
    assert "0RECV_B0<1" in drawn and "1RECV_F0<0" not in drawn


def test_legend_names_each_kind_once_computing_first(two_ranks: Timeline) -> None:
    names = [name for name, _ in legend(pictures([two_ranks, two_ranks]))]
    assert names == ["forward", "backward", "optimizer step", "wait for a message"]


def test_a_cap_is_drawn_only_where_it_would_be_seen(two_ranks: Timeline) -> None:
    near, far = (memory_panels([two_ranks], caps=[cap * MiB]) for cap in (31, 3000))
    assert near is not None and far is not None
    assert near["caps"] == {0: [31.0, "cap 31.0 MiB"]} and far["caps"] == {}
    assert memory_panels([replace(two_ranks, memory=())]) is None


def test_memory_noted_late_is_drawn_in_order(two_ranks: Timeline) -> None:
    curve = MemoryCurve(rank=0, times_s=(0.0, 2.0, 1.0), sizes=(MiB, 2 * MiB, 5 * MiB))
    empty = MemoryCurve(rank=1, times_s=(), sizes=())
    panels = memory_panels([replace(two_ranks, memory=(curve, empty))])
    assert panels is not None
    (drawn,) = panels["curves"]
    assert [*map(tuple, drawn["points"])] == [(0.0, 1.0), (1000.0, 5.0), (2000.0, 2.0), (9500.0, 2.0)]


def test_the_page_says_that_it_shows_one_of_several_replicas(two_ranks: Timeline, page_of: Page) -> None:
    row = StageRow(stage=0, rank=0, ops=1, parameters=1)
    for replicas, said in ((1, False), (3, True)):
        page = page_of(predicted=two_ranks, stages=[replace(row, replicas=replicas)])
        assert ("the stages of the first of 3 replicas" in page) == said

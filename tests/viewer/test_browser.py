"""The report in a real browser: headless Chromium, without a network."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import Visit, needs_chromium
from drawings import simulated_step

from pipeloom.ir.explanation import Explanation, Idle, PathStep
from pipeloom.ir.flow import dag
from pipeloom.viewer.comparisons import StageRow
from pipeloom.viewer.html import write_report
from pipeloom.viewer.stage_graph import stage_edges

pytestmark = needs_chromium

DRAWN = """
[...document.querySelectorAll("svg.stages g")].map((g) => {
  const box = g.getBoundingClientRect();
  return [g.dataset.stage ?? g.dataset.edge, g.textContent, box.width > 0 && box.height > 0];
})
"""
PANELS = ["Timelines, rank by rank", "Memory", "Stages", "Loss", "Configuration"]
TABLES = ["why ranks are idle", "memory at each rank's peak, MiB", "stages, ms per micro-batch"]
INK = {"light": "rgb(27, 36, 51)", "dark": "rgb(230, 234, 241)"}
PATH = "[...document.querySelectorAll('#timelines path[stroke-width=\"2.5\"]')]"

EXPLANATION = Explanation(
    source="predicted",
    ranks=2,
    step_s=0.2,
    idle=(
        Idle(rank=0, start_s=0.05, end_s=0.1, reason="order", action="0B0", waits_for="1B0", on_rank=1),
        Idle(rank=1, start_s=0.15, end_s=0.2, reason="drain", waits_for="0B0"),
    ),
    path=(
        PathStep(kind="compute", rank=0, action="0F0", start_s=0.0, end_s=0.05),
        PathStep(kind="transfer", rank=0, action="0SEND_F0>1", start_s=0.05, end_s=0.1, to_rank=1),
        PathStep(kind="compute", rank=1, action="1F0", start_s=0.1, end_s=0.2),
    ),
)
EDGES = [(0, 1), (1, 4), (2, 3), (3, 4)]
"""Two towers of two stages and a join; the first edge carries no gradient."""


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def open_report(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    def visit(*, ranks: int = 5, mbs: int = 8, width: int = 1280, scheme: str = "light") -> Visit:
        path = tmp_path_factory.mktemp("report") / "report.html"
        write_report(
            path,
            title="a model",
            predicted=simulated_step(ranks=ranks, mbs=mbs),
            measured=simulated_step(ranks=ranks, mbs=mbs, source="measured", forward_s=0.011),
            explanations=[EXPLANATION],
            stages=[StageRow(stage=s, rank=s, ops=9, parameters=1000) for s in range(ranks)],
            edges=stage_edges(dag(ranks, EDGES, value_bytes=1536, no_gradient=EDGES[:1])),
            losses={"train": [(0, 5.5), (10, 2.25)]},
            config={"steps": 10},
        )
        context = browser.new_context(
            offline=True, color_scheme=scheme, viewport={"width": width, "height": 900}
        )
        return Visit(context.new_page(), path.as_uri())

    yield visit


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_panel_is_there_without_a_complaint_or_a_network(open_report: Open, scheme: str) -> None:
    visit = open_report(scheme=scheme)
    texts = "(tag) => [...document.querySelectorAll(tag)].map((e) => e.textContent)"
    assert visit.page.evaluate(texts, "h2") == PANELS and visit.page.evaluate(texts, "h3") == TABLES
    assert visit.page.evaluate("document.querySelectorAll('.figure svg').length") == 3
    drawn = {name: (text, seen) for name, text, seen in visit.page.evaluate(DRAWN)}
    assert set(drawn) == {*map(str, range(5)), *(f"{a}-{b}" for a, b in EDGES)}
    assert all(seen for _, seen in drawn.values())
    assert drawn["0-1"][0] == "1.5 KiB, no gradient" and drawn["1-4"][0] == "1.5 KiB"
    assert drawn["4"][0].startswith("stage 4, rank 4F ") and drawn["4"][0].count(" ms") == 2
    for ink in ("#timelines text", "svg.stages .stage text"):
        assert visit.page.evaluate(f"getComputedStyle(document.querySelector('{ink}')).fill") == INK[scheme]
    assert visit.hover("2B3").startswith("2B3 stage 2: backward of micro-batch 3; rank 2, starts at ")
    sent = "pictures[0].blocks.action.findIndex((one) => one.startsWith('3RECV_F5'))"
    said = visit.page.evaluate(f"pictures[0].say({sent})")
    assert said.startswith("stage 3 waits for the outputs of micro-batch 5 from stage 2; rank 3")
    gap = "timelines.words({picture: pictures[0], block: null, gap: pictures[0].gapAt(0, 60)}).join(' ')"
    assert visit.page.evaluate(gap).startswith("idle: order rank 0 waits for 1B0 of rank 1")
    assert [url.split(":")[0] for url in visit.requests] == ["file"]
    assert visit.complaints == []


@pytest.mark.slow
def test_the_critical_path_and_the_time_axes_follow_the_reader(open_report: Open) -> None:
    """The path stays where the window changes; dragging zooms timelines and memory, a double click undoes
    it."""
    visit = open_report()
    visit.page.check("#critical-path")
    visit.wait_until(f"{PATH}.length === 1")
    visit.page.set_viewport_size({"width": 1000, "height": 900})
    visit.wait_until(f"timelines.width < 1000 && {PATH}.length === 1")
    visit.page.uncheck("#critical-path")
    visit.wait_until(f"{PATH}.length === 0")
    before = visit.page.inner_text("#memory")
    x, y = visit.middle("2B3")
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 150, y)
    visit.page.mouse.up()
    visit.wait_until("view.to - view.from < 0.3 * view.span")
    visit.wait_until("timelines.waiting === false")
    assert visit.page.inner_text("#memory") != before
    visit.page.mouse.dblclick(x, y)
    visit.wait_until("view.from === 0 && view.to > view.span")
    assert visit.complaints == []


def test_a_zoomed_chart_has_only_what_is_inside(open_report: Open) -> None:
    """Nothing before or behind the view is drawn on its borders."""
    visit = open_report()
    lines = """(() => {
      const memory = {unit: "", top: 9, ranks: [0], caps: {}, curves: [{rank: 0, name: "a",
        source: "predicted", tier: "device", points: [[0, 1], [1, 8], [2, 3], [6, 5], [8, 9], [9, 9]]}]};
      const timeline = {...pictures[0], from: () => 0, computing: [[]], beside: [[]], gaps: [[]], ranks: 1,
        pairs: [], scale: 1, path: [[0, 0], [2, 1], [4, 1], [6, 3], [9, 3]]};
      const zoomed = {from: 3, to: 5}, near = (line) => line.map((point) => point.map(Math.round));
      const curve = memoryShapes(memory, zoomed, {width: 276}).shapes.filter((s) => s.width === 1.8);
      const path = timeShapes(timeline, zoomed, {width: 276, top: 0, row: 100, right: 14}, {path: true});
      return [...curve, ...path.filter((s) => s.width === 2.5)].map((s) => near(s.line));
    })()"""
    (curve, path) = visit.page.evaluate(lines)
    assert curve == [[62, curve[0][1]], [262, curve[0][1]]]
    assert path == [[62, 110], [162, 110], [262, 210]]


def test_the_legend_shows_the_line_of_each_curve(open_report: Open) -> None:
    curve = '{rank: 0, source: "measured", points: [[0, 1], [1, 2]], name: "measured'
    curves = f'[{curve}", tier: "device"}}, {curve}, host", tier: "host"}}]'
    memory = f'{{unit: "", top: 3, ranks: [0], caps: {{}}, curves: {curves}}}'
    shapes = f"memoryShapes({memory}, {{from: 0, to: 1}}, {{width: 900}}).shapes"
    dashes = open_report().page.evaluate(f"{shapes}.filter((s) => s.width > 1.5).map((s) => s.dash)")
    assert dashes == ["", "1 3", "", "1 3"]


def test_losses_that_are_no_numbers_are_not_drawn(open_report: Open) -> None:
    visit = open_report()
    series = '{name: "train", points: [[12000, 5], [12001, null], [12002, 4]]}'
    plot = f'plotShapes({{series: [{series}], x: "step", y: "loss"}}, 900).shapes'
    (line,) = visit.page.evaluate(f"{plot}.filter((s) => s.line && s.width === 2 && s.line[0][1] > 10)")
    assert len(line["line"]) == 2 and max(y for _, y in line["line"]) < 220
    assert "12001" in visit.page.evaluate(f"{plot}.map((s) => s.text)")


def test_pointers_and_keys_that_are_not_for_the_timelines(open_report: Open) -> None:
    """Keys of the browser, a press outside the rows, a pointer that is taken away, a rank without a block."""
    visit = open_report()
    visit.page.evaluate("pictures[0].computing[1] = []")
    taken = """([name, more]) => {
      const event = new KeyboardEvent("keydown", {key: name, cancelable: true, bubbles: true, ...more});
      return !document.getElementById("timelines").dispatchEvent(event);
    }"""
    assert visit.page.evaluate(taken, ["+", {}])
    for key in ("ctrlKey", "metaKey", "altKey"):
        assert not visit.page.evaluate(taken, ["+", {key: True}])
    assert visit.page.evaluate(taken, ["ArrowRight", {}])
    assert visit.page.evaluate(taken, ["ArrowDown", {}])
    x, y = visit.middle("2B3")
    visit.page.evaluate("void (timelines.options.carry = ({ block }) => false)")
    visit.page.mouse.click(x, visit.page.evaluate("timelines.canvas.getBoundingClientRect().top + 2"))
    before = visit.page.evaluate("[view.from, view.to]")
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 90, y)
    assert visit.page.is_visible(".band")
    visit.page.evaluate("dispatchEvent(new PointerEvent('pointercancel'))")
    assert not visit.page.is_visible(".band")
    visit.page.mouse.move(x + 95, y)
    visit.page.mouse.up()
    assert not visit.page.is_visible(".band") and visit.page.evaluate("[view.from, view.to]") == before
    assert visit.complaints == []


@pytest.mark.slow
def test_narrow_pages_scroll_in_their_frames_and_thousands_of_blocks_answer(open_report: Open) -> None:
    narrow = open_report(ranks=9, mbs=4, width=390)
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == 390
    many = open_report(ranks=8, mbs=96)
    assert many.page.evaluate("pictures[0].blocks.action.length") > 2000
    assert many.hover("7B95").startswith("7B95")

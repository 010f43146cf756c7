"""The report in a real browser: headless Chromium, without a network."""

import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest

from pipeloom.ir.explanation import Explanation, Idle, PathStep
from pipeloom.ir.flow import dag
from pipeloom.ir.timeline import Timeline
from pipeloom.viewer.html import write_report
from pipeloom.viewer.report_facts import StageRow
from pipeloom.viewer.stage_graph import stage_edges

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

PATIENCE_MS = 300_000
"""Only what hangs takes so long."""

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

MIDDLE_OF_BLOCK = """
([action, panel]) => {
  const plot = document.getElementById("timelines");
  const names = plot.data.flatMap((t) => t.customdata.map((c) => [c[0], t.yaxis]));
  const index = names.findIndex(([name, axis]) => name === action && axis === panel);
  const block = plot.querySelectorAll(".barlayer .point")[index];
  block.scrollIntoView({ block: "center" });
  const box = block.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}
"""
HOVERED = "[...document.querySelectorAll('#timelines .hoverlayer .hovertext')].map((e) => e.textContent)"


MIDDLE_OF_GAP = """
([rank, reason]) => {
  const plot = document.getElementById("timelines");
  const trace = plot.data.findIndex((t) => t.name === "idle");
  const gap = plot.data[trace].customdata.findIndex(
    (c, i) => c[0] === reason && plot.data[trace].y[i] === rank);
  const block = plot.querySelectorAll(".barlayer .trace.bars")[trace].querySelectorAll(".point")[gap];
  block.scrollIntoView({ block: "center" });
  const box = block.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}
"""
PATHS = "[...document.querySelectorAll('#timelines .scatterlayer .js-line')].map((e) => e.getAttribute('d'))"


def wait_until(page: "sync_api.Page", condition: str) -> None:
    """Look once a frame. Playwright's own wait needs `eval`, which the page's policy forbids."""
    page.evaluate(
        f"""new Promise((done, fail) => {{
          let frames = 0;
          const again = () => ++frames > 20_000 ? fail("never") : requestAnimationFrame(look);
          const look = () => ({condition}) ? done() : again();
          look();
        }})"""
    )


class Visit:
    """An open page, and everything it complained about or asked for."""

    def __init__(self, page: "sync_api.Page", url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        page.wait_for_selector("body[data-drawn=yes]", timeout=PATIENCE_MS)

    def hover(self, action: str, panel: str = "y") -> str:
        self.page.mouse.move(*self.page.evaluate(MIDDLE_OF_BLOCK, [action, panel]))
        self.page.wait_for_selector("#timelines .hoverlayer .hovertext")
        (text,) = self.page.evaluate(HOVERED)
        return str(text)

    def hover_gap(self, rank: int, reason: str) -> str:
        self.page.mouse.move(*self.page.evaluate(MIDDLE_OF_GAP, [rank, reason]))
        self.page.wait_for_selector("#timelines .hoverlayer .hovertext")
        (text,) = self.page.evaluate(HOVERED)
        return str(text)


EXPLANATION = Explanation(
    source="predicted",
    ranks=2,
    step_s=0.2,
    idle=(
        Idle(
            rank=0,
            start_s=0.05,
            end_s=0.1,
            reason="order",
            action="0B0",
            waits_for="1B0",
            on_rank=1,
            root="1F0",
            root_rank=1,
        ),
        Idle(rank=1, start_s=0.15, end_s=0.2, reason="drain", waits_for="0B0"),
    ),
    path=(
        PathStep(kind="compute", rank=0, action="0F0", start_s=0.0, end_s=0.05),
        PathStep(kind="transfer", rank=0, action="0SEND_F0>1", start_s=0.05, end_s=0.1, to_rank=1),
        PathStep(kind="compute", rank=1, action="1F0", start_s=0.1, end_s=0.2),
    ),
)


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def open_report(
    make_timeline: Callable[..., Timeline], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)

        def visit(
            *,
            ranks: int = 2,
            mbs: int = 8,
            width: int = 1280,
            scheme: str = "light",
            explained: bool = False,
            edges: Sequence[tuple[int, int]] = (),
        ) -> Visit:
            path = tmp_path_factory.mktemp("report") / "report.html"
            write_report(
                path,
                title="a model",
                predicted=make_timeline(ranks=ranks, mbs=mbs),
                explanations=[EXPLANATION] if explained else [],
                measured=make_timeline(ranks=ranks, mbs=mbs, source="measured"),
                stages=[StageRow(stage=s, rank=s, ops=9, parameters=1000) for s in range(ranks)],
                edges=stage_edges(dag(ranks, edges, value_bytes=1536, no_gradient=edges[:1])),
                losses={"train": [(0, 5.5), (10, 2.25)]},
                config={"steps": 10},
            )
            context = browser.new_context(
                offline=True, color_scheme=scheme, viewport={"width": width, "height": 900}
            )
            context.set_default_timeout(PATIENCE_MS)
            return Visit(context.new_page(), path.as_uri())

        yield visit
        browser.close()


def test_page_opens_offline_without_a_complaint_and_blocks_tell_their_names(open_report: Open) -> None:
    visit = open_report(ranks=4)
    assert visit.hover("2B3").startswith("2B3  stage 2: backward of micro-batch 3")
    assert "rank 0, starts at" in visit.hover("0F3", panel="y2")
    assert visit.hover("0RECV_B0<1").startswith(
        "0RECV_B0<1  stage 0 waits for the gradients of micro-batch 0"
    )
    assert [url.split(":")[0] for url in visit.requests] == ["file"]
    assert visit.complaints == []


@pytest.mark.slow
def test_a_gap_tells_its_reason(open_report: Open) -> None:
    visit = open_report(explained=True)
    assert visit.hover_gap(0, "order").startswith(
        "idle: orderrank 0 waits for 1B0 of rank 1: it is late as rank 1 was busy with 1F0"
    )
    assert "from 50.00 ms, for 50.00 ms" in visit.hover_gap(0, "order")
    assert "Why ranks are idle" in visit.page.inner_text("body")
    assert visit.complaints == []


@pytest.mark.slow
def test_the_critical_path_is_shown_by_a_switch_and_stays_when_colours_change(open_report: Open) -> None:
    visit = open_report(explained=True, scheme="light")
    page = visit.page
    assert page.evaluate(PATHS) == []
    page.check("#critical-path")
    wait_until(page, f"{PATHS}.length === 2")
    (line, same) = page.evaluate(PATHS)
    assert line == same and line.count("L") + line.count("H") + line.count("V") == 3
    page.emulate_media(color_scheme="dark")
    wait_until(page, "getComputedStyle(document.body).color === 'rgb(230, 234, 241)'")
    wait_until(page, f"{PATHS}.length === 2")
    page.uncheck("#critical-path")
    wait_until(page, f"{PATHS}.length === 0")
    assert visit.complaints == []


@pytest.mark.slow
def test_without_an_explanation_there_is_no_switch(open_report: Open) -> None:
    assert open_report().page.query_selector("#critical-path") is None


@pytest.mark.slow
def test_zooming_the_timelines_zooms_the_memory_and_back(open_report: Open) -> None:
    page = open_report().page
    ranges = "['timelines', 'memory'].map((id) => document.getElementById(id).layout.xaxis.range)"
    page.evaluate("Plotly.relayout('timelines', { 'xaxis.range': [20, 60] })")
    wait_until(page, f"{ranges}.every(([a, b]) => a === 20 && b === 60)")
    page.evaluate("Plotly.relayout('memory', { 'xaxis.range': [0, 50] })")
    wait_until(page, f"{ranges}.every(([a, b]) => a === 0 && b === 50)")


@pytest.mark.slow
def test_dark_and_light_are_readable(open_report: Open) -> None:
    ink = "getComputedStyle(document.querySelector('#timelines .x2tick text')).fill"
    visit = open_report(scheme="dark")
    dark = visit.page.evaluate(ink)
    visit.page.emulate_media(color_scheme="light")
    wait_until(visit.page, f"{ink} !== {dark!r}")
    assert dark == "rgb(230, 234, 241)"
    assert visit.page.evaluate(ink) == "rgb(27, 36, 51)"
    assert visit.complaints == []


@pytest.mark.slow
def test_a_narrow_page_does_not_scroll_sideways(open_report: Open) -> None:
    visit = open_report(ranks=4, width=390)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    assert "0F0" in visit.hover("0F0")


@pytest.mark.slow
def test_thousands_of_blocks_draw_and_answer(open_report: Open) -> None:
    visit = open_report(ranks=8, mbs=96)
    blocks = visit.page.evaluate("document.querySelectorAll('.barlayer .point').length")
    assert blocks > 4000
    assert visit.hover("7B95").startswith("7B95")
    assert visit.complaints == []


DRAWN = """
[...document.querySelectorAll("svg.stages g")].map((g) => {
  const box = g.getBoundingClientRect();
  return [g.dataset.stage ?? g.dataset.edge, g.textContent, box.width > 0 && box.height > 0,
          getComputedStyle(g.querySelector("text")).fill];
})
"""


@pytest.mark.parametrize(
    "scheme, ink",
    [("light", "rgb(27, 36, 51)"), pytest.param("dark", "rgb(230, 234, 241)", marks=pytest.mark.slow)],
)
def test_the_stage_graph_shows_every_stage_and_every_edge(open_report: Open, scheme: str, ink: str) -> None:
    """Two towers of two stages and a join; the first edge carries no gradient."""
    edges = [(0, 1), (1, 4), (2, 3), (3, 4)]
    visit = open_report(ranks=5, edges=edges, scheme=scheme)
    drawn = {name: (text, seen, fill) for name, text, seen, fill in visit.page.evaluate(DRAWN)}
    assert set(drawn) == {*map(str, range(5)), *(f"{a}-{b}" for a, b in edges)}
    assert all(seen and fill == ink for _, seen, fill in drawn.values())
    sizes = {name: text for name, (text, _, _) in drawn.items() if "-" in name}
    assert sizes == {"0-1": "1.5 KiB, no gradient", "1-4": "1.5 KiB", "2-3": "1.5 KiB", "3-4": "1.5 KiB"}
    for stage in range(5):
        text = drawn[str(stage)][0]
        assert text.startswith(f"stage {stage}, rank {stage}F ") and text.count(" ms") == 2
    assert visit.complaints == []


@pytest.mark.slow
def test_a_long_pipeline_scrolls_in_its_frame(open_report: Open) -> None:
    visit = open_report(ranks=9, mbs=4, width=390, edges=[(s, s + 1) for s in range(8)])
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390

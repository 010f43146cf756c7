"""The report in a real browser: headless Chromium, without a network."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from pipeloom.ir.explanation import Explanation, Idle, PathStep
from pipeloom.ir.flow import dag
from pipeloom.ir.timeline import Timeline
from pipeloom.viewer.html import write_report
from pipeloom.viewer.stage_graph import stage_edges
from pipeloom.viewer.tables import StageRow

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
([name, text]) => {
  const plot = document.getElementById("timelines");
  const trace = plot.data.findIndex((t) => t.name === name);
  const bar = plot.data[trace].customdata.findIndex((c) => c[0] === text);
  const block = plot.querySelectorAll(".barlayer .trace.bars")[trace].querySelectorAll(".point")[bar];
  block.scrollIntoView({ block: "center" });
  const box = block.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}
"""
HOVERED = "[...document.querySelectorAll('#timelines .hoverlayer .hovertext')].map((e) => e.textContent)"
PATHS = "[...document.querySelectorAll('#timelines .scatterlayer .js-line')]"
DRAWN = """
[...document.querySelectorAll("svg.stages g")].map((g) => {
  const box = g.getBoundingClientRect();
  return [g.dataset.stage ?? g.dataset.edge, g.textContent, box.width > 0 && box.height > 0];
})
"""
PANELS = ["Timelines, rank by rank", "Memory", "Stages", "Loss", "Configuration"]
TABLES = ["why ranks are idle", "memory at each rank's peak, MiB", "stages, ms per micro-batch"]
INK = {"light": "rgb(27, 36, 51)", "dark": "rgb(230, 234, 241)"}

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

    def hover(self, name: str, text: str) -> str:
        label = "#timelines .hoverlayer .hovertext"
        self.page.mouse.move(0, 0)
        self.page.wait_for_selector(label, state="detached")  # that of the block before
        self.page.mouse.move(*self.page.evaluate(MIDDLE_OF_BLOCK, [name, text]))
        self.page.wait_for_selector(label)
        (hovered,) = self.page.evaluate(HOVERED)
        return str(hovered)

    def wait_until(self, condition: str) -> None:
        """Look once a frame. Playwright's own wait needs `eval`, which the page's policy forbids."""
        self.page.evaluate(
            f"""new Promise((done, fail) => {{
              let frames = 0;
              const again = () => ++frames > 20_000 ? fail("never") : requestAnimationFrame(look);
              const look = () => ({condition}) ? done() : again();
              look();
            }})"""
        )


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def open_report(
    make_timeline: Callable[..., Timeline], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)

        def visit(*, ranks: int = 5, mbs: int = 8, width: int = 1280, scheme: str = "light") -> Visit:
            path = tmp_path_factory.mktemp("report") / "report.html"
            write_report(
                path,
                title="a model",
                predicted=make_timeline(ranks=ranks, mbs=mbs),
                measured=make_timeline(ranks=ranks, mbs=mbs, source="measured", forward_s=0.011),
                explanations=[EXPLANATION],
                stages=[StageRow(stage=s, rank=s, ops=9, parameters=1000) for s in range(ranks)],
                edges=stage_edges(dag(ranks, EDGES, value_bytes=1536, no_gradient=EDGES[:1])),
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


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_panel_is_there_without_a_complaint_or_a_network(open_report: Open, scheme: str) -> None:
    visit = open_report(scheme=scheme)
    texts = "(tag) => [...document.querySelectorAll(tag)].map((e) => e.textContent)"
    assert visit.page.evaluate(texts, "h2") == PANELS and visit.page.evaluate(texts, "h3") == TABLES
    assert visit.page.evaluate("document.querySelectorAll('.figure .main-svg').length") >= 3
    drawn = {name: (text, seen) for name, text, seen in visit.page.evaluate(DRAWN)}
    assert set(drawn) == {*map(str, range(5)), *(f"{a}-{b}" for a, b in EDGES)}
    assert all(seen for _, seen in drawn.values())
    assert drawn["0-1"][0] == "1.5 KiB, no gradient" and drawn["1-4"][0] == "1.5 KiB"
    assert drawn["4"][0].startswith("stage 4, rank 4F ") and drawn["4"][0].count(" ms") == 2
    for ink in ("#timelines .x2tick text", "svg.stages .stage text"):
        assert visit.page.evaluate(f"getComputedStyle(document.querySelector('{ink}')).fill") == INK[scheme]
    assert visit.hover("backward", "2B3").startswith("2B3  stage 2: backward of micro-batch 3")
    assert visit.hover("idle", "order").startswith("idle: orderrank 0 waits for 1B0 of rank 1")
    assert [url.split(":")[0] for url in visit.requests] == ["file"]
    assert visit.complaints == []


@pytest.mark.slow
def test_the_critical_path_and_the_time_axes_follow_the_reader(open_report: Open) -> None:
    """The path stays where colours change; zooming the timelines zooms the memory, and back."""
    visit = open_report()
    visit.page.check("#critical-path")
    visit.wait_until(f"{PATHS}.length === 2")
    visit.page.emulate_media(color_scheme="dark")
    visit.wait_until(f"getComputedStyle(document.body).color === '{INK['dark']}' && {PATHS}.length === 2")
    visit.page.uncheck("#critical-path")
    visit.wait_until(f"{PATHS}.length === 0")
    ranges = "['timelines', 'memory'].map((id) => document.getElementById(id).layout.xaxis.range)"
    for leader, begin, end in (("timelines", 20, 60), ("memory", 0, 50)):
        visit.page.evaluate(f"Plotly.relayout('{leader}', {{ 'xaxis.range': [{begin}, {end}] }})")
        visit.wait_until(f"{ranges}.every(([a, b]) => a === {begin} && b === {end})")
    assert visit.complaints == []


@pytest.mark.slow
def test_narrow_pages_scroll_in_their_frames_and_thousands_of_blocks_answer(open_report: Open) -> None:
    narrow = open_report(ranks=9, mbs=4, width=390)
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == 390
    many = open_report(ranks=8, mbs=96)
    assert many.page.evaluate("document.querySelectorAll('.barlayer .point').length") > 4000
    assert many.hover("backward", "7B95").startswith("7B95")

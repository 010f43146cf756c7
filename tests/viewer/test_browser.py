"""The report in a real browser: headless Chromium, without a network."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from pipeloom.ir.timeline import Timeline
from pipeloom.viewer import StageRow, write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

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


def wait_until(page: "sync_api.Page", condition: str) -> None:
    """Look once a frame. Playwright's own wait needs `eval`, which the page's policy forbids."""
    page.evaluate(
        f"""new Promise((done, fail) => {{
          let frames = 0;
          const again = () => ++frames > 1000 ? fail("never") : requestAnimationFrame(look);
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
        page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)

    def hover(self, action: str, panel: str = "y") -> str:
        self.page.mouse.move(*self.page.evaluate(MIDDLE_OF_BLOCK, [action, panel]))
        self.page.wait_for_selector("#timelines .hoverlayer .hovertext")
        (text,) = self.page.evaluate(HOVERED)
        return str(text)


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def open_report(
    make_timeline: Callable[..., Timeline], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def visit(*, ranks: int = 2, mbs: int = 8, width: int = 1280, scheme: str = "light") -> Visit:
            path = tmp_path_factory.mktemp("report") / "report.html"
            write_report(
                path,
                title="a model",
                predicted=make_timeline(ranks=ranks, mbs=mbs),
                measured=make_timeline(ranks=ranks, mbs=mbs, source="measured"),
                stages=[StageRow(stage=s, rank=s, ops=9, parameters=1000) for s in range(ranks)],
                losses={"train": [(0, 5.5), (10, 2.25)]},
                config={"steps": 10},
            )
            context = browser.new_context(
                offline=True, color_scheme=scheme, viewport={"width": width, "height": 900}
            )
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


def test_zooming_the_timelines_zooms_the_memory_and_back(open_report: Open) -> None:
    page = open_report().page
    ranges = "['timelines', 'memory'].map((id) => document.getElementById(id).layout.xaxis.range)"
    page.evaluate("Plotly.relayout('timelines', { 'xaxis.range': [20, 60] })")
    wait_until(page, f"{ranges}.every(([a, b]) => a === 20 && b === 60)")
    page.evaluate("Plotly.relayout('memory', { 'xaxis.range': [0, 50] })")
    wait_until(page, f"{ranges}.every(([a, b]) => a === 0 && b === 50)")


def test_dark_and_light_are_readable(open_report: Open) -> None:
    ink = "getComputedStyle(document.querySelector('#timelines .x2tick text')).fill"
    visit = open_report(scheme="dark")
    dark = visit.page.evaluate(ink)
    visit.page.emulate_media(color_scheme="light")
    wait_until(visit.page, f"{ink} !== {dark!r}")
    assert dark == "rgb(230, 234, 241)"
    assert visit.page.evaluate(ink) == "rgb(27, 36, 51)"
    assert visit.complaints == []


def test_a_narrow_page_does_not_scroll_sideways(open_report: Open) -> None:
    visit = open_report(ranks=4, width=390)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    assert "0F0" in visit.hover("0F0")


def test_thousands_of_blocks_draw_and_answer(open_report: Open) -> None:
    visit = open_report(ranks=8, mbs=96)
    blocks = visit.page.evaluate("document.querySelectorAll('.barlayer .point').length")
    assert blocks > 4000
    assert visit.hover("7B95").startswith("7B95")
    assert visit.complaints == []

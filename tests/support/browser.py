"""Headless Chromium for tests of pages, and what a page complained about or asked for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
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


@contextmanager
def chromium() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


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
        page.wait_for_selector("body[data-drawn]", timeout=PATIENCE_MS)

    def wait_until(self, condition: str) -> None:
        """Look once a frame. Playwright's own wait needs `eval`, which the page's policy forbids."""
        self.page.evaluate(
            f"""new Promise((done, fail) => {{
              let frames = 0;
              const again = () => ++frames > 10_000 ? fail("never") : requestAnimationFrame(look);
              const look = () => ({condition}) ? done() : again();
              look();
            }})"""
        )

    def middle(self, action: str, panel: int = 0) -> tuple[float, float]:
        """Where a block is on the screen, once it is scrolled to."""
        self.page.locator("#timelines").scroll_into_view_if_needed()
        x, y = self.page.evaluate("([panel, action]) => timelines.middle(panel, action)", [panel, action])
        return x, y

    def hover(self, action: str, panel: int = 0) -> str:
        self.page.mouse.move(0, 0)
        self.page.mouse.move(*self.middle(action, panel))
        self.wait_until("!document.querySelector('#timelines .tip').hidden")
        return str(self.page.evaluate("document.querySelector('#timelines .tip').textContent"))

"""A studio that runs in a thread, and its page."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import Visit

from pipeloom.commands.studio import read_words
from pipeloom.studio.opened import opened
from pipeloom.studio.server import StudioServer

pytest.importorskip("uvicorn", reason="the extra `studio` is not installed")

DRAWN = "document.body.dataset.drawn === String(changes) && !timelines.waiting"


@contextmanager
def running(what: str | None = None, **more: Any) -> Iterator[StudioServer]:
    server = StudioServer(*opened(what, read_words, **more))
    thread = Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


class Studio(Visit):
    """The page of a studio. Every action waits until what it changed is drawn."""

    def __init__(self, page: Any, server: StudioServer, **setting: Any) -> None:
        self.server = server
        super().__init__(page, f"{server.address}#{urlencode(setting, doseq=True)}")
        self.drawn()

    def drawn(self) -> None:
        self.wait_until(DRAWN)

    def settled(self, by: str = "recognised") -> None:
        """Reasons and names are there; by "settled" the chart of all schedules, too."""
        self.wait_until(f"{DRAWN} && document.body.dataset.{by} === String(changes)")

    def set(self, option: str, value: str) -> None:
        """As a person types it into the field beside a slider."""
        field = self.page.locator(f'[data-option="{option}"]')
        if not field.is_visible():
            self.page.locator("summary").click()
        field.fill(value)
        field.blur()
        self.drawn()

    def click(self, action: str, panel: int = 0) -> str:
        """Ask about a block; returns the answer's text."""
        self.page.evaluate("$('answer').hidden = true")
        self.page.mouse.click(*self.middle(action, panel))
        self.wait_until("!$('answer').hidden")
        return self.page.inner_text("#answer")

    def figures(self, n: int = 0) -> dict[str, Any]:
        figures: dict[str, Any] = self.page.evaluate(f"drawn[{n}].figures")
        return figures

    def picture(self) -> str:
        return str(self.page.inner_html("#timelines svg"))

    def drag(self, action: str, before: str) -> None:
        """A block to the place in front of another one."""
        (x, y), (to_x, _) = self.middle(action), self.middle(before)
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(to_x - 8, y, steps=4)
        self.page.mouse.up()

    def saved(self, name: str, folder: Path) -> Path:
        """What the button of that name downloads."""
        with self.page.expect_download() as download:
            self.page.get_by_role("button", name=name).click()
        path = folder / download.value.suggested_filename
        download.value.save_as(path)
        return path

    def command(self) -> Sequence[str]:
        """What the page says the command is, without the program's name."""
        return shlex.split(self.page.inner_text("#command"))[1:]

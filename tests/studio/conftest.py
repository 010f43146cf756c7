"""The page of a studio in headless Chromium."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from studio_page import Studio, running

from pipeloom.studio.server import StudioServer

Open = Callable[..., Studio]


@pytest.fixture(scope="module")
def library_server() -> Iterator[StudioServer]:
    with running() as server:
        yield server


@pytest.fixture
def studio(browser: Any, library_server: StudioServer) -> Iterator[Open]:
    """Opens the page at a setting. At the end nothing has complained, and nobody else was asked."""
    opened_pages: list[Studio] = []

    def visit(server: StudioServer | None = None, *, width: int = 1280, **setting: Any) -> Studio:
        context = browser.new_context(viewport={"width": width, "height": 900}, accept_downloads=True)
        opened_pages.append(Studio(context.new_page(), server or library_server, **setting))
        return opened_pages[-1]

    yield visit
    for one in opened_pages:
        own = one.server.address.partition("?")[0]
        assert [url for url in one.requests if not url.startswith((own, "blob:", "data:"))] == []
        assert one.complaints == []
        one.page.context.close()

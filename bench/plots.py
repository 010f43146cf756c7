"""Pictures of docs/images, drawn by plotly in an installed Chromium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from machine import FOLDER
from playwright.sync_api import sync_playwright
from plotly import graph_objects

IMAGES = FOLDER.parent / "docs" / "images"


def save_plot(figure: graph_objects.Figure, name: str, width: int, height: int) -> None:
    """Write a figure to docs/images; without Chromium, say that the picture is left as it was."""
    if not shutil.which("chromium"):
        print(f"{name} is left as it was: no chromium is installed to draw it", flush=True)
        return
    figure.update_layout(width=width, height=height, template="simple_white")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "plot.html"
        figure.write_html(page_file, include_plotlyjs=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": width + 20, "height": height + 20})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".main-svg")
        page.screenshot(path=IMAGES / name)
        browser.close()

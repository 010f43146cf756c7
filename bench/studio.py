"""How long the studio takes from a change of a slider to the drawn picture, in headless Chromium.

    python bench/studio.py

The middle of 50 changes at p = 8, m = 32, of a few at p = 64, m = 512; and the server's part of it, by the
clock and in CPU time, which other work on the machine does not lengthen as much.
"""

from __future__ import annotations

import statistics
import time
from threading import Thread

from machine import parser_of

# isort: split
from browser import chromium
from playwright.sync_api import Page

from pipeloom.commands.studio import read_words
from pipeloom.studio.opened import opened
from pipeloom.studio.server import StudioServer

CHANGE = """
async ([option, value]) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const begun = performance.now();
  const slider = document.querySelector(`[data-slides="${option}"]`);
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  while (document.body.dataset.drawn !== String(changes) || timelines.waiting) await frame();
  return performance.now() - begun;
}
"""


def changes(page: Page, server_s: list[tuple[float, float]], option: str, values: list[float]) -> str:
    taken, before = [], len(server_s)
    for value in values:
        taken.append(page.evaluate(CHANGE, [option, str(value)]))
    middle, slowest = statistics.median(taken), max(taken)
    wall, cpu = (1000 * statistics.median(times) for times in zip(*server_s[before:], strict=True))
    return (
        f"middle {middle:.0f} ms (server {wall:.0f} ms, {cpu:.0f} ms of CPU), slowest {slowest:.0f} ms, "
        f"of {len(taken)} changes"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedule", default="1f1b")
    name = parser.parse_args().schedule
    start, answers = opened(None, read_words)
    server_s: list[tuple[float, float]] = []

    def timed(question: dict[str, object]) -> object:
        begun = time.perf_counter(), time.thread_time()
        answer = answers["draw"](question)
        server_s.append((time.perf_counter() - begun[0], time.thread_time() - begun[1]))
        return answer

    quiet = {"figures": lambda question: {"error": {"message": "not in this bench"}}}
    server = StudioServer(start, {**answers, "draw": timed, **quiet})
    thread = Thread(target=server.run)
    thread.start()
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
        for ranks, microbatches, count in ((8, 32, 50), (64, 512, 7)):
            page.goto(f"{server.address}#s={name}&-p={ranks}&-m={microbatches}")
            page.reload()
            page.wait_for_selector("body[data-drawn]", timeout=300_000)
            for option in ("-T", "-F"):
                values = [round(0.05 * (1 + n % 40), 2) for n in range(1, count + 1)]
                taken = changes(page, server_s, option, values)
                print(f"{name}, p = {ranks}, m = {microbatches}, {option}: {taken}")
    server.stop()
    thread.join()


if __name__ == "__main__":
    main()

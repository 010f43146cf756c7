"""docs/studio.md: what its levels say to do is done, in their order, and what they say is read is there."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import needs_chromium
from commands import good

pytestmark = needs_chromium

PAGE = Path(__file__).parents[2] / "docs" / "studio.md"

STEPS = {
    "set": r"(?:Set|,|and) `(-\w)` to `([^`]+)`",
    "click": r"Click `(\d\w\d)`",
    "tick": r"Tick `([^`]+)`",
    "choose": r"Choose `([^`]+)`",
    "press": r"Press `([^`]+)`",
    "drag": r"Drag `(\w+)` in front of `(\w+)`",
    "write": r"type `([^`]+)` into the row of rank (\d)",
    "save": r"[Ss]ave `([^`]+)`",
    "reads": r"reads `([^`]+)`",
}


def steps() -> Iterator[tuple[str, tuple[str, ...]]]:
    text = PAGE.read_text().partition("## Level 1")[2].partition("## Plans")[0]
    text = re.sub(r"\s+", " ", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for found in re.finditer("|".join(f"(?P<{verb}>{pattern})" for verb, pattern in STEPS.items()), text):
        verb = next(verb for verb in STEPS if found[verb])
        parts = re.fullmatch(STEPS[verb], found[0])
        assert parts is not None
        yield verb, parts.groups()


def do(page: Any, verb: str, *words: str) -> None:
    before = page.page.evaluate("changes")
    if verb == "set":
        page.set(*words)
    elif verb == "click":
        page.click(words[0])
    elif verb == "tick":
        page.page.get_by_label(words[0]).check()
    elif verb == "choose":
        page.page.select_option("#add", words[0])
    elif verb == "press":
        page.page.get_by_role("button", name=words[0], exact=True).click()
    elif verb == "drag":
        page.drag(*words)
    elif verb == "write":
        page.page.get_by_label(f"row of rank {words[1]}").fill(words[0])
        page.wait_until(f"changes > {before}")
    elif verb == "save":
        page.saved(words[0], Path())
    page.drawn()


@pytest.mark.slow
def test_the_levels_lead_to_a_schedule_that_torch_runs(
    studio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = studio()
    done = []
    for verb, words in steps():
        done.append(verb)
        if verb == "reads":
            page.settled()
            text = re.sub(
                r"\s+", " ", page.page.locator("main").inner_text() + page.page.inner_text("#timelines")
            )
            assert words[0] in text
        else:
            do(page, verb, *words)
    assert set(done) == set(STEPS) and len(done) >= 20
    for block in re.findall(r"```(?:sh|python)\n(.*?)```", PAGE.read_text().partition("## Level 6")[2], re.S):
        if block.startswith("# run_mine.py"):
            Path("run_mine.py").write_text(block)
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text().partition("## Level 6")[2], re.S)
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        if program == "pipeloom":
            good(*words)
        else:
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            output = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert "torch ran mine.csv: loss" in output.stdout, output.stderr

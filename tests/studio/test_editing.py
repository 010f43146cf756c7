"""Rows that are edited on the page: proved, undone, recognised, saved, and read by the commands."""

from pathlib import Path
from typing import Any

import pytest
from browser import needs_chromium
from commands import figures, good

pytestmark = needs_chromium

SMALL = {"-p": "2", "-m": "3"}
ROW = "1F0 1B0 1F1 1B1 1F2 1B2"


def edited(studio: Any, **setting: str) -> Any:
    page = studio(s="1f1b", **(SMALL | setting))
    page.page.get_by_label("edit 1f1b").click()
    page.drawn()
    return page


def write(page: Any, rank: int, row: str) -> None:
    before = page.page.evaluate("changes")
    page.page.get_by_label(f"row of rank {rank}").fill(row)
    page.wait_until(f"changes > {before}")
    page.drawn()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("1F0 1B0 1F1 1B1 1F2", "rank 1 never runs 1B2"),
        ("1F0 1B0 1F1 1B1 1F2 1X2", "cannot read action '1X2'"),
        ("1F0 1B0 1F1 1B1 1F2 1B2 0F1", "stand"),
    ],
)
def test_the_rule_stands_under_the_row_that_breaks_it(studio: Any, row: str, sentence: str) -> None:
    page = edited(studio)
    write(page, 1, row)
    broken = page.page.locator(".row .broken")
    assert sentence in broken.nth(int(sentence != "stand")).inner_text()
    assert page.page.locator(".row[data-broken]").count() == 1
    assert "stale" in str(page.page.locator("#timelines").get_attribute("class"))
    page.page.get_by_role("button", name="Undo").click()
    page.drawn()
    assert page.page.locator(".row[data-broken]").count() == 0
    assert page.page.get_by_label("row of rank 1").input_value() == ROW
    page.page.get_by_role("button", name="Redo").click()
    page.drawn()
    assert page.page.locator(".row[data-broken]").count() == 1


TYPED = """
const type = (rank, text) => {
  const area = $("rows").querySelectorAll("textarea")[rank];
  area.focus();
  area.value = text;
  area.dispatchEvent(new Event("input"));
  return area;
};
"""


def test_no_answer_overwrites_what_is_typed_which_counts_just_before_done(studio: Any) -> None:
    page = edited(studio)
    text = "0F0 0F1 0F2 0B0 0B1 0B2"
    steps = f"const area = type(0, '{text}'); showEditor(); const seen = area.value; $('close').click();"
    assert page.page.evaluate(f"(() => {{{TYPED} {steps} return seen}})()") == text
    page.drawn()
    assert page.page.evaluate("state.entries[0].rows.split('\\n')[0]") == text
    assert page.figures()["peak"] == 3 and not page.page.is_visible("#editor")


def test_a_block_is_dropped_into_rows_as_they_are_typed_by_then_and_these_are_saved(
    studio: Any, tmp_path: Path
) -> None:
    page = edited(studio)
    text = "1F0 1F1 1B0 1B1 1F2 1B2"
    with page.page.expect_download() as download:
        page.page.evaluate(
            f"""(() => {{{TYPED} const [picture] = shown.pictures, block = picture.number.get("0F2");
            type(1, "{text}");
            drop({{ picture, block, rank: 0 }}, {{ picture, rank: 0, time: 0 }});
            type(0, "0F0 0F1 0F2 0B0 0B1 0B2");
            save("rows", 0);}})()"""
        )
    download.value.save_as(tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == f"0F0 0F1 0F2 0B0 0B1 0B2\n{text}\n"
    page.drawn()


def test_only_blocks_of_rows_are_carried(studio: Any) -> None:
    page = edited(studio, **{"-T": "0.5"})
    carried = "((picture, block) => !!carry({{ picture, block }}))(shown.pictures[0], {})"
    assert page.page.evaluate(carried.format("0"))
    assert not page.page.evaluate(carried.format("shown.pictures[0].beside[0][0]"))


def test_a_deadlock_is_drawn_as_a_circle(studio: Any) -> None:
    page = edited(studio)
    write(page, 0, "0F0 0B0 0F1 0F2 0B1 0B2")
    write(page, 1, "1F0 1F1 1B0 1B1 1F2 1B2")
    circle = page.page.get_by_role("img", name="deadlock: rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1")
    assert circle.count() == 1 and "needs 1B0" in str(circle.text_content())
    assert page.page.locator(".row[data-broken]").count() == 2


def test_a_block_is_dragged_to_another_place(studio: Any) -> None:
    page = edited(studio, **{"-m": "4"})
    step = page.figures()["step_s"]
    page.drag("0F2", "0B0")
    page.drawn()
    row = page.page.get_by_label("row of rank 0").input_value()
    assert row == "0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3"
    assert page.figures()["peak"] == 3 and page.figures()["step_s"] >= step - 1
    page.page.keyboard.press("Control+z")
    page.page.get_by_role("button", name="Undo").click()
    page.drawn()
    assert page.figures()["step_s"] == step


@pytest.mark.slow
def test_an_order_of_the_library_is_recognised_and_one_that_does_not_repeat_is_no_recipe(studio: Any) -> None:
    page = edited(studio)
    page.settled()
    assert "mine is 1f1b" in page.page.inner_text("#known")
    for rank, kind in enumerate(("0", "1")):
        forwards, back = (" ".join(f"{kind}{letter}{b}" for b in range(3)) for letter in "FB")
        write(page, rank, f"{forwards} {back}")
    page.settled()
    assert "mine is gpipe" in page.page.inner_text("#known")
    write(page, 0, "0F0 0F1 0F2 0B1 0B0 0B2")
    page.settled()
    assert "none of the library" in page.page.inner_text("#known")
    page.page.get_by_role("button", name="recipe .py").click()
    page.wait_until("!$('problem').hidden")
    assert "does not repeat" in page.page.inner_text("#problem")
    page.complaints.clear()  # the browser notes the refusal, which is the answer


def test_saved_files_are_read_by_the_commands(
    studio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = edited(studio, **{"-p": "3", "-m": "6"})
    for name, file in (("rows .txt", "mine.txt"), ("CSV for torch", "mine.csv"), ("recipe .py", "mine.py")):
        assert page.saved(name, tmp_path).name == file
    for file in ("mine.txt", "mine.csv"):
        assert "cannot block" in good("schedule", "check", file)
    page.set("-T", "0.5")
    assert list(page.command()) == ["schedule", "check", "mine.txt", "-T", "0.5"]
    assert figures(*page.command())["step_s"] == page.figures()["step_s"] == 29.0
    page.set("-T", "0")
    assert (tmp_path / "mine.csv").read_text() == good(*"schedule export 1f1b -p 3 -m 6".split())
    for count in (6, 9):
        rows = [good("schedule", "export", n, "-p", 3, "-m", count) for n in ("mine.py:mine", "1f1b")]
        assert rows[0] == rows[1] != ""


@pytest.mark.slow
def test_drawings_are_saved_for_papers_and_perfetto(studio: Any, tmp_path: Path) -> None:
    page = studio(s="1f1b", **SMALL)
    svg, pdf, png = (page.saved(form, tmp_path).read_bytes() for form in ("SVG", "PDF", "PNG"))
    assert svg.startswith(b"<svg ") and b"var(" not in svg and b"1f1b   step 12" in svg
    assert pdf.startswith(b"%PDF-1.4") and b"(1f1b   step 12" in pdf and pdf.rstrip().endswith(b"%%EOF")
    assert png[1:4] == b"PNG" and int.from_bytes(png[16:20]) == 2000
    trace = page.saved("Perfetto trace", tmp_path).read_text()
    assert '"PP:1B2"' in trace
    html = page.saved("offline page", tmp_path).read_text()
    good(*f"schedule show 1f1b -p 2 -m 3 --html {tmp_path}/shown.html".split())
    assert html == (tmp_path / "shown.html").read_text()

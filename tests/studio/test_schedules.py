"""Schedules on the page: controls, comparison, questions. Figures are those of the command line."""

from typing import Any

import pytest
from browser import needs_chromium
from commands import figures as command

pytestmark = needs_chromium

FIGURES = ("step_s", "bubble", "span_s", "span_bubble", "peak")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("1f1b", "-p", "3"),
        ("1f1b", "-m", "5"),
        ("interleaved_1f1b", "-v", "4"),
        ("1f1b", "-F", "1,2,1,1"),
        ("zb_h1", "-I", "1.5"),
        ("zb_h1", "-W", "0.5"),
        ("1f1b", "-T", "0.5,0,0.25"),
        ("zb_1p", "--memory", "3"),
        ("po_f", "-k", "2"),
        ("po_f", "--per-uplink", "2"),
        ("dualpipev", "--pair-factor", "0.8"),
    ],
)
def test_each_control_changes_the_picture_as_the_command_does(
    studio: Any, name: str, option: str, value: str
) -> None:
    page = studio(s=name, **{"-T": "0.1"})
    before = page.picture()
    page.set(option, value)
    assert page.picture() != before
    result = command(*page.command())
    assert page.command()[2] == name and value in page.command()
    assert {key: page.figures()[key] for key in FIGURES} == pytest.approx({k: result[k] for k in FIGURES})
    shown = page.page.inner_text("#timelines")
    assert f"step {result['step_s']:.6g}" in shown
    for rank in result["by_rank"]:
        assert f"{rank['peak']:.4g}" in shown


def test_a_slider_does_what_its_field_does_and_the_address_follows_once_it_rests(studio: Any) -> None:
    """Browsers refuse to change it often."""
    page = studio(s="1f1b")
    page.page.locator('[data-slides="-p"]').fill("6")
    page.drawn()
    assert page.figures() == pytest.approx(command("schedule", "compare", "1f1b", "-p", "6")["1f1b"])
    page.wait_until("location.hash.includes('-p=6')")
    assert page.page.input_value('[data-option="-p"]') == "6"
    page.settled("settled")
    page.page.evaluate(
        """(() => {
        history.replaceState = () => { window.calls = (window.calls ?? 0) + 1; };
        const slider = document.querySelector('[data-slides="-p"]');
        for (slider.value = 2; slider.value < 9; slider.value++) slider.dispatchEvent(new Event("input"));
        })()"""
    )
    page.wait_until("window.calls > 0")
    page.settled("settled")
    assert page.page.evaluate("window.calls") == 1


def test_a_refused_setting_leaves_a_pale_picture_and_its_error_until_it_is_well_again(studio: Any) -> None:
    page = studio(s="1f1b", **{"-p": "3"})
    page.page.evaluate("say('plan', 'too large')")
    page.set("-F", "1,2,1")
    assert "stale" not in page.page.locator("#timelines").get_attribute("class")
    page.set("-F", "x")
    assert "stale" in page.page.locator("#timelines").get_attribute("class")
    assert all("422" in line for line in page.complaints)  # the browser's own line for a refusal
    page.complaints.clear()
    assert {"too large", "correct the setting"} <= set(page.page.inner_text("#problem").split("\n"))
    page.set("-F", "1")
    assert page.page.inner_text("#problem") == "too large"
    page.page.evaluate("say('plan')")
    assert not page.page.is_visible("#problem")


@pytest.mark.slow
def test_several_are_drawn_on_one_time_axis_and_compared(studio: Any) -> None:
    page = studio(s=["1f1b", "zb_h1"], **{"-T": "0.2"})
    result = command(*page.command())
    assert list(result) == ["1f1b", "zb_h1"]
    for n, one in enumerate(result.values()):
        assert page.figures(n) == pytest.approx(one)
    (first, _), (second, _) = page.middle("0F0", 0), page.middle("0F0", 1)
    assert first == pytest.approx(second)
    assert page.page.inner_text("#memory").count("zb_h1") == 1


COVERED = """
[...document.querySelectorAll("#trade .name")].filter((name) => {
  const a = name.getBoundingClientRect();
  const others = [...document.querySelectorAll("#trade .point, #trade .name")];
  return others.filter((one) => one !== name).map((one) => one.getBoundingClientRect())
    .some((b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom);
}).map((name) => name.textContent)
"""
"""Names in the chart with a point or another name on them."""


@pytest.mark.slow
def test_points_of_all_schedules_are_clicked(studio: Any) -> None:
    page = studio(s="1f1b", **{"-p": "3", "-m": "4"})
    page.settled("settled")
    points = dict(page.page.evaluate("trade.map(([step, peak, name]) => [name, [step, peak]])"))
    assert {"gpipe", "zb_v", "gis_h"} <= points.keys()
    result = command("schedule", "compare", "gpipe", "zb_v", "-p", "3", "-m", "4")
    assert all(points[name] == [one["step_s"], one["peak"]] for name, one in result.items())
    assert page.page.evaluate(COVERED) == []
    point = page.page.locator("#trade .point[title*='gpipe']")
    assert point.get_attribute("title").endswith(f"step {result['gpipe']['step_s']:g}, peak 4 micro-batches")
    point.click()
    page.drawn()
    assert page.page.evaluate("drawn.map((one) => one.name)") == ["1f1b", "gpipe"]


@pytest.mark.sampled("1B3")
@pytest.mark.parametrize("action", ["1B3", "0F0", "2W2"])
def test_a_block_says_what_it_waited_for(studio: Any, action: str) -> None:
    name = "zb_h1" if "W" in action else "1f1b"
    page = studio(s=name, **{"-T": "0.5"})
    said = page.click(action)
    chain = command("schedule", "why", name, action, "-T", "0.5")
    assert page.page.evaluate("[...document.querySelectorAll('#answer ol li')].length") == len(chain)
    assert page.page.evaluate("shown.marks[0].chain.slice(1)") == [cause["action"] for cause in chain]
    assert ("residuals of its micro-batch" in said) == ("F" in action)
    assert ("no residuals" in said) == ("F" not in action)
    if action == "1B3":
        assert "the result of 2B3" in said
    page.page.locator("#answer ol .link").last.click()
    page.wait_until("(shown.marks[0].chain ?? [0, 0, 0]).length < 3")


def test_a_gap_says_its_reason_and_the_path_is_that_of_explain(studio: Any) -> None:
    page = studio(s="1f1b", **{"-F": "1,1,2,1", "-T": "0.1"})
    result = command("schedule", "explain", "1f1b", "-F", "1,1,2,1", "-T", "0.1")
    page.settled()
    x, y = page.page.evaluate(
        """() => { const gap = shown.pictures[0].gaps[0].find((one) => one[3] === "imbalance");
        const [, y] = timelines.middle(0, "0F0"), box = timelines.canvas.getBoundingClientRect();
        return [box.left + LEFT + (gap[1] + gap[2]) / 2 * shown.pictures[0].scale * timelines.scale, y]; }"""
    )
    page.page.mouse.click(x, y)
    page.wait_until("!$('answer').hidden")
    assert "imbalance" in page.page.inner_text("#answer")
    page.page.check("#path")
    page.wait_until("$('answer').textContent.startsWith('critical path')")
    said = page.page.inner_text("#answer")
    assert all(piece["action"] in said for piece in result["path"][:20])
    assert all(reason in said for reason in result["reasons"])
    assert 'stroke-width="5.5"' in page.picture()
    page.wait_until("location.hash.includes('path=1')")


@pytest.mark.slow
def test_the_address_holds_the_whole_setting(studio: Any) -> None:
    page = studio(s="1f1b")
    page.set("-F", "1,2,1,1")
    page.page.select_option("#add", "zb_h1")
    page.page.check("#path")
    page.settled()
    again = studio(s="gpipe")
    again.page.goto("about:blank")
    again.page.goto(page.page.url)
    again.page.wait_for_selector("body[data-drawn]")
    again.settled()
    assert again.picture() == page.picture() and again.command() == page.command()


THIRDS = """
() => {
  const one = { start: (i) => 3 * i, end: (i) => 3 * i + 2, colour: () => "#123456" }, boxes = [];
  denseRow(one, range(30), (time) => LEFT + time, 1e3, (fill, from, to) => boxes.push(to - from));
  return boxes.reduce((sum, width) => sum + width, 0);
}
"""
"""Pixels that 30 narrow blocks of 2 fill, with 1 between them."""


def test_what_is_small_is_drawn_as_it_is(studio: Any) -> None:
    """Idle time between narrow blocks, and memory whose first round number would be above all of it."""
    page = studio(s="1f1b", **{"-p": "16", "-m": "16"})
    assert page.page.evaluate(THIRDS) == pytest.approx(60)
    labels = "memoryShapes(memory, view, { width: 900 }).shapes.filter((one) => one.anchor === 'end')"
    assert "10" in page.page.evaluate(f"{labels}.map((one) => one.text)")


def test_large_pipelines_draw_what_is_visible_and_keys_go_through_them(studio: Any) -> None:
    page = studio(s="1f1b", **{"-p": "32", "-m": "256"})
    assert page.page.evaluate("shown.pictures[0].blocks.action.length") == 2 * 32 * 256
    assert page.page.evaluate("document.querySelectorAll('#timelines svg *').length") < 3000
    page.page.locator("#timelines").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.page.keyboard.press(key)
    page.wait_until("document.querySelector('#timelines .said').textContent.startsWith('1F1')")
    for _ in range(8):
        page.page.keyboard.press("+")
    page.drawn()
    assert page.page.evaluate("view.to - view.from") < 20
    for key in (">", "<", "-", "0"):
        page.page.keyboard.press(key)
    page.drawn()
    assert page.page.evaluate("view.from") == 0
    page.wait_until("$('answer').textContent.includes('stage 1: forward of micro-batch 1')")


def test_everything_has_a_name_for_screen_readers(studio: Any) -> None:
    page = studio(s="1f1b")
    page.page.get_by_label("edit 1f1b").click()
    page.settled()
    nameless = """[...document.querySelectorAll("button, input, select, textarea, [role=application]")]
      .filter((e) => !(e.ariaLabel || e.title || e.textContent.trim() || e.labels?.[0]?.textContent.trim()))
      .map((e) => e.outerHTML)"""
    assert page.page.evaluate(nameless) == []

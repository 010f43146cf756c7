from dataclasses import replace

from rich.console import Console, RenderableType

from pipeloom.ir.timeline import Event, Timeline
from pipeloom.viewer.report_facts import Comparison, StageRow
from pipeloom.viewer.terminal import gantt, memory_table, print_report, stage_table, summary_table

ROWS = [
    StageRow(stage=0, rank=0, ops=12, parameters=1_250_000, contents="blocks.0 .. blocks.3"),
    StageRow(stage=1, rank=1, ops=9, parameters=70_000, contents="blocks.4 .. head"),
]


def text(*things: RenderableType, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for thing in things:
            console.print(thing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_gantt_is_a_picture_of_the_step(two_ranks: Timeline) -> None:
    assert (
        text(gantt(two_ranks, width=38))
        == """\
rank 0 F0──F1──········B0──────····B1──────ST
rank 1 ····F0──B0──────F1──B1──────··········
       0                               9.50 s
 F  forward    B  backward    STEP  optimizer step   · idle"""
    )


def test_gantt_of_a_rank_with_two_stages_names_them() -> None:
    actions = ("0F0", "2F0", "2B0", "0B0")
    events = tuple(
        Event(rank=0, stream="compute", action=a, start_s=i, end_s=i + 1) for i, a in enumerate(actions)
    )
    line = text(gantt(Timeline(source="predicted", ranks=1, events=events), width=16)).splitlines()[0]
    assert line == "rank 0 0F0─2F0─2B0─0B0─"


def test_gantt_with_too_little_room_has_small_letters_for_further_stages() -> None:
    actions = ("0F0", "2F0", "2B0", "0B0")
    events = tuple(
        Event(rank=0, stream="compute", action=a, start_s=i, end_s=i + 1) for i, a in enumerate(actions)
    )
    lines = text(gantt(Timeline(source="predicted", ranks=1, events=events), width=8)).splitlines()
    assert lines[0] == "rank 0 F0f0b0B0"
    assert lines[2].endswith("· idle    f  in a further stage of the rank")


def test_gantt_with_more_actions_than_columns_is_not_idle() -> None:
    events = tuple(
        Event(rank=0, stream="compute", action=f"0F{i}", start_s=i, end_s=i + 1) for i in range(100)
    )
    lines = text(gantt(Timeline(source="predicted", ranks=1, events=events), width=30)).splitlines()
    assert lines[0] == "rank 0 " + "F" * 30
    assert lines[-1] == "100 actions of a rank in 30 columns: each shows what fills most of it"


def test_gantt_has_room_for_figures_beside_it(two_ranks: Timeline) -> None:
    beside = {"bubble": ["31 %", "37 %"], "peak": ["2", "1"]}
    lines = text(gantt(two_ranks, columns=60, beside=beside), width=60).splitlines()
    assert {len(line) for line in lines[:3]} == {60}
    assert lines[0].split() == ["bubble", "peak"] and lines[2].endswith("    37 %     1")


def test_gantt_that_is_too_narrow_keeps_the_letters(two_ranks: Timeline) -> None:
    lines = text(gantt(two_ranks, width=19)).splitlines()
    assert lines[:2] == ["rank 0 F0F1····B0──··B1──S", "rank 1 ··F0B0──F1B1──·····"]


def test_gantts_with_one_span_have_one_scale(two_ranks: Timeline) -> None:
    assert text(gantt(two_ranks, width=38, span_s=19.0)).splitlines()[0] == (
        "rank 0 F0F1····B0──··B1──S···················"
    )


def test_gantt_of_nothing_is_idle() -> None:
    nothing = Timeline(source="measured", ranks=1, events=())
    assert text(gantt(nothing, width=5)).splitlines()[0] == "rank 0 ·····"


def test_summary_compares(two_ranks: Timeline) -> None:
    measured = replace(two_ranks, source="measured", memory=())
    assert (
        text(summary_table(two_ranks, measured))
        == """\
step
                     predicted  measured  error
───────────────────────────────────────────────
step time               9.50 s    9.50 s  0.0 %
bubble                  34.2 %    34.2 %
peak memory, rank 0   30.0 MiB  30.0 MiB  0.0 %
peak memory, rank 1   10.0 MiB  10.0 MiB  0.0 %"""
    )


def test_the_error_of_the_forecast_comes_first(two_ranks: Timeline) -> None:
    forecast = Comparison(name="step time, forecast", predicted=9.0, measured=10.0)
    rows = text(summary_table(two_ranks, replace(two_ranks, source="measured"), forecast)).splitlines()[3:5]
    assert [row.split() for row in rows] == [
        ["step", "time,", "forecast", "9.00", "s", "10.00", "s", "-10.0", "%"],
        ["step", "time", "9.50", "s", "9.50", "s", "0.0", "%"],
    ]


def test_stage_and_memory_tables(two_ranks: Timeline) -> None:
    assert (
        text(stage_table(ROWS, two_ranks))
        == """\
stages, ms per micro-batch
                                forward   backward
stage  rank  ops  parameters  predicted  predicted  contents
────────────────────────────────────────────────────────────────────────
    0     0   12      1.25 M    1000.00    2000.00  blocks.0 .. blocks.3
    1     1    9        70 k    1000.00    2000.00  blocks.4 .. head"""
    )
    assert (
        text(memory_table(two_ranks, None, ROWS))
        == """\
memory at each rank's peak, MiB
rank  stages             params  resid  peak
────────────────────────────────────────────
   0       0  predicted    10.0   20.0  30.0
   1       1  predicted    10.0      –  10.0"""
    )


def test_a_narrow_terminal_shows_every_figure(two_ranks: Timeline) -> None:
    measured = replace(two_ranks, source="measured")
    shown = text(stage_table(ROWS, two_ranks, measured), width=76)
    assert max(map(len, shown.splitlines())) <= 76
    assert shown.count("1000.00") == 4 and shown.count("2000.00") == 4


def test_report_prints_what_there_is(two_ranks: Timeline) -> None:
    console = Console(width=90, color_system=None)
    with console.capture() as capture:
        print_report(console, predicted=two_ranks, stages=ROWS)
    shown = capture.get()
    assert "predicted: 9.50 s, bubble 34.2 %" in shown
    assert "measured:" not in shown
    assert "memory at each rank's peak, MiB" in shown


def test_colour_is_extra(two_ranks: Timeline) -> None:
    console = Console(width=60, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(gantt(two_ranks, width=38))
    assert "\x1b[" in capture.get()
    assert "F0──" in capture.get()

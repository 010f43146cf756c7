"""Timelines by hand, and what is drawn of them."""

from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console, RenderableType

from pipeloom.ir.timeline import Event, Timeline
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_schedule

MiB = 1024**2


def simulated_step(*, ranks: int, mbs: int, source: str = "predicted", forward_s: float = 0.01) -> Timeline:
    """Of 1F1B with transfers and memory."""
    times = MicrobatchTimes(
        forward_s=forward_s,
        input_grad_s=forward_s,
        weight_grad_s=forward_s,
        residual_bytes=(21.0 * MiB,) * ranks,
    )
    scenario = Scenario(ranks=ranks, microbatches=mbs, times=times, transfer_s=0.04 * forward_s)
    return replace(simulate_schedule("1f1b", scenario).timeline, source=source)


def computing(
    *at: tuple[int, str, float, float], pairs: Iterable[tuple[str, str]] = (), source: str = "predicted"
) -> Timeline:
    """Of actions on ranks, each with its start and end."""
    events = tuple(Event(rank=r, stream="compute", action=a, start_s=s, end_s=e) for r, a, s, e in at)
    return Timeline(source=source, ranks=1 + max(r for r, *_ in at), events=events, pairs=tuple(pairs))


def printed(thing: RenderableType, width: int = 120, *, colour: bool = False) -> list[str]:
    console = Console(width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(thing)
    return [line.rstrip() for line in capture.get().splitlines()]

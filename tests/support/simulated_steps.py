"""Simulated steps of 1F1B with transfers and memory."""

from dataclasses import replace

from pipeloom.ir.timeline import Timeline
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_schedule

MiB = 1024**2


def simulated_step(*, ranks: int, mbs: int, source: str = "predicted", forward_s: float = 0.01) -> Timeline:
    times = MicrobatchTimes(
        forward_s=forward_s,
        input_grad_s=forward_s,
        weight_grad_s=forward_s,
        residual_bytes=(21.0 * MiB,) * ranks,
    )
    scenario = Scenario(ranks=ranks, microbatches=mbs, times=times, transfer_s=0.04 * forward_s)
    return replace(simulate_schedule("1f1b", scenario).timeline, source=source)

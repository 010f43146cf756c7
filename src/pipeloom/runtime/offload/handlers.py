"""Handlers of OFFLOAD, AWAIT and RELOAD, and the ledger's view of copies.

Copies run beside the computation. The ledger learns of their progress between two actions: residuals count
until the copy to the tier has ended, and again from the start of the copy back.
"""

from __future__ import annotations

from ...ir.action import Action
from ..step_state import MicrobatchState, OffloadedResiduals, StepContext


def offload(step: StepContext, action: Action) -> None:
    """OFFLOAD: begin to copy residuals to the tier, which frees them once they are copied. A schedule may ask
    for it on a stage of which the memory policy offloads nothing."""
    state = step.state(action)
    names = step.functions(action).offloaded
    if not names:
        return
    leaving = {s: t for s, t in state.residuals.items() if s.kind == "residual" and s.name in names}
    assert step.tier is not None, "whoever plans to offload gives the worker a tier"
    for slot in leaving:
        del state.residuals[slot]
    copy = step.tier.start_offload(str(action), leaving)
    state.offloaded = OffloadedResiduals(copy, state, action)
    step.in_flight.offloaded.append(state.offloaded)
    _count_host(step)


def await_offload(step: StepContext, action: Action) -> None:
    """AWAIT: from here on the room of what was offloaded is free."""
    offloaded = step.state(action).offloaded
    if offloaded is not None and not offloaded.off_device:
        assert step.tier is not None, "they are on their way there"
        with step.recorder.record("recv", str(action)):
            step.tier.finish_leaving(offloaded.copy, step.watch.check)
        count_copies(step)


def finish_oldest_offload(step: StepContext) -> bool:
    """Wait until the oldest of what is on its way to the tier is there. Returns False if nothing is."""
    oldest = next((each for each in step.in_flight.offloaded if not each.off_device), None)
    if oldest is None:
        return False
    assert step.tier is not None, "it is on its way there"
    with step.recorder.record("recv", "ROOM"):
        step.tier.finish_leaving(oldest.copy, step.watch.check)
    count_copies(step)
    return oldest.off_device


def reload(step: StepContext, action: Action) -> None:
    """RELOAD: begin to copy them back; `wait_reload` puts them where they were."""
    offloaded = step.state(action).offloaded
    if offloaded is None:
        return
    assert step.tier is not None, "they are there"
    step.tier.start_reload(offloaded.copy)
    offloaded.reload = action
    count_copies(step)


def reload_bytes(step: StepContext, action: Action) -> int:
    """Bytes that a RELOAD takes on top of what is there."""
    offloaded = step.state(action).offloaded
    gone = offloaded is not None and offloaded.off_device  # else it waits for its own copy away
    return offloaded.copy.bytes if offloaded is not None and gone else 0


def wait_reload(step: StepContext, state: MicrobatchState) -> None:
    """Wait for what a micro-batch has on the tier: what comes next reads it."""
    offloaded = state.offloaded
    if offloaded is None:
        return
    assert step.tier is not None, "it is there"
    with step.recorder.record("recv", str(offloaded.reload)):
        state.residuals |= step.tier.wait_reload(offloaded.copy, step.watch.check)
    count_copies(step)
    if offloaded.copy.reload_span is not None:
        step.recorder.copied("h2d", str(offloaded.reload), *offloaded.copy.reload_span)
    step.in_flight.offloaded.remove(offloaded)
    state.offloaded = None


def count_copies(step: StepContext) -> None:
    """Enter into the ledger what copies have done since the last time; waits for none of them."""
    if step.tier is None:
        return
    if step.tier.used_bytes != step.ledger.host:
        _count_host(step)
    for offloaded in step.in_flight.offloaded:
        copy = offloaded.copy
        if not offloaded.off_device and step.tier.offload_done(copy):
            offloaded.off_device = True
            step.count_residuals(offloaded.offload, offloaded.state, -copy.bytes)
            if copy.offload_span is not None:
                step.recorder.freed(copy.bytes, copy.offload_span[1])
                step.recorder.copied("d2h", str(offloaded.offload), *copy.offload_span)
        if offloaded.off_device and offloaded.reload is not None and not offloaded.on_device:
            offloaded.on_device = True
            step.count_residuals(offloaded.reload, offloaded.state, copy.bytes)


def _count_host(step: StepContext) -> None:
    assert step.tier is not None
    step.ledger.set_host(step.tier.used_bytes)
    step.recorder.host_level(step.tier.used_bytes)

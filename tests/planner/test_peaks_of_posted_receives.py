"""Plans that offload were accepted whose stages hold most in the middle of the forwards.

The peak was taken in the last forward, when with GPipe no receives are posted any more. Of what is offloaded
no more micro-batches are on the device then than before, while the receives of the next ones had buffers:
where copies were slow, such a plan ended in a MemoryCapError.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings, strategies as st

from pipeloom.planner.stage_cost.peak_memory import CostOptions, Footprint, peak_bytes

SIZES = st.integers(0, 1000)
MICROBATCHES = 8


def forwards(footprint: Footprint[float], options: CostOptions, in_flight: int) -> Iterator[float]:
    """Bytes of each forward that stands in front of the first backward, counted message by message."""
    for begun in range(1, in_flight + 1):
        kept = begun * footprint.residuals + min(begun, options.offloaded_at_once) * footprint.offloaded
        with_buffers = begun if footprint.saved_inputs else 1
        posted = min(begun + options.receive_ahead, MICROBATCHES) - begun
        gradients = min(options.receive_ahead, MICROBATCHES) * footprint.sent_grads
        leaving = footprint.sent + max(footprint.sent, footprint.received_grads)
        messages = (with_buffers + posted) * footprint.received + gradients + leaving
        yield footprint.parameters + footprint.buffers + kept + messages + footprint.forward_transient


@given(
    sizes=st.fixed_dictionaries(
        {
            name: SIZES
            for name in (
                "parameters buffers residuals received received_grads sent sent_grads forward_transient "
                "offloaded"
            ).split()
        }
    ),
    saved_inputs=st.integers(0, 1),
    in_flight=st.integers(1, MICROBATCHES),
    at_once=st.integers(2, 4),
    ahead=st.integers(1, 3),
)
@settings(deadline=None)
def test_no_forward_of_a_stage_holds_more_than_its_predicted_peak(
    sizes: dict[str, int], saved_inputs: int, in_flight: int, at_once: int, ahead: int
) -> None:
    options = CostOptions(microbatches=MICROBATCHES, receive_ahead=ahead, offloaded_at_once=at_once)
    given_sizes = {name: float(size) for name, size in sizes.items()}
    footprint = Footprint(
        **given_sizes,
        saved_inputs=float(saved_inputs),
        trainable=0.0,
        whole=0.0,
        state=0.0,
        step=0.0,
        backward_transient=0.0,
    )
    assert max(forwards(footprint, options, in_flight)) <= peak_bytes(footprint, options, in_flight)

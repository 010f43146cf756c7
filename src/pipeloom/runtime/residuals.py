"""What a rank does with residuals between F and B: OFFLOAD, RELOAD and RECOMPUTE.

Copies run beside the computation. The ledger learns of their progress between two actions: residuals count
until the copy to the tier has ended, and again from the start of the copy back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..ir.action import (
    OFFLOAD,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    RELOAD,
    Action,
    B,
    F,
    I,
    Instruction,
    Kind,
    Transfer,
    W,
)
from ..tracer import StageFunctions, activation_bytes
from .failure import Watch
from .ledger import Ledger
from .offload import AsyncCopy, Tier
from .recorder import Recorder
from .step_state import MicrobatchState

_FUNCTION = {F: "forward", B: "backward", I: "input_grad", W: "weight_grad", RECOMPUTE: "recompute"}


class Row(Protocol):
    """What a rank's worker offers."""

    ledger: Ledger
    recorder: Recorder
    watch: Watch
    training: bool

    made_bytes: dict[tuple[int, Kind], int]

    @property
    def flights(self) -> Mapping[tuple[int, int], MicrobatchState]: ...

    def functions(self, action: Action) -> StageFunctions: ...

    def opening_bytes(self, transfer: Transfer) -> int: ...

    def finish_send(self) -> bool: ...

    def state(self, action: Action) -> Mapping[str, Tensor]: ...

    def note_scratch(self, action: Action, function: str, **made: int) -> None: ...


@dataclass(eq=False)
class _Journey:
    """A copy as the ledger knows it. out, back: the actions; counted_*: whether its bytes were entered."""

    copy: AsyncCopy
    flight: MicrobatchState
    out: Action
    back: Action | None = None
    counted_out: bool = False
    counted_back: bool = False


class Residuals:
    """Handlers of the actions on residuals.

    tier: where they go; None for a program that offloads nothing.
    """

    def __init__(self, row: Row, tier: Tier | None) -> None:
        self._row = row
        self._tier = tier
        self._journeys: dict[int, _Journey] = {}

    @property
    def handlers(self) -> dict[Kind, Callable[[Any], None]]:
        return {OFFLOAD: self.offload, RELOAD: self.reload, RECOMPUTE: self.recompute}

    def offload(self, action: Action) -> None:
        flight = self._flight(action)
        names = self._row.functions(action).offloaded
        leaving = {s: t for s, t in flight.residuals.items() if s.kind == "made" and s.name in names}
        assert self._tier is not None, "whoever plans to offload gives the worker a tier"
        for slot in leaving:
            del flight.residuals[slot]
        flight.copy = self._tier.start_offload(str(action), leaving)
        self._journeys[id(flight)] = _Journey(flight.copy, flight, action)
        self._note_host()

    def reload(self, action: Action) -> None:
        flight = self._flight(action)
        assert self._tier is not None and flight.copy is not None, "the checks of programs prove it"
        self._tier.start_reload(flight.copy)
        self._journeys[id(flight)].back = action
        self.settle()

    def give_up(self) -> None:
        """Forget what is on the tier, as the micro-batches are that it belongs to."""
        for journey in self._journeys.values():
            assert self._tier is not None
            self._tier.discard(journey.copy)
        self._journeys = {}

    def recompute(self, action: Action) -> None:
        flight, functions = self._flight(action), self._row.functions(action)
        self.gather(flight)
        state = self._row.state(action)
        with self._row.recorder.record("compute", str(action)):
            made = functions.recompute(state, flight.residuals)
        flight.residuals |= made
        size = activation_bytes(made)
        self._row.note_scratch(action, "recompute", residuals=size)
        flight.residual_bytes += size
        self._row.ledger.add("residuals", size, str(action))

    def gather(self, flight: MicrobatchState) -> None:
        """Wait for what a micro-batch has on the tier: what comes next reads it."""
        if flight.copy is None:
            return
        journey = self._journeys[id(flight)]
        assert self._tier is not None
        with self._row.recorder.record("recv", str(journey.back)):
            flight.residuals |= self._tier.wait_reload(flight.copy, self._row.watch.check)
        self.settle()
        if flight.copy.reload_span is not None:
            self._row.recorder.copied("h2d", str(journey.back), *flight.copy.reload_span)
        del self._journeys[id(flight)]
        flight.copy = None

    def make_room(self, instruction: Instruction) -> None:
        """While the next instruction would pass the cap, wait for copies to the tier to end, oldest first,
        and when all have, for messages of this rank to be taken.

        The simulator waits for copies the same way (`simulator.cap_waits`), and lets messages go when
        they have travelled. So what a plan's peak counts on has been taken once its receiver has come as
        far as in the simulation, for which nothing later of this rank is needed: where that peak keeps
        the cap, these waits end.
        Raises: MemoryCapError if an action of a program that offloads would pass the cap even so.
        """
        cap = self._row.ledger.cap_bytes
        if cap is None or not self._row.training:
            return
        leaving = iter([journey for journey in self._journeys.values() if not journey.counted_out])
        while self._row.ledger.total + (need := self._needed(instruction)) > cap:
            journey = next(leaving, None)
            if journey is not None:
                self._finish_leaving(journey)
            elif not self._row.finish_send():
                if self._tier is not None:
                    self._row.ledger.refuse(need, str(instruction))
                return

    def _finish_leaving(self, journey: _Journey) -> None:
        assert self._tier is not None
        with self._row.recorder.record("recv", str(journey.out)):
            self._tier.wait_offload(journey.copy, self._row.watch.check)
        self.settle()

    def _needed(self, action: Instruction) -> int:
        """Bytes that an instruction takes on top of what is there."""
        if isinstance(action, Transfer):
            return self._row.opening_bytes(action) if action.kind in (RECV_F, RECV_B) else 0
        if not isinstance(action, Action):
            return 0
        if action.kind in _FUNCTION:
            return max(
                self._row.functions(action).peak_bytes.get(_FUNCTION[action.kind], 0),
                self._row.made_bytes.get((action.stage, action.kind), 0),
            )
        if action.kind != RELOAD:
            return 0
        journey = self._journeys[id(self._flight(action))]
        return journey.copy.bytes if journey.counted_out else 0  # else it waits for its own copy away

    def settle(self) -> None:
        """Enter what copies have done since the last time."""
        if self._tier is not None and self._tier.held_bytes != self._row.ledger.host:
            self._note_host()
        for journey in self._journeys.values():
            assert self._tier is not None
            size = journey.copy.bytes
            if not journey.counted_out and self._tier.offload_done(journey.copy):
                journey.counted_out = True
                self._count(journey, -size, journey.out)
                if journey.copy.offload_span is not None:
                    self._row.recorder.freed(size, journey.copy.offload_span[1])
                    self._row.recorder.copied("d2h", str(journey.out), *journey.copy.offload_span)
            if journey.counted_out and journey.back is not None and not journey.counted_back:
                journey.counted_back = True
                self._count(journey, size, journey.back)

    def _count(self, journey: _Journey, change: int, action: Action) -> None:
        journey.flight.residual_bytes += change
        self._row.ledger.add("residuals", change, str(action))

    def _note_host(self) -> None:
        assert self._tier is not None
        self._row.ledger.set_host(self._tier.held_bytes)
        self._row.recorder.host_level(self._tier.held_bytes)

    def _flight(self, action: Action) -> MicrobatchState:
        return self._row.flights[action.stage, action.microbatch]

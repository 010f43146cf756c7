"""Worker: walks one rank's row of a Program. A dispatch table and one loop.

It knows kinds of instructions and who handles them; not how a schedule was made, nor what a planner is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ir.action import (
    AWAIT,
    KINDS,
    OFFLOAD,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    RELOAD,
    SEND_B,
    SEND_F,
    STEP,
    B,
    F,
    I,
    Instruction,
    Kind,
    Transfer,
    W,
)
from ..ir.schedule import Program
from .compute import PEAK_OF, Compute
from .failure.watch import Watch
from .ledger import Ledger
from .offload.handlers import (
    await_offload,
    count_copies,
    finish_oldest_offload,
    offload,
    reload,
    reload_bytes,
)
from .offload.tier import Tier
from .operations import Operations
from .out_of_memory import out_of_memory_told
from .posted_channel import Channel
from .recorder import Recorder
from .reduce_and_step import ReduceAndStep
from .step_state import Handler, InFlight, Microbatch, StepContext
from .transfer_handlers import Transfers
from .weights import Weights


class Worker:
    """Runs the steps of one rank.

    program: the training program.  clip_norm: limit of the gradients' global norm.
    tier: where residuals go; None if the program offloads nothing.  after_step: called after each update.
    """

    def __init__(
        self,
        *,
        rank: int,
        program: Program,
        weights: Weights,
        channel: Channel,
        ledger: Ledger,
        recorder: Recorder,
        watch: Watch,
        clip_norm: float | None = None,
        tier: Tier | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.weights = weights
        self.ledger = ledger
        self._between_steps = StepContext(
            rank=rank,
            weights=weights,
            channel=channel,
            ledger=ledger,
            recorder=recorder,
            watch=watch,
            tier=tier,
            in_flight=InFlight(),
            program=program,
        )
        compute = Compute()
        self.transfers = Transfers()
        self.operations = Operations()
        self.reduce_and_step = ReduceAndStep(clip_norm, after_step)
        added = [k for k, row in KINDS.items() if row.handler is not None or row.category == "compute"]
        self.handlers: dict[Kind, Handler] = {
            **dict.fromkeys(added, self.operations.begin),
            F: compute.forward,
            B: compute.backward,
            I: compute.backward_input,
            W: compute.backward_weight,
            RECOMPUTE: compute.recompute,
            SEND_F: self.transfers.send,
            SEND_B: self.transfers.send,
            RECV_F: self.transfers.receive,
            RECV_B: self.transfers.receive,
            OFFLOAD: offload,
            AWAIT: await_offload,
            RELOAD: reload,
            REDUCE: self.reduce_and_step.reduce_tied_gradients,
            STEP: self.reduce_and_step.step,
        }
        self._needed_bytes: dict[Kind, Callable[[StepContext, Any], int]] = {
            **dict.fromkeys(PEAK_OF, compute.needed_bytes),
            RECV_F: self.transfers.needed_bytes,
            RECV_B: self.transfers.needed_bytes,
            RELOAD: reload_bytes,
            STEP: self.reduce_and_step.needed_bytes,
        }

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        program: Program | None = None,
        training: bool = True,
        update: bool = True,
        incoming: Sequence[Transfer] | None = None,
        drains: bool = True,
    ) -> dict[int, Tensor]:
        """Run one step.

        microbatches: of all replicas of the stages, in the order in which `ir.stages` deals them out.
        program: another program than the training one, such as the forward-only one.
        update: whether the step ends with the optimizer; if not, gradients stay for the next one.
        incoming: the SENDs of the messages that the rank gets, where the program's are not all of them.
        drains: whether nothing is in flight at its end; if it is, the next step goes on from there.
        Returns: micro-batch -> loss, on the rank of the loss stage; elsewhere nothing.
        Raises: MemoryCapError if the rank would pass its cap or its device has no more memory;
            CommunicationError, PeerError and OffloadError as channel and tier do.
        """
        step = replace(
            self._between_steps,
            program=program or self._between_steps.program,
            microbatches=microbatches,
            training=training,
            update=update,
            incoming=incoming,
            losses={},
        )
        with torch.no_grad(), out_of_memory_told(step.ledger, lambda: step.watch.status):
            step.channel.begin(self.transfers.incoming(step))
            for instruction in step.program.rows[step.rank]:
                step.watch.status = str(instruction)
                self.operations.wait_before(step, instruction)
                self.reduce_and_step.progress(step)
                count_copies(step)
                self._make_room_under_cap(step, instruction)
                self.handlers[instruction.kind](step, instruction)
                step.count_boundary(instruction)
            with step.recorder.record("recv", "END"):
                step.channel.end(wait_for_sends=drains)
        step.count_boundary()
        if drains:
            states = step.in_flight.states
            assert not any(s.residuals or s.carried for s in states.values()) or not training
            states.clear()
        return step.losses

    def reuse(self, microbatches: Container[int]) -> None:
        """Forget what was kept of micro-batches that are through: others are going to have their numbers."""
        states = self._between_steps.in_flight.states
        for key in [key for key in states if key[1] in microbatches]:
            assert not states[key].residuals, f"stage {key[0]} still keeps residuals of micro-batch {key[1]}"
            del states[key]

    def forget(self) -> None:
        """Forget what a step that was broken off has left, gradients too: nothing will ask for it.

        Waits for operations that it has begun, as they may still write to gradients.
        """
        rank = self._between_steps
        self.operations.wait_for_all()
        self.reduce_and_step.forget()
        rank.in_flight.discard(rank.channel, rank.tier)
        rank.weights.discard_gradients()
        for kind in ("residuals", "transient"):
            rank.ledger.set(kind, 0)
        rank.count_boundary()

    def _make_room_under_cap(self, step: StepContext, instruction: Instruction) -> None:
        """While the next instruction would pass the cap, wait for messages of this rank to be taken, then for
        what is on its way to the tier.

        The simulator lets messages go when they have travelled. So what a plan's peak counts on has been
        taken once its receiver has come as far as in the simulation, for which nothing later of this rank is
        needed: where that peak keeps the cap, these waits end. Copies may be slower than simulated; where the
        program does not await them itself (AWAIT), that costs time here.
        Raises: MemoryCapError if an action of a program that offloads would pass the cap even so.
        """
        cap, bytes_of = step.ledger.cap_bytes, self._needed_bytes.get(instruction.kind)
        if cap is None or not step.training:
            return
        while step.ledger.total + (need := bytes_of(step, instruction) if bytes_of else 0) > cap:
            if not self._finish_send(step) and not finish_oldest_offload(step):
                if step.tier is not None:
                    step.ledger.refuse(need, str(instruction))
                return

    def _finish_send(self, step: StepContext) -> bool:
        """Wait until the oldest message under way is taken. Returns False if there is none."""
        with step.recorder.record("recv", "ROOM"):
            finished = step.channel.finish_send()
        step.count_boundary()
        return finished

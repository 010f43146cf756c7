"""Calls of a pipeline's methods: what happens when one is broken off, by an error or by Ctrl-C.

several ranks   the others are told, and every later call is refused: messages of the broken one may still
                be under way, and each rank has stopped somewhere else
a refused batch nothing: all ranks refuse it before anything is sent, and the next call starts as usual
one rank        the next call starts clean: no gradient, residual or operation of the broken one is left,
                and buffers are what they were before it; but if its optimizer may have updated some
                parameters and not others, or the pipeline does not drain between steps, only `load` is
                allowed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..ir.errors import BatchError, PeerError, PipeloomError
from ..runtime.failure.watch import Watch
from ..runtime.out_of_memory import out_of_memory_told
from ..runtime.worker import Worker
from .steady_run import SteadyRun


class Calls:
    """Wraps all that a pipeline does with its worker, one call after the other."""

    def __init__(self, watch: Watch, worker: Worker, steady: SteadyRun | None = None) -> None:
        self._watch, self._worker, self._steady = watch, worker, steady
        self._broken = ""
        self._torn = False
        self._buffers: dict[str, Tensor] = {}

    @contextmanager
    def call(self, what: str, *, heals: bool = False, refuses_batches: bool = False) -> Iterator[None]:
        """Do `what`, such as "step 3".

        heals: it makes parameters, buffers and optimizer anew.
        refuses_batches: nothing is sent or computed yet, and all ranks raise a BatchError if one does. So it
            breaks nothing off: the next call starts from where this one did.
        Raises: PipeloomError if an earlier call was broken off and this one cannot go on from there;
            PeerError if another rank failed.
        """
        self._recover(heals)
        self._watch.check()
        self._buffers = dict(self._worker.weights.buffers)
        try:
            with out_of_memory_told(self._worker.ledger, lambda: what):
                yield
        except BaseException as error:
            if refuses_batches and isinstance(error, BatchError):
                raise
            first = str(error).partition("\n")[0]
            by = first if isinstance(error, PeerError) else f"{type(error).__name__}: {first}".rstrip(": ")
            self._broken, self._torn = f"{what} was broken off ({by})", self._worker.reduce_and_step.updating
            if self._steady is not None:  # its rows go over from step to step: none can be taken back alone
                self._torn = True
                self._steady.forget()
            if self._watch.ranks > 1:
                self._watch.fail(error)
            raise
        self._worker.reduce_and_step.updating = False
        self._buffers = {}  # what they were is not needed, and must not stay in memory

    def _recover(self, heals: bool) -> None:
        """Clear away what a broken call has left, or refuse to go on."""
        if not self._broken:
            return
        if self._watch.ranks > 1:
            raise PipeloomError(
                f"rank {self._watch.rank} cannot go on: {self._broken}, and messages to and from it are lost",
                hint="start all ranks again, and load the newest checkpoint",
            )
        if self._torn and not heals:
            raise PipeloomError(
                f"{self._broken} in the middle of its update: some parameters may be updated and others not",
                hint="load the newest checkpoint, or make the pipeline again",
            )
        self._worker.forget()
        for name, buffer in self._buffers.items():
            self._worker.weights.replace_buffer(name, buffer)
        self._broken, self._torn, self._worker.reduce_and_step.updating = "", False, False

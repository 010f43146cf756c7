"""Batches that rank 0 alone has: each other rank gets the tensors that its stages read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ir.errors import BatchError
from ..ir.graph import Value
from ..tracer.job_calls import JoinedBatches
from .channel import Channel
from .messages import Message


class FirstBatches:
    """Sends batches from rank 0 to the others. All ranks call it alike.

    reads: names of the batch's tensors that this rank wants.  tensors: what a batch of the user's is made of.
    whole: all of a batch goes to all ranks, as it must where messages may be under way between two steps, or
        go from accelerator to accelerator.
    What a rank is not sent it gets on the meta device, by its shape.
    """

    def __init__(
        self,
        channel: Channel,
        reads: Iterable[str],
        tensors: Callable[[Any], dict[str, Tensor]],
        *,
        whole: bool = False,
    ) -> None:
        self.channel, self._tensors, self._whole = channel, tensors, whole
        self._reads: list[frozenset[str]] = channel.all_gather_object(frozenset(reads))

    def all(self, batches: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Batches until rank 0 has no more; those of other ranks are not looked at."""
        mine = iter(batches) if self.channel.rank == 0 else iter(())
        while (batch := self.take(next(mine, None))) is not None:
            yield batch

    def take(self, batch: Any, *, whole: bool = False) -> dict[str, Tensor] | None:
        """The batch that rank 0 has; None if that is None. whole: to all ranks.

        Raises: BatchError, on all ranks, if it is no batch.
        """
        channel, tensors, refusal = self.channel, dict[str, Tensor](), None
        rows: tuple[int, ...] = ()
        if channel.rank == 0 and batch is not None:
            try:
                tensors = self._tensors(batch)
                rows = getattr(tensors, "rows", ())
                tensors.update({name: tensor.contiguous() for name, tensor in tensors.items()})
            except BatchError as error:
                refusal = error
        shapes = None if batch is None else {n: (tuple(t.shape), _name(t.dtype)) for n, t in tensors.items()}
        shapes, rows = channel.agree(refusal, (shapes, rows))[0]
        if shapes is None:
            return None
        if whole or self._whole:
            everything: dict[str, Tensor] = channel.broadcast_object(tensors)
            return everything
        for rank in range(1, channel.ranks):
            message = self._message(rank, shapes)
            if channel.rank == rank:
                tensors = self._receive(message, shapes)
            elif channel.rank == 0 and message.values:
                channel.send(message, [tensors[value.name] for value in message.values])
        if channel.rank == 0:
            channel.end()
        elif rows:
            tensors = JoinedBatches(tensors)
            tensors.rows = rows
        return tensors

    def _message(self, rank: int, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Message:
        values = [Value(name=n, shape=s, dtype=d) for n, (s, d) in shapes.items() if n in self._reads[rank]]
        return Message(key=f"batch>{rank}", source=0, target=rank, values=tuple(values))

    def _receive(
        self, message: Message, shapes: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> dict[str, Tensor]:
        taken: dict[str, Tensor] = {}
        if message.values:
            self.channel.begin([message])
            received = self.channel.receive(message)
            taken = {v.name: t.clone() for v, t in zip(message.values, received, strict=True)}
            self.channel.release(message)
            self.channel.end()
        return {
            name: taken[name]
            if name in taken
            else torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype) in shapes.items()
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

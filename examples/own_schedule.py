"""A schedule and an operation of your own, in a file that is named on the command line.

    pipeloom schedule show examples/own_schedule.py:compressed -p 4 -m 8
    pipeloom schedule compare zb_h1 examples/own_schedule.py:compressed -F 1 -I 1.4 -W 0.6
    pipeloom verify --schedule examples/own_schedule.py:compressed --ranks 3
    pipeloom train --schedule examples/own_schedule.py:compressed --ranks 3

The operation sparsifies the gradients of each stage once they are complete, as one would before sending them
to other replicas: it keeps the largest entries, and what it leaves out is added in the next step. With
KEEP = 1 it changes nothing, so `verify` passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.schedule_language import Operation, Recipe, Shape, W, declare, phases

if TYPE_CHECKING:
    from torch import Tensor

    from pipeloom.runtime.operations import OperationContext

KEEP = 1.0
"""Share of the entries of each gradient that is kept."""


def keep_largest(context: OperationContext) -> None:
    """Keep the largest entries of each gradient, and remember the others for the next step."""
    if not context.last:
        return
    for name, gradient in context.gradients.items():
        whole = gradient + context.state.get(name, 0)
        gradient.copy_(sparse(whole, max(1, round(KEEP * whole.numel()))))
        context.state[name] = whole - gradient


def sparse(tensor: Tensor, count: int) -> Tensor:
    """The tensor with all but its `count` largest entries set to zero."""
    kept = tensor.abs().flatten().topk(count).indices
    mask = tensor.new_zeros(tensor.numel())
    mask[kept] = 1
    return tensor * mask.view_as(tensor)


COMPRESS = declare(
    Operation(
        letters="COMPRESS",
        meaning="gradient compression",
        after=W,
        share=0.25,
        acquires_bytes=1024,
        releases_bytes=1024,
        handler=keep_largest,
    )
)


def compressed(s: Shape) -> Recipe:
    """ZB-H1, with a compression after each W."""
    rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
    return Recipe(kinds="FIW", rows=rows, memory=s.ranks, insert=(COMPRESS,))

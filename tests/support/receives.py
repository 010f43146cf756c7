"""How many receives a program needs posted ahead."""

from __future__ import annotations

from pipeloom.ir.action import Transfer
from pipeloom.ir.schedule import Program


def receives_ahead(program: Program) -> dict[tuple[int, int], int]:
    """(from rank, to rank) -> receives that must be posted at once so that every wait can be met.

    Messages arrive in the sender's order. A receiver that waits for the third one first needs three
    posted; one that waits in the sender's order needs one.

    >>> from pipeloom.ir.schedule import parse_program
    >>> rows = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1<0 1F1 1RECV_F0<0 1F0")
    >>> receives_ahead(parse_program(2, (0, 1), rows))
    {(0, 1): 2}
    """
    place: dict[Transfer, tuple[tuple[int, int], int]] = {}
    for pair, sends in program.messages.items():
        for index, send in enumerate(sends):
            assert isinstance(send, Transfer)
            place[send.other_end] = (pair, index)
    waited: dict[tuple[int, int], int] = {}
    most: dict[tuple[int, int], int] = {}
    for row in program.rows:
        for step in row:
            if isinstance(step, Transfer) and not step.sends:
                pair, index = place[step]
                most[pair] = max(most.get(pair, 1), index + 1 - waited.get(pair, 0))
                waited[pair] = waited.get(pair, 0) + 1
    return most

"""What three ranks exchange by their channels, on any device."""

import torch

from pipeloom.ir.graph import Value
from pipeloom.runtime.channel import Channel, meeting
from pipeloom.runtime.messages import Message
from pipeloom.runtime.transport import SumGroup

DTYPES = ("float32", "bfloat16", "bool", "int64", "float64")


def message(key: str, source: int, target: int, *values: Value) -> Message:
    return Message(key=key, source=source, target=target, values=values)


def number(source: int, target: int) -> Message:
    value = Value(name="x", shape=(3,), dtype="float32")
    return message(f"{source}SEND_F0>{target}", source, target, value)


def all_to_all(channel: Channel, device: torch.device) -> None:
    """Every rank to every other: all dtypes and shapes, packed and not, waited for in reverse."""
    shapes = ((), (3,), (2, 0), (4, 5))
    messages = []
    for source in range(3):
        for target in range(3):
            for k in range(5 if source != target else 0):
                values = tuple(
                    Value(name=f"v{i}", shape=shapes[(i + k) % 4], dtype=DTYPES[(i + k) % 5])
                    for i in range(k)
                )
                messages.append(message(f"{source}SEND_F{k}>{target}", source, target, *values))
    incoming = [m for m in messages if m.target == channel.rank]

    def filled(m: Message, step: int) -> list[torch.Tensor]:
        numbers = torch.full((), (m.source + 2 * step) % 5, device=device)
        return [numbers.to(getattr(torch, v.dtype)).repeat(v.shape) for v in m.values]

    for step in range(3):
        channel.begin(incoming)
        for m in messages:
            if m.source == channel.rank:
                channel.send(m, filled(m, step))
        for m in reversed(incoming):
            for a, b in zip(channel.receive(m), filled(m, step), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
        for m in incoming:
            channel.release(m)
        channel.end()


def sums_and_objects(channel: Channel, device: torch.device) -> None:
    whole = torch.full((5,), float(channel.rank), device=device)
    channel.all_reduce(whole)
    assert (whole == 3).all()
    channel.open_groups([meeting((0, 2))])
    if channel.rank != 1:
        part = torch.full((2, 3), 1.5 + channel.rank, dtype=torch.float64, device=device).T
        channel.all_reduce(part, [2, 0])
        assert (part == 5).all()
    groups = [SumGroup("pair", (0, 1)), SumGroup("all", (0, 1, 2)), SumGroup("other", (1, 2))]
    channel.open_groups(groups)  # ranks are in unequally many
    for group in groups:
        if channel.rank in group.ranks:
            begun = torch.full((3,), float(channel.rank), device=device)
            channel.begin_sum(begun, group).wait()
            assert (begun == sum(group.ranks)).all()
            owned = begun.new_full((3,), float(channel.rank), dtype=torch.float64)
            channel.begin_sum(owned, group, group.ranks[-1]).wait()
            assert channel.rank != group.ranks[-1] or (owned == sum(group.ranks)).all()
            sent = begun.new_full((3,), channel.rank)
            channel.begin_broadcast(sent, group, group.ranks[-1]).wait()
            assert (sent == group.ranks[-1]).all()
    assert channel.all_gather_object("x" * channel.rank) == ["", "x", "xx"]
    assert channel.broadcast_object({"from": channel.rank}) == {"from": 0}

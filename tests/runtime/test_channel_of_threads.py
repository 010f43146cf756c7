"""The channel's behaviour, with the ranks as threads."""

import time
from collections.abc import Callable, Sequence
from itertools import permutations
from unittest.mock import Mock, patch

import exchanges
import pytest
import torch
from hypothesis import given, strategies as st
from runs import threads
from trials import examples

from pipeloom.ir.errors import CommunicationError, PeerError
from pipeloom.ir.graph import Value
from pipeloom.runtime import channel
from pipeloom.runtime.channel import Channel, local_channels, meeting
from pipeloom.runtime.messages import ALIGNMENT, Message, as_bytes, unpack
from pipeloom.tracer.tensors import has_order

Body = Callable[[Channel], object]


def all_well(channels: list[Channel], body: Body) -> list[object]:
    """Run the body on every rank."""

    def work(_: int, channel: Channel) -> object:
        with channel.watch:
            return body(channel)

    return threads(channels, work)


def ends(channels: list[Channel], body: Body) -> list[BaseException]:
    """The exceptions that end the body on each rank."""

    def work(_: int, channel: Channel) -> BaseException:
        with pytest.raises((ValueError, CommunicationError, PeerError)) as caught, channel.watch:
            body(channel)
        return caught.value

    return threads(channels, work)


def one_way(messages: list[Message], receive: Body, wanted: Sequence[Message] = ()) -> Body:
    """Rank 0 sends the messages; rank 1, to which they are announced, does what `receive` does."""

    def body(channel: Channel) -> None:
        channel.begin(*(messages, wanted) if channel.rank == 1 else ([], []))
        if channel.rank == 1:
            receive(channel)
        for message in messages if channel.rank == 0 else []:
            channel.send(message, [torch.zeros(v.shape) for v in message.values])
        channel.end()

    return body


def floats(key: str, source: int, target: int, *shapes: tuple[int, ...]) -> Message:
    parts = (Value(name=f"v{k}", shape=shape, dtype="float32") for k, shape in enumerate(shapes))
    return exchanges.message(key, source, target, *parts)


@examples(10, 30)
@given(data=st.data(), ahead=st.integers(1, 4))
def test_messages_arrive_whole_whatever_the_order_of_waiting(data: st.DataObject, ahead: int) -> None:
    sizes = st.lists(st.tuples(st.integers(0, 4)), min_size=1, max_size=3)
    shapes = data.draw(st.lists(st.tuples(st.sampled_from([0, 1]), sizes), min_size=1, max_size=8))
    messages = [floats(f"m{k}", source, 2, *parts) for k, (source, parts) in enumerate(shapes)]
    waits = data.draw(st.permutations(messages))
    released_late, told = data.draw(st.booleans()), data.draw(st.booleans())

    def body(channel: Channel) -> None:
        for step in range(2):
            mine = messages if channel.rank == 2 else []
            channel.begin(mine, waits if mine and told else [])
            for k, m in enumerate(messages):
                if m.source == channel.rank:
                    channel.send(m, [torch.full(v.shape, 10.0 * step + k) for v in m.values])
            got = []
            for m in waits if channel.rank == 2 else []:
                got.append((m, channel.receive(m)))
                while got and (not released_late or m is waits[-1]):
                    first, tensors = got.pop()
                    assert all((t == 10.0 * step + messages.index(first)).all() for t in tensors)
                    channel.release(first)
            channel.end()
        assert channel.held_bytes == 0

    with patch.object(channel, "AHEAD", ahead):
        all_well(local_channels(3), body)


@pytest.mark.parametrize(("ahead", "opened"), [(1, 2), (3, 3)])
def test_the_next_receive_is_opened_after_what_is_computed_in_between(ahead, opened, monkeypatch) -> None:
    """Its buffer is taken at once. With none open it would not overlap that work, so it is opened at once."""
    messages = [floats(f"m{k}", 0, 1, (4,)) for k in range(5)]
    monkeypatch.setattr(channel, "AHEAD", ahead)
    channels = local_channels(2)
    counted = Mock(wraps=channels[1]._transport.receive)
    channels[1]._transport.receive = counted

    def receive(channel: Channel) -> None:
        assert counted.call_count == ahead
        channel.receive(messages[0])
        assert channel.held_bytes == (1 + ahead) * 16
        assert counted.call_count == opened
        for message in messages[1:]:
            channel.receive(message)
        for message in messages:
            channel.release(message)

    all_well(channels, one_way(messages, receive))
    assert counted.call_count == len(messages)


def test_what_is_received_next_has_its_receive_open_though_others_are_sent_before() -> None:
    messages = [floats(f"m{k}", 0, 1, (4,)) for k in range(6)]
    wanted = [messages[k] for k in (0, 3, 1, 2, 4, 5)]
    held = []

    def receive(channel: Channel) -> None:
        held.append(channel.held_bytes)
        for m in wanted:
            channel.receive(m)
            channel.release(m)
            held.append(channel.held_bytes)

    all_well(local_channels(2), one_way(messages, receive, wanted))
    # The first two that it receives, and what is sent in front of them; then always what two more take.
    assert [size // 16 for size in held] == [4, 3, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("wait", ["finish_send", "all_gather_object", "all_reduce"])
def test_a_wait_opens_the_receives_that_other_ranks_may_be_waiting_for(wait: str) -> None:
    """Rank 0 waits for rank 1 to open its third receive, which holds up what rank 1 waits for."""
    large = (1 << 16,)
    there = [floats(f"there{k}", 0, 1, large) for k in range(3)]
    back = [floats(f"back{k}", 1, 0, large) for k in range(3)]

    def body(channel: Channel) -> None:
        mine, others = (there, back) if channel.rank == 0 else (back, there)
        channel.begin(others)
        first = channel.rank == 0 or wait == "finish_send"
        for m in mine if first else []:
            channel.send(m, [torch.zeros(large)])
        if channel.rank == 1:
            channel.receive(others[0])
        while first and channel.finish_send():
            pass
        if wait == "all_gather_object":
            channel.all_gather_object(None)
        elif wait == "all_reduce":
            channel.all_reduce(torch.zeros(1))
        for m in mine if not first else []:
            channel.send(m, [torch.zeros(large)])
        for m in others[channel.rank :]:
            channel.receive(m)
        for m in others:
            channel.release(m)
        channel.end()

    all_well(local_channels(2, timeout_s=5.0), body)


def test_sums_over_all_and_over_some_ranks() -> None:
    """Every rank gets the same bits, also where the order of the terms matters."""
    terms = torch.tensor([1e8, 1.0, -1e8, 0.1])

    def body(channel: Channel) -> tuple[torch.Tensor, torch.Tensor]:
        channel.open_groups([meeting((0, 2, 3))])
        whole = terms[channel.rank].repeat(3)
        channel.all_reduce(whole)
        part = terms[channel.rank].repeat(2, 3).T  # not contiguous
        if channel.rank != 1:
            channel.all_reduce(part, [3, 0, 2])
        channel.all_reduce(part, [channel.rank])
        return whole, part

    wholes, parts = zip(*all_well(local_channels(4), body), strict=True)
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    assert all(torch.equal(parts[rank], parts[0]) for rank in (2, 3))
    sums = {float(a + b + c) for a, b, c in permutations(terms[[0, 2, 3]])}
    assert float(parts[0][0, 0]) in sums
    assert torch.equal(parts[1], torch.ones(3, 2))


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    def body(channel: Channel) -> None:
        other = 1 - channel.rank
        wanted = floats(f"{other}SEND_F0>{channel.rank}", other, channel.rank, (1,))
        channel.begin([wanted])
        channel.watch.status = f"{channel.rank}F0"
        if channel.rank == 0:  # the other one waits before the short limit begins
            while not ((state := channel.watch._board.statuses()[1]) and state.waits_for):
                time.sleep(0.01)
        channel.receive(wanted)

    channels = local_channels(2)
    channels[0]._timeout_s = 0.5
    first, second = ends(channels, body)
    assert type(first) is CommunicationError and "1SEND_F0>0 from rank 1" in str(first)
    assert "1     1F0   0SEND_F0>1 from rank 0, for" in str(first)
    assert "they wait for each other" in str(first)
    assert isinstance(second, PeerError)


def test_one_threads_exception_ends_the_others_waits() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 1:
            raise ValueError("boom")
        wanted = floats("1SEND_B0>0", 1, channel.rank, (1,))
        if channel.rank == 0:
            channel.begin([wanted])
            channel.receive(wanted)
        channel.watch._board.wait_for_failure(300)
        channel.watch.check()  # where a rank does not wait, it asks

    errors = ends(local_channels(3), body)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError) and str(error).startswith("rank 1 failed: ValueError: boom\n")
        assert 'raise ValueError("boom")' in str(error)


DTYPES = ("float32", "float64", "bfloat16", "float16", "bool", "int64", "int32", "uint8", "complex64")


@st.composite
def values(draw: st.DrawFn) -> Value:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    order = draw(st.sampled_from([(), tuple(draw(st.permutations(range(len(shape)))))]))
    return Value(name="v", shape=shape, dtype=draw(st.sampled_from(DTYPES)), order=order)


@given(st.lists(values(), max_size=5))
def test_what_lies_in_a_buffer_is_unpacked(parts: list[Value]) -> None:
    this = exchanges.message("0SEND_F2>1", 0, 1, *parts)
    tensors = [torch.randint(0, 2, v.shape).to(getattr(torch, v.dtype)) for v in parts]
    assert this.fits(tensors) and not this.fits([*tensors, torch.zeros(1)])
    for others in ([t[None] for t in tensors], [torch.zeros_like(t, dtype=torch.int8) for t in tensors]):
        assert this.fits(others) == (not parts)
    buffer = torch.empty(this.bytes, dtype=torch.uint8)
    for value, tensor, start in zip(parts, tensors, this.offsets, strict=True):
        buffer[start : start + value.bytes] = as_bytes(tensor, value.order)
    found = unpack(this, buffer)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found, strict=True))
    assert all(start % ALIGNMENT == 0 for start in this.offsets)
    assert all(has_order(view, value.order) for view, value in zip(found, parts, strict=True))
    assert len(parts) != 1 or this.bytes == parts[0].bytes, "one value travels without padding"
    assert all(view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for view in found)

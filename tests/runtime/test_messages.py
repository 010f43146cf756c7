"""Messages on the wire, and the pool of their buffers."""

import pytest
import torch
from hypothesis import given, strategies as st

from pipeloom.ir.errors import CommunicationError
from pipeloom.ir.graph import Value
from pipeloom.runtime.messages import ALIGNMENT, BufferPool, Message, check_tensors, pack, unpack
from pipeloom.tracer.tensors import has_order

DTYPES = ("float32", "float64", "bfloat16", "float16", "bool", "int64", "int32", "uint8", "complex64")


@st.composite
def values(draw: st.DrawFn) -> Value:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return Value(
        name=draw(st.text("abc", min_size=1, max_size=3)),
        shape=shape,
        dtype=draw(st.sampled_from(DTYPES)),
        order=draw(st.sampled_from([(), tuple(draw(st.permutations(range(len(shape)))))])),
    )


def message(*parts: Value) -> Message:
    return Message(key="0SEND_F2>1", source=0, target=1, values=parts)


def filled(value: Value) -> torch.Tensor:
    return torch.randint(0, 2, value.shape).to(getattr(torch, value.dtype))


@given(st.lists(values(), max_size=5))
def test_what_is_packed_is_unpacked(parts: list[Value]) -> None:
    this = message(*parts)
    tensors = [filled(value) for value in parts]
    buffer = torch.empty(this.bytes, dtype=torch.uint8)
    pack(this, tensors, buffer)
    found = unpack(this, buffer)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found, strict=True))
    assert all(start % ALIGNMENT == 0 for start in this.offsets)
    assert all(has_order(view, value.order) for view, value in zip(found, parts, strict=True))
    assert all(view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for view in found)


@given(values())
def test_one_value_travels_without_padding(value: Value) -> None:
    assert message(value).bytes == value.bytes


def test_tensors_that_differ_from_the_plan_are_refused() -> None:
    this = message(Value(name="h", shape=(4, 8), dtype="bfloat16"))
    with pytest.raises(CommunicationError) as found:
        check_tensors(this, [torch.zeros(4, 9, dtype=torch.bfloat16)])
    assert found.value.message == "0SEND_F2>1: value h is bfloat16[4, 9], but the plan says bfloat16[4, 8]"
    with pytest.raises(CommunicationError, match=r"value h is float32\[4, 8\], but the plan says bfloat16"):
        check_tensors(this, [torch.zeros(4, 8)])
    with pytest.raises(CommunicationError, match="carries 1 values, but 2 tensors were given"):
        check_tensors(this, [torch.zeros(4, 8)] * 2)


def test_a_pool_hands_buffers_out_again_and_counts_them() -> None:
    pool = BufferPool(torch.device("cpu"))
    first, second = pool.take(100), pool.take(100)
    pool.give(first)
    assert pool.take(100) is first
    assert pool.take(64) is not second
    assert (pool.used_bytes, pool.idle_bytes) == (264, 0)


def test_a_pool_frees_sizes_that_are_no_longer_used() -> None:
    pool = BufferPool(torch.device("cpu"))
    for size in (100, 64):
        pool.give(pool.take(size))
    pool.drop_unused()
    assert pool.idle_bytes == 164, "both sizes were used lately"
    pool.give(pool.take(64))
    pool.drop_unused()
    assert pool.idle_bytes == 64

"""How tensors lie in memory, and copies that lie alike."""

import torch
from hypothesis import given, strategies as st
from torch import Tensor
from trials import examples

from pipeloom.ir.graph import Value
from pipeloom.tracer.tensors import (
    copy_in_order,
    ensure_unshared,
    has_order,
    memory_order,
    permute_to_memory,
    view_in_order,
    zeros_like_value,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Dimensions in any order, and perhaps a part of a larger tensor."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    base = torch.randn([size + draw(st.integers(0, 1)) for size in shape])
    part = base[tuple(slice(0, size) for size in shape)]
    return part.permute(draw(st.permutations(range(part.ndim))))


@examples(40, 100)
@given(tensors())
def test_a_copy_lies_as_the_tensor_without_gaps(tensor: Tensor) -> None:
    order = memory_order(tensor)
    made = copy_in_order(tensor, order)
    assert torch.equal(made, tensor) and has_order(made, order)
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        assert has_order(tensor, order) and made.is_contiguous() == tensor.is_contiguous()
    row = permute_to_memory(made, order).view(-1)
    again = view_in_order(row, tensor.shape, order)
    assert torch.equal(again, tensor) and again.data_ptr() == made.data_ptr()


def test_a_tensor_alone_in_its_storage_is_not_copied() -> None:
    turned = torch.randn(2, 3).t()
    assert ensure_unshared(turned, (1, 0), set()) is turned
    taken = {turned.untyped_storage()._cdata}
    for tensor, order in ((turned, (1, 0)), (turned, ()), (torch.randn(4, 3)[:2], ())):
        made = ensure_unshared(tensor, order, set(taken))
        assert made is not tensor and torch.equal(made, tensor) and has_order(made, order)
    first = torch.randn(2, 3)
    ensure_unshared(first, (), taken)
    assert ensure_unshared(first.view(3, 2), (), taken).data_ptr() != first.data_ptr()


def test_zeros_lie_as_their_value() -> None:
    made = zeros_like_value(Value(name="v", shape=(2, 3, 4), dtype="bfloat16", order=(2, 0, 1)))
    assert (made.shape, made.dtype, made.stride()) == ((2, 3, 4), torch.bfloat16, (3, 1, 6))

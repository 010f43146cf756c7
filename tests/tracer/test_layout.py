"""How tensors lie in memory, and copies that lie alike."""

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from pipeloom.ir.graph import Value
from pipeloom.tracer import alone, copied, in_memory, lies_so, order_of, seen_so, zeros


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Dimensions in any order, and perhaps a part of a larger tensor."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    base = torch.randn([size + draw(st.integers(0, 1)) for size in shape])
    part = base[tuple(slice(0, size) for size in shape)]
    return part.permute(draw(st.permutations(range(part.ndim))))


@given(tensors())
def test_a_copy_lies_as_the_tensor_without_gaps(tensor: Tensor) -> None:
    order = order_of(tensor)
    made = copied(tensor, order)
    assert torch.equal(made, tensor) and lies_so(made, order)
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        assert lies_so(tensor, order) and made.is_contiguous() == tensor.is_contiguous()
    row = in_memory(made, order).view(-1)
    again = seen_so(row, tensor.shape, order)
    assert torch.equal(again, tensor) and again.data_ptr() == made.data_ptr()


def test_what_repeats_its_numbers_lies_as_its_dimensions_are_numbered() -> None:
    assert order_of(torch.zeros(2, 1, 3).expand(2, 4, 3)) == ()
    assert order_of(torch.zeros(2, 1, 3).expand(2, 4, 3).transpose(0, 2)) == ()


def test_a_tensor_alone_in_its_storage_is_not_copied() -> None:
    turned = torch.randn(2, 3).t()
    assert alone(turned, (1, 0), set()) is turned
    taken = {turned.untyped_storage()._cdata}
    for tensor, order in ((turned, (1, 0)), (turned, ()), (torch.randn(4, 3)[:2], ())):
        made = alone(tensor, order, set(taken))
        assert made is not tensor and torch.equal(made, tensor) and lies_so(made, order)
    first = torch.randn(2, 3)
    alone(first, (), taken)
    assert alone(first.view(3, 2), (), taken).data_ptr() != first.data_ptr()


def test_zeros_lie_as_their_value() -> None:
    made = zeros(Value(name="v", shape=(2, 3, 4), dtype="bfloat16", order=(2, 0, 1)))
    assert (made.shape, made.dtype, made.stride()) == ((2, 3, 4), torch.bfloat16, (3, 1, 6))

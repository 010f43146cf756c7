"""What is known about the functions that glue calls, by name: which read data, draw random numbers, or need
no data at all; and what is read, as numbers that can be sent to other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_leaves

from ...ir.errors import CaptureError
from ...ir.user_code import at, user_line
from ..tensors import tensors_of

READS = frozenset(
    """
    item __bool__ __int__ __float__ __index__ __complex__ tolist numpy __array__ is_nonzero equal allclose
    __contains__
    """.split()
)
"""Functions that turn data into Python values, on which the forward may then decide."""

RANDOM = frozenset(
    """
    rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like randint_like
    uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ trunc_normal_ dropout
    dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout feature_alpha_dropout_ native_dropout gumbel_softmax rrelu rrelu_
    fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention multi_head_attention_forward
    """.split()
)
"""Functions that may draw random numbers."""

LIKE = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty
    new_full new_tensor
    """.split()
)
"""Functions that need no data of their first argument, only its shape and dtype."""

SHAPES = frozenset({"__get__.shape", "size", "numel", "__len__", "nelement", "__get__.nbytes"})
"""Questions how large a tensor is."""

PLACES = frozenset({"__get__.device", "__get__.is_cuda", "__get__.is_cpu", "__get__.is_meta", "get_device"})
"""Questions where a tensor is."""

SILENT = frozenset({"retain_grad", "backward", "storage", "untyped_storage", "data_ptr"})
"""Functions that make no tensor and may fail on one without data."""

HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "__get__.grad_fn", "grad"})
"""Functions by which code is to be called with gradients, or asks for them (`autograd.grad`)."""

DETACHING = frozenset({"detach", "detach_", "__get__.data"})
"""Functions whose result no gradient flows back from."""

_SIZED_BY_DATA = frozenset(
    """
    nonzero argwhere masked_select unique unique_consecutive bincount
    """.split()
)


def function_name(function: Any) -> str:
    """The name by which a function is listed here; getters of properties are `__get__.shape` and so on.

    >>> function_name(torch.Tensor.add_), function_name(torch.Tensor.shape.__get__)
    ('add_', '__get__.shape')
    """
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        return f"{name}.{getattr(function.__self__, '__name__', '')}"
    return name


def open_up(tree: Any) -> None:
    """Let tensors in dataclasses be seen: such a class is made known to pytree when it first appears."""
    more = True
    while more:
        leaves = [leaf for leaf in tree_leaves(tree) if not isinstance(leaf, type)]
        kinds = {type(leaf) for leaf in leaves if is_dataclass(leaf)}
        more = bool(kinds)
        for kind in kinds:
            register_dataclass(kind)


def refuse_hook(name: str) -> NoReturn:
    """Raises: CaptureError: code between modules runs on several ranks, each with a part of the graph."""
    what = name.removeprefix("__get__.")
    if what == "grad":
        raise CaptureError(
            f"the forward calls autograd.grad between modules{at(user_line())}, where no rank has the whole "
            "graph",
            hint="move this line, with what computes its arguments, into the forward of one module",
        )
    raise CaptureError(
        f"the forward calls {what} on a tensor between modules{at(user_line())}: several ranks run this "
        "code, and a hook would be called by more than one of them, or by none",
        hint="move this line, with what makes the tensor, into the forward of a module, which one rank runs",
    )


def sized_by_data(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the shape of a call's result depends on the data of its arguments.

    >>> mask = torch.tensor([True, False])
    >>> sized_by_data("__getitem__", (mask, mask)), sized_by_data("__getitem__", (mask, 0))
    (True, False)
    """
    tensors = tensors_of(args[1:])
    if name == "__getitem__":
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors)
    if name == "where":
        return len(args) == 1
    return name in _SIZED_BY_DATA or (name == "repeat_interleave" and bool(tensors))


# What glue reads from tensors (`READS`) goes to other stages as numbers.

_READS_ALL = frozenset({"tolist", "numpy", "__array__"})
_READS_BOOL = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})


def count_numbers(name: str, tensor: Tensor) -> int:
    """How many numbers a read of `tensor` gives."""
    return tensor.numel() if name in _READS_ALL else 1


def read_numbers(result: Any) -> list[float]:
    """The numbers in the result of a read.

    >>> read_numbers([[1, 2], [3, 4]]), read_numbers(True)
    ([1, 2, 3, 4], [True])

    Raises: CaptureError for numbers that 64-bit floats cannot hold.
    """
    numbers = tree_leaves(result.tolist() if hasattr(result, "tolist") else result)
    for number in numbers:
        if isinstance(number, complex) or (isinstance(number, int) and abs(number) > 2**53):
            raise CaptureError(
                f"the forward decides between modules on the number {number}, which cannot be sent",
                hint="move this code into a module of its own",
            )
    return numbers


def python_value(name: str, numbers: Sequence[float], tensor: Tensor) -> Any:
    """The result of the read `name` of a tensor of this shape and dtype, from its numbers.

    >>> python_value("item", [3.0], torch.zeros((), dtype=torch.int64))
    3
    """
    if name in _READS_BOOL:
        return bool(numbers[0])
    if name in ("__int__", "__index__"):
        return int(numbers[0])
    if name == "__float__":
        return float(numbers[0])
    data = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device="cpu")
    data = data.to(tensor.dtype).reshape(tensor.shape if name in _READS_ALL else ())
    return data.item() if name == "item" else data.numpy() if name != "tolist" else data.tolist()

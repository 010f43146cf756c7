"""`copy.deepcopy` of fake tensors, as constructors use it to repeat a layer.

PyTorch copies the FakeTensorMode along with each fake tensor, parameters included (pytorch/pytorch#104465),
and with the mode its table of weak references to storages, whose count the copy does not raise. Each of
them is then given back twice: the heap is damaged, and the process dies later, anywhere.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


class Copies(TorchFunctionMode):
    """Copies a fake tensor as PyTorch copies a real one, by calls that can be recorded.

    Raises inside `copy.deepcopy`: NotImplementedError for a fake tensor that has a gradient or a history.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode() as fake, Copies():
    ...     again = copy.deepcopy(torch.nn.BatchNorm1d(4))
    >>> again.running_mean.fake_mode is fake
    True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copied(*args)
        return func(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """The copy of a fake tensor; memo: what this `copy.deepcopy` has copied so far."""
    if id(tensor) not in memo:
        if tensor.grad is not None or not tensor.is_leaf:
            raise NotImplementedError("a tensor with a gradient or a history is copied")
        with torch.no_grad():
            alone = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = _parameter(tensor) if alone else _plain(tensor, memo)
    found: Tensor = memo[id(tensor)]
    return found


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Parameters are copied one by one, and without what was attached to them."""
    return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)


def _plain(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Other tensors are copied with their whole storage, once: copies share memory where the originals do."""
    storage = tensor.untyped_storage()
    key = ("storage", storage._cdata, tensor.dtype)
    if key not in memo:
        whole = (storage.nbytes() // tensor.itemsize,)
        memo[key] = tensor.detach().as_strided(whole, (1,), 0).clone()
    view = memo[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    copied: Tensor = view.detach().requires_grad_(tensor.requires_grad)
    attached = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
    vars(copied).update(copy.deepcopy(attached, memo))
    return copied

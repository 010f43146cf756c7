"""Tensors whose data is on another stage: shapes without data, and what cannot even be shaped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ...ir.errors import CutError, of_type


def constant_leaves(leaves: Sequence[Any]) -> list[Any]:
    """What a unit returns besides tensors, as far as a stub can return the same."""
    return [leaf for leaf in leaves if isinstance(leaf, (bool, int, str)) and not isinstance(leaf, Tensor)]


def is_sendable(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, str))


def sendable_leaf(leaf: Any, unit: str) -> Any:
    if is_sendable(leaf):
        return leaf
    return MissingValue(f"the {type(leaf).__name__} that {unit} returned: only tensors are sent")


KEEP_TOGETHER = (
    "keep what makes it and what uses it in one stage (Job.modules fixes the cut), "
    "or move this code into a module of its own"
)


class MissingValue:
    """Stands for something that only another stage has, and whose shape is not known either.

    ask: gives the number that the stage which has it read next, or raises; None if nobody knows.
    """

    def __init__(self, what: str, ask: Callable[[], float] | None = None) -> None:
        self._what = what
        self._ask = ask

    def _number(self) -> float:
        return self._refuse() if self._ask is None else self._ask()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CutError(f"this stage does not have {self._what}", hint=KEEP_TOGETHER)

    def _pass_on(self, *args: Any, **kwargs: Any) -> MissingValue:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def item(self) -> float:
        """What the other stage read; whole numbers as int."""
        number = self._number()
        return int(number) if number == int(number) else number

    __index__ = __int__
    __iter__ = __len__ = __contains__ = __enter__ = tolist = numpy = __array__ = _refuse
    __call__ = __getitem__ = __setitem__ = __neg__ = __invert__ = __abs__ = _pass_on
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _pass_on
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __mod__ = __and__ = __or__ = _pass_on
    __lt__ = __le__ = __gt__ = __ge__ = _pass_on
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self if self._may_equal(other) else False

    def __ne__(self, other: object) -> Any:
        return self if self._may_equal(other) else True

    def _may_equal(self, other: object) -> bool:
        """None and text are handed on, see `sendable_leaf`."""
        return not (other is None or isinstance(other, str))


def has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def refuse_absent_inside(arguments: Sequence[Any], unit: str) -> None:
    """Only tensors that are arguments themselves are sent.

    Raises: CutError if an object among a unit's arguments, such as a cache of keys and values, holds tensors
        that are on another stage.
    """
    for leaf in arguments:
        if any(isinstance(t, MissingValue) or has_no_data(t) for t in tensors_inside(leaf)):
            raise CutError(
                f"{unit} is called with {of_type(leaf)} that holds tensors of another stage, which "
                "are not sent",
                hint=KEEP_TOGETHER,
            )


def tensors_inside(leaf: Any) -> Iterator[Tensor | MissingValue]:
    """Tensors that an object holds, which is none itself. Modules are left out: theirs are known."""
    return iter(()) if isinstance(leaf, (Tensor, MissingValue)) else _inside(leaf, depth=4)


def _inside(value: Any, depth: int) -> Iterator[Tensor | MissingValue]:
    if isinstance(value, (Tensor, MissingValue)):
        yield value
    elif depth and not isinstance(value, (nn.Module, type, str, bytes)):
        parts = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        for part in (*parts, *getattr(value, "__dict__", {}).values()):
            yield from _inside(part, depth - 1)


def call_without_data(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    ask: Callable[[], float],
) -> tuple[Any, list[Tensor]]:
    """Run a call for its shapes only.

    ask: see `MissingValue`.
    Returns: the result, without data; and those of the arguments that the call changes.
    """
    if name in ("cpu", "cuda", "pin_memory"):
        return args[0], []
    twins: dict[int, tuple[Tensor, Tensor, int]] = {}

    def twin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in twins:
                stand_in = leaf
                if not leaf.is_meta or isinstance(leaf, FakeTensor):
                    stand_in = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
                twins[id(leaf)] = leaf, stand_in, stand_in._version
            return twins[id(leaf)][1]
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return None if isinstance(leaf, torch.Generator) else leaf

    args, named = tree_map(twin, (args, dict(kwargs)))
    if "device" in named:
        named["device"] = torch.device("meta")
    if name == "to":
        where = [torch.device("meta") if isinstance(a, (str, int)) else a for a in args[1:2]]
        args = (args[0], *where, *args[2:])
    try:
        with torch.no_grad():
            result = function(*args, **named)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
        clear_frames(error.__traceback__)  # as `export_program` does
        return MissingValue(f"the result of {name}, whose shape depends on data ({error})", ask), []
    original_of = {id(stand_in): leaf for leaf, stand_in, _ in twins.values()}
    changed = [leaf for leaf, stand_in, version in twins.values() if stand_in._version != version]
    restored = tree_map(
        lambda leaf: original_of.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, result
    )
    return restored, changed


def missing_in(tree: Any) -> MissingValue | None:
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, MissingValue)), None)

"""`torch.export`, a third faster for tests, which export some thousand models: what it does anew for each is
done once."""

import gc
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from pytest import MonkeyPatch
from torch._subclasses.fake_impls import op_implementations_dict as fake_rules
from torch.export import exported_program

Operators = dict[Any, Any]

_list_operators = exported_program._collect_all_valid_cia_ops
_override = exported_program._override_composite_implicit_decomp
_overridden: dict[Any, Operators] = {}
_depth = 0


@cache
def _listed(known: int) -> set[Any]:
    return _list_operators()


def _operators() -> set[Any]:
    """All there are, listed anew when one has been declared."""
    count = torch._C._dispatch_get_registrations_for_dispatch_key
    return _listed(len(count("CompositeImplicitAutograd")))


@contextmanager
def _overridden_at_once(operators: Operators) -> Iterator[None]:
    """PyTorch registers six thousand kernels for this, twice in each export, one inside the other."""
    global _depth
    call = (_depth, tuple(operators.items()))
    _depth += 1
    try:
        if call not in _overridden:
            with _override(operators):
                _overridden[call] = {op: (dict(op.py_kernels), fake_rules.get(op)) for op in operators}
                yield
            return
        before = {op: dict(op.py_kernels) for op in operators}
        for op, (kernels, rule) in _overridden[call].items():
            _set_kernels(op, kernels)
            fake_rules[op] = rule
        try:
            yield
        finally:
            for op, kernels in before.items():
                _set_kernels(op, kernels)
                fake_rules.pop(op, None)
    finally:
        _depth -= 1


def _set_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


def use(patch: MonkeyPatch) -> None:
    patch.setattr(exported_program, "_collect_all_valid_cia_ops", _operators)
    patch.setattr(exported_program, "_override_composite_implicit_decomp", _overridden_at_once)
    patch.setattr(torch._ops, "Callable", typing.Callable)  # an annotation that is made anew for each kernel
    gc.set_threshold(50_000, 20, 20)  # what torch has imported is looked through ten times less often

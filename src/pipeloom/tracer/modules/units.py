"""Which modules a model is cut between, and which belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from torch import nn

from ...ir.errors import CutError, did_you_mean
from ..guards import is_below

_HINT = "Job.modules is a list of FQN lists, one list per stage, as model.named_modules() has them"


def derive_units(model: nn.Module, whole: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """FQNs of the modules that a model is cut between by default, in the order of registration.

    They are the model's children, with containers (ModuleList, ModuleDict, Sequential) replaced by their
    items, also one inside another, and with children that hold containers somewhere below and at least a
    third of the parameters replaced by their own children in turn, such as encoder and decoder of a
    translation model. Other items of containers stay whole, whatever they hold.

    whole: FQNs of modules that stay whole in any case.

    >>> derive_units(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))))
    ('0', '1.0', '1.1')
    """
    seen: set[int] = set()
    units = []
    large = size_of(model) / 3
    for fqn, module in _units(model, "", whole, large):
        if id(module) not in seen:  # a module with two names is one unit
            seen.add(id(module))
            units.append(fqn)
    return tuple(units)


def size_of(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


def _units(
    module: nn.Module, path: str, whole: frozenset[str], large: float
) -> Iterator[tuple[str, nn.Module]]:
    items = is_container(module)
    for name, child in module.named_children():
        fqn = f"{path}.{name}" if path else name
        holds = not items and any(map(is_container, child.modules())) and size_of(child) >= large
        expand = is_container(child) or holds
        if expand and fqn not in whole and next(child.children(), None) is not None:
            yield from _units(child, fqn, whole, large)
        else:
            yield fqn, child


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, without a forward of its own."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def listed_units(model: nn.Module, lists: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The user's lists with containers replaced by their items, checked.

    Raises: CutError if a list is empty or a string, or a name is unknown, given twice, or inside another one.
    """
    if alone := next((names for names in lists if isinstance(names, str)), None):
        raise CutError(f"Job.modules has {alone!r} where a list of names belongs", hint=_HINT)
    modules = dict(model.named_modules(remove_duplicate=False))
    groups = tuple(tuple(_expanded(name, modules) for name in names) for names in lists)
    flat = tuple(tuple(fqn for part in group for fqn in part) for group in groups)
    taken: dict[str, int] = {}
    for stage, names in enumerate(flat):
        if not names:
            raise CutError(f"list {stage} of Job.modules names no module", hint=_HINT)
        for fqn in names:
            if fqn in taken:
                raise CutError(f"Job.modules names {fqn} twice", hint="name each module once")
            taken[fqn] = stage
    for outer, fqn in permutations(taken, 2):
        if is_below(fqn, outer):
            raise CutError(f"Job.modules names {outer} and, inside it, {fqn}", hint="name only one")
    return flat


def _expanded(name: str, modules: dict[str, nn.Module]) -> tuple[str, ...]:
    if name not in modules or not name:
        raise CutError(
            f"Job.modules names {name!r}, which the model does not have",
            hint=did_you_mean(name, modules, _HINT),
        )
    module = modules[name]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # they have no forward to call
        return tuple(f for key, _ in module.named_children() for f in _expanded(f"{name}.{key}", modules))
    return (name,)

"""The optimizer of a rank: made for its parts of the parameters, and refused where parts change its numbers;
and what it keeps for each parameter, with its scratch while it steps, found by letting it step.

Parameters on the meta device have shapes and no data, so this is exact for any shape and takes no memory. If
the optimizer reads a number from a tensor, it gets 1. If its code needs data, small parameters with as many
dimensions are stepped on the CPU instead.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ir.errors import PlanError, of_type
from ..ir.graph import LOWER_PRECISION, OpGraph, Parameter, PartRows, UpdateBytes
from ..tracer.job_calls import make_optimizer
from ..tracer.random import one_thread_at_a_time
from ..tracer.tensors import LiveBytes, storage_bytes, tensors_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

LATE = 1000.0
"""A count of steps by which an optimizer that begins gently does what it does from then on."""

NO_ROWS: Mapping[str, PartRows] = MappingProxyType({})

SMALL = 4
"""Most entries of a dimension of a small parameter."""

Kind: TypeAlias = tuple[int, str, torch.Size, torch.dtype]
"""Optimizer, settings of the group, shape and dtype: parameters that are alike in these take equal bytes."""


def default_optimizer(accelerated: bool) -> MakeOptimizer:
    """What a job without an optimizer gets: AdamW with a learning rate of 1e-3. On accelerators it is the
    fused one, which needs no scratch.
    """
    return partial(torch.optim.AdamW, lr=1e-3, fused=accelerated or None)


def optimizers_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that hold the state: those that this one holds in its attributes, or itself.

    Raises: PlanError if there is none.
    """
    values = [leaf for value in getattr(optimizer, "__dict__", {}).values() for leaf in tree_leaves(value)]
    held = {id(v): v for v in values if isinstance(v, Optimizer) and v is not optimizer}
    inner = tuple(each for one in held.values() for each in optimizers_of(one))
    if inner or isinstance(optimizer, Optimizer):
        return inner or (optimizer,)
    raise PlanError(
        f"Job.optimizer returned {of_type(optimizer)}, which is no torch optimizer and holds none",
        hint="return a torch.optim.Optimizer, or what keeps the optimizers that it steps in its attributes",
    )


def make_checked(
    make: MakeOptimizer, params: Mapping[str, nn.Parameter], rows: Mapping[str, PartRows] = NO_ROWS
) -> Optimizer:
    """The optimizer of some parameters.

    rows: of those that are parts of one, by their names. The optimizer is made with one part of each, under
    the name of the whole; the other parts join the group that this one has got.
    Raises: PlanError with the optimizer's own words if it refuses them, or if it steps others, or one twice.
    """
    # A job's function puts parameters into groups by the names that the model has. So it is called once per
    # number of a part, and what it does with A is done with each part of A:
    #
    #     number      A in three parts     B whole
    #     2           A[2]                 B           A[2] joins the group of A[0]; B is known
    #     1           A[1]                 B           likewise
    #     0           A[0]                 B           the optimizer that is returned, made last
    #
    if not callable(make):
        raise PlanError(
            f"Job.optimizer is {of_type(make)}, which cannot be called",
            hint="give a function of parameters, as lambda parameters: torch.optim.AdamW(parameters)",
        )
    numbers = _numbers(params, rows)
    try:
        *others, optimizer = (
            make_optimizer(make, _with_parts(params, rows, numbers, number))
            for number in range(max(numbers.values(), default=0), -1, -1)
        )
    except Exception as error:  # the user's code
        raise _refusal(make, params, error) from None
    for other in reversed(others):
        _join_groups(optimizer, other, params)
    names = {id(p): name for name, p in params.items()}
    owner: dict[int, Optimizer] = {}
    for part in optimizers_of(optimizer):
        for param in (p for group in part.param_groups for p in group["params"]):
            if id(param) not in names:
                raise PlanError(
                    f"{type(part).__name__} steps a parameter of shape {list(param.shape)} that "
                    "Job.optimizer was not given",
                    hint="make it of the parameters that the function gets, which are copies of the model's",
                )
            if owner.setdefault(id(param), part) is not part:
                raise PlanError(
                    f"{type(part).__name__} and {type(owner[id(param)]).__name__} both step "
                    f"{names[id(param)]}",
                    hint="give each parameter to one optimizer",
                )
    if hooked := [n for n, p in params.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise PlanError(
            f"Job.optimizer puts a hook on {hooked[0]}, which would not run",
            hint="let the optimizer's step do that",
        )
    return optimizer


def refuse_groups_by_identity(make: MakeOptimizer, model: nn.Module) -> None:
    """A rank makes the optimizer of parameters that are not the model's own, and have no attributes.

    Raises: PlanError if it groups these otherwise than those of the model.
    """
    own = {name: param for name, param in model.named_parameters() if param.requires_grad}
    others = {name: stand_in(param.shape, param.dtype) for name, param in own.items()}
    for mine, theirs in zip_longest(_groups(make, own), _groups(make, others), fillvalue=frozenset[str]()):
        if mine != theirs:
            name = min(mine ^ theirs)
            raise PlanError(
                f"Job.optimizer puts {name} into another group if it is no parameter of the model itself: "
                "each rank has copies, which have other ids and no attributes",
                hint="name the function's argument named_parameters, and choose groups by the names",
            )


def _groups(make: MakeOptimizer, params: Mapping[str, nn.Parameter]) -> list[frozenset[str]]:
    """Names of the parameters of each group."""
    names = {id(param): name for name, param in params.items()}
    optimizers = optimizers_of(make_checked(make, params))
    groups = [group["params"] for each in optimizers for group in each.param_groups]
    return [frozenset(names[id(param)] for param in group) for group in groups]


def _numbers(params: Iterable[str], rows: Mapping[str, PartRows]) -> dict[str, int]:
    """Of the parts among some parameters, which of its whole each is."""
    seen: Counter[str] = Counter()
    numbers = {}
    for name in params:
        if name in rows:
            numbers[name] = seen[rows[name].whole]
            seen[rows[name].whole] += 1
    return numbers


def _with_parts(
    params: Mapping[str, nn.Parameter],
    rows: Mapping[str, PartRows],
    numbers: Mapping[str, int],
    number: int,
) -> dict[str, nn.Parameter]:
    """The parameters by the names that the model has, with the part of that number of each; with its last if
    there are fewer."""
    chosen: dict[str, nn.Parameter] = {}
    for name, param in params.items():
        whole = rows[name].whole if name in rows else name
        if whole not in chosen or numbers[name] <= number:
            chosen[whole] = param
    return chosen


def _join_groups(optimizer: Optimizer, other: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
    """Add to an optimizer's groups what another, made in the same way, has in the same places besides."""
    pairs = list(zip(optimizers_of(optimizer), optimizers_of(other), strict=True))
    for mine, theirs in pairs:
        known = {id(param) for group in mine.param_groups for param in group["params"]}
        for group, more in zip(mine.param_groups, theirs.param_groups, strict=True):
            added = [param for param in more["params"] if id(param) not in known]
            group["params"] += added
            mine.state.update((param, theirs.state[param]) for param in added if param in theirs.state)


def forget_stand_ins(optimizer: Optimizer) -> None:
    """Take parameters without data out of an optimizer, and leave its groups, and their lists, in place."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.is_meta:
                optimizer.state.pop(param, None)
        group["params"][:] = [param for param in group["params"] if not param.is_meta]


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A parameter without data."""
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def stand_ins(graph: OpGraph, master_weights: bool = False) -> dict[str, nn.Parameter]:
    """What a model trains, in its order, without data; or, of parameters of lower precision, masters."""

    def dtype(param: Parameter) -> torch.dtype:
        low = master_weights and param.dtype in LOWER_PRECISION
        return torch.float32 if low else getattr(torch, param.dtype)

    return {p.name: stand_in(p.shape, dtype(p)) for p in graph.parameters if p.trainable}


@one_thread_at_a_time  # it saves and restores the state of the default generator
def update_bytes(
    make: MakeOptimizer | None,
    params: Mapping[str, nn.Parameter],
    accelerated: bool,
    rows: Mapping[str, PartRows] = NO_ROWS,
) -> dict[str, UpdateBytes]:
    """What each parameter's update takes, on an accelerator or a CPU.

    params: all that the optimizer is made for, on the meta device.  rows: of those that are parts of one.
    Raises: PlanError with the optimizer's own words if it cannot step them; or if it updates a whole
        parameter otherwise than its rows, and is given parts.
    """
    make = make or default_optimizer(accelerated)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        optimizer = make_checked(make, params, rows)
        if rows:
            _refuse_parts_if_not_elementwise(make, params, rows)
        before = _own_numbers(optimizer)
        try:
            found = _by_kind(optimizer, params, accelerated)
        except Exception as first:  # its step needs data, or cannot be made at all
            try:
                found = _of_small(make, params, rows)
            except Exception as error:  # the user's code
                told = first if type(first) is type(error) else error
                raise _refusal(make, params, told) from None
    refuse_kept_beside(optimizer)
    for (kind, name), number in _own_numbers(optimizer).items():
        if number != before.get((kind, name), number):
            raise PlanError(
                f"{kind} changes the number in its attribute {name!r} as it steps",
                hint="it would not be saved: change rates by a scheduler, or keep it in a parameter group",
            )
    return found


def _own_numbers(optimizer: Optimizer) -> dict[tuple[str, str], float]:
    """In attributes of an optimizer and of those that it holds, by type and name."""
    parts = {id(each): each for each in (optimizer, *optimizers_of(optimizer))}.values()
    return {
        (type(each).__name__, name): value
        for each in parts
        for name, value in vars(each).items()
        if isinstance(value, int | float)
    }


def refuse_kept_beside(optimizer: Optimizer) -> None:
    """Raises: PlanError if an optimizer keeps data of parameters in an attribute, where nobody can tell whose
    it is (the list of a group may be there too), or state that is no parameter's; or if one that holds others
    has made state of its own."""
    parts = optimizers_of(optimizer)
    for each in parts:
        if odd := [key for key in each.state if not isinstance(key, Tensor)]:
            raise PlanError(
                f"{type(each).__name__} keeps state under {odd[0]!r}, which is no parameter",
                hint="it would not be saved: keep it in state[p] of a parameter p, or in a parameter group",
            )
    lists = {id(group["params"]) for part in parts for group in part.param_groups}
    for each in (optimizer, *parts):
        for name in vars(each).keys() - {"param_groups", "state", "defaults"}:
            leaves = tree_leaves(vars(each)[name], is_leaf=lambda value: id(value) in lists)
            if any(map(_is_of_parameters, leaves)):
                raise PlanError(
                    f"{type(each).__name__} keeps data of parameters in its attribute {name!r}",
                    hint="a rank has some parameters only: keep what belongs to a parameter p in state[p]",
                )
    held = {id(t) for part in parts for t in tensors_of([*part.state.values()])}
    if any(id(t) not in held for t in tensors_of([*getattr(optimizer, "state", {}).values()])):
        raise PlanError(
            f"{type(optimizer).__name__} keeps state of its own beside the optimizers that it holds",
            hint="it would not be saved: keep it in the state of one of these optimizers",
        )


def _is_of_parameters(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_meta)


def _by_kind(
    optimizer: Optimizer, params: Mapping[str, nn.Parameter], accelerated: bool
) -> dict[str, UpdateBytes]:
    """The same, from one step of one parameter of each kind: optimizers pass over those without gradients."""
    names = {id(p): name for name, p in params.items()}
    known: dict[Kind, UpdateBytes] = {}
    found = dict.fromkeys(params, UpdateBytes(state=0, step=0))
    for index, part in enumerate(optimizers_of(optimizer)):
        for group in part.param_groups:
            together, fused = _runs_together(part, group, accelerated), bool(group.get("fused"))
            runs_here = {"foreach": together, "fused": False} | ({"capturable": False} if accelerated else {})
            group.update({key: value for key, value in runs_here.items() if key in group})
            settings = repr({key: value for key, value in group.items() if key != "params"})
            for param in group["params"]:
                kind = (index, settings, param.shape, param.dtype)
                if kind not in known:
                    state, scratch = _step_one(optimizer, part, group, param)
                    known[kind] = UpdateBytes(state=state, step=0 if fused else scratch, together=together)
                found[names[id(param)]] = known[kind]
    return found


def _runs_together(optimizer: Optimizer, group: Mapping[str, Any], accelerated: bool) -> bool:
    """Whether a group's parameters are updated by `foreach`, as torch decides it."""
    asked = group.get("foreach")
    if asked is not None or "foreach" not in group or group.get("fused") or group.get("differentiable"):
        return bool(asked)
    modules = [sys.modules.get(kind.__module__) for kind in type(optimizer).__mro__]
    return accelerated and any(hasattr(module, "_default_to_fused_or_foreach") for module in modules)


def _step_one(
    optimizer: Optimizer, part: Optimizer, group: dict[str, Any], param: nn.Parameter
) -> tuple[int, int]:
    """Bytes of state of one parameter, and the most scratch of its update.

    A loop over parameters keeps temporaries of one while it computes the next: so a twin follows this one,
    unless they are updated together.
    """
    params, twin = group["params"], stand_in(param.shape, param.dtype)
    stepped = (param,) if group.get("foreach") else (param, twin)
    group["params"] = [*params, *stepped[1:]]
    for each in stepped:
        each.grad = torch.empty_like(each)
    with _NumbersAreOne():
        optimizer.step()
    most = 0
    for late in (False, True):
        for each in stepped:
            if late and isinstance(step := part.state.get(each, {}).get("step"), Tensor):
                step.fill_(LATE)
        with LiveBytes() as scratch, _NumbersAreOne():
            optimizer.step()
        most = max(most, scratch.peak_bytes)
    group["params"], param.grad = params, None
    return storage_bytes(tensors_of(part.state.get(param, {}))), most


def _of_small(
    make: MakeOptimizer, params: Mapping[str, nn.Parameter], rows: Mapping[str, PartRows]
) -> dict[str, UpdateBytes]:
    """The same by bytes of each parameter, from a step of small ones with data."""
    small = {
        name: nn.Parameter(torch.zeros([min(n, SMALL) for n in p.shape], dtype=p.dtype))
        for name, p in params.items()
    }
    optimizer = make_checked(make, small, rows)
    for each in small.values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    refuse_kept_beside(optimizer)
    states: dict[int, list[Tensor]] = {}
    for part in optimizers_of(optimizer):
        for param, state in part.state.items():
            states[id(param)] = tensors_of(state)
    found = {}
    for name, param in small.items():
        state = states.get(id(param), [])
        counters = sum(t.nbytes for t in state if t.numel() <= 1)
        scale = params[name].nbytes / max(param.nbytes, 1)
        kept = counters + round((sum(t.nbytes for t in state) - counters) * scale)
        found[name] = UpdateBytes(state=kept, step=max(params[name].nbytes, kept))
    return found


def _updates(
    make: MakeOptimizer,
    start: Mapping[str, Tensor],
    gradients: Iterable[Mapping[str, Tensor]],
    rows: Mapping[str, PartRows],
) -> dict[str, Tensor]:
    """What steps with these gradients add to parameters."""
    stepped = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = make_checked(make, stepped, rows)
    for gradient in gradients:
        for name, param in stepped.items():
            param.grad = gradient[name].clone()
        optimizer.step()
    return {name: param.detach() - start[name] for name, param in stepped.items()}


@one_thread_at_a_time
def refuse_coupled(
    make: MakeOptimizer,
    params: Mapping[str, nn.Parameter],
    mine: Collection[str],
    rows: Mapping[str, PartRows] = NO_ROWS,
) -> None:
    """Steps of small parameters are compared, between which only what other ranks have differs.

    mine: those that this rank steps.
    Raises: PlanError if it updates these otherwise then, as one that divides by the norm of all gradients.
    """
    optimizer = make_checked(make, params, rows)
    refuse_kept_beside(optimizer)
    changed = any(
        each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks or "step" in vars(each)
        for each in (*optimizers_of(optimizer), optimizer)
        if isinstance(each, Optimizer)
    )
    if type(optimizer).__module__.startswith(("torch.optim.", "pipeloom.")) and not changed:
        return
    draw = torch.Generator().manual_seed(0)
    shapes = {name: [min(n, SMALL) for n in param.shape] for name, param in params.items()}
    # Large enough to be clipped, and many in one direction, by which learning rates are found.
    drawn = [
        {n: 1e3 * torch.rand(shape, generator=draw, dtype=torch.float64) for n, shape in shapes.items()}
        for _ in range(8)
    ]
    pairs = zip(drawn, reversed(drawn), strict=True)
    # The others' size changes from step to step: of many the norms are nearly equal else.
    others = [
        {n: a[n] if n in mine else 10 ** (step % 2) * b[n] for n in shapes}
        for step, (a, b) in enumerate(pairs)
    ]

    def updates_in(dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """Of both ways; of fewer where the user's code fails, which need not step small ones."""
        found = []
        with torch.random.fork_rng(devices=[]), suppress(Exception):
            for way in (drawn, others):
                torch.manual_seed(0)
                start, *gradients = ({n: t.to(dtype) for n, t in one.items()} for one in way)
                found.append(_updates(make, start, gradients, rows))
        return found

    updates = updates_in(torch.float64)
    if len(updates) < 2 and len(updates := updates_in(torch.float32)) < 2:
        return
    for name in (n for n in params if n in mine):
        if not torch.allclose(updates[0][name], updates[1][name], rtol=1e-3, atol=1e-9, equal_nan=True):
            raise PlanError(
                f"{type(optimizer).__name__} updates {name} otherwise if other ranks have other weights or "
                "gradients, as one does that clips by the norm of all: a rank knows its own only",
                hint="let step() look at each parameter by itself; what clips by the norm of all ranks' "
                "gradients is clip_norm of Options, or optimizer.clip_norm of `pipeloom train`",
            )


def _refuse_parts_if_not_elementwise(
    make: MakeOptimizer, params: Mapping[str, nn.Parameter], rows: Mapping[str, PartRows]
) -> None:
    """Two steps of small parameters, whole and in parts, are compared."""
    draw = torch.Generator().manual_seed(0)
    shapes = {name: [min(n, SMALL) for n in param.shape] for name, param in params.items()}
    wholes: dict[str, list[str]] = {}
    for name in params:
        wholes.setdefault(rows[name].whole if name in rows else name, []).append(name)

    def in_parts() -> dict[str, Tensor]:
        return {n: torch.rand(shape, generator=draw, dtype=torch.float64) for n, shape in shapes.items()}

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[name]
            for name, parts in wholes.items()
        }

    start, gradient = in_parts(), in_parts()
    one = whole(_updates(make, start, [gradient] * 2, rows))
    other = _updates(make, whole(start), [whole(gradient)] * 2, NO_ROWS)
    for name in {each.whole for each in rows.values()} & one.keys():
        if not torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-9):
            raise PlanError(
                f"the optimizer of {name} does not update each of its rows by itself, so its words cannot be "
                "split",
                hint="leave it whole (--split-words off), or let AdamW have it",
            )


def _refusal(make: MakeOptimizer, params: Mapping[str, nn.Parameter], error: Exception) -> PlanError:
    """The words of an optimizer that refuses some parameters; those that it refuses alone, too, are named."""
    if isinstance(error, PlanError):
        return error
    refused = [name for name, param in params.items() if _refuses(make, name, param, type(error))]
    some = 0 < len(refused) < len(params)
    whom = f"{refused[0]} {list(params[refused[0]].shape)}" if some else f"{len(params)} parameters"
    more = f" (and {len(refused) - 1} more)" if some and len(refused) > 1 else ""
    advice = "let another optimizer have these: Job.optimizer may return an object that holds several"
    if not some:
        advice = (
            "step() is called without a closure, gradients are dense, and parameters of other ranks have no "
            "data when it is made; choose an optimizer for that"
        )
    return PlanError(f"Job.optimizer cannot train {whom}{more}: {type(error).__name__}: {error}", hint=advice)


def _refuses(make: MakeOptimizer, name: str, param: nn.Parameter, kind: type[Exception]) -> bool:
    alone = stand_in(param.shape, param.dtype)
    alone.grad = torch.empty_like(alone)
    try:
        optimizer = make_optimizer(make, {name: alone})
        with _NumbersAreOne():
            optimizer.step()
    except Exception as error:  # the user's code
        return type(error) is kind
    return False


class _NumbersAreOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A number that is read from a tensor without data is 1, and a truth value is False."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _one(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _one(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1

"""StageCost: what one stage takes on the device it is placed on. Made by a planner, read by the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .action import KINDS, Action, B, F, I, Kind, W
from .errors import ConfigError
from .operation import OPERATIONS
from .schedule import Pair
from .text import odd_figure

STATIC_KINDS = ("parameters", "gradients", "optimizer", "buffers", "batch")
"""Kinds of memory that a stage holds from the first action of a step to the last."""

MEMORY_KINDS = (*STATIC_KINDS, "residuals", "boundary", "transient")


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Costs of one stage for one micro-batch, on the device of its rank. Times in seconds, sizes in bytes.

    forward_s, backward_s, input_grad_s, weight_grad_s: the actions F, B, I, W.  step_s: the optimizer,
        once a step.  other_s: kind -> time of actions of kinds that a user registered.
    residual_bytes: read by B, or by I, whatever becomes of them in between.
    carried_bytes: kept from I until W.
    offloaded_bytes, recomputed_bytes: of `residual_bytes`, what OFFLOAD takes to the host and RELOAD brings
        back; what F drops and RECOMPUTE makes again.  offload_s, reload_s, recompute_s: these actions.
    keeps_inputs: the backward reads values that the stage received; if not, they go when F ends.
    static_bytes: by kind, see `STATIC_KINDS`; all copies and versions counted.
    transient_bytes: action kind (F, B, I, W, STEP, REDUCE) -> most scratch that lives only during the
        action, on top of all that is held before it and of the residuals and messages that it makes.
    tied_bytes: gradient bytes of each parameter that the stage shares with others, by name (REDUCE).
    for_owners: those of them that are summed for one owner only, see `ir.weight_policies`.
    pair_s: kinds -> time of a pair whose first action is this stage's, such as {"F&B": 2.5}.  pair_factor:
        of the sum of both times, where `pair_s` says nothing; below 1 they gain from running as one unit.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    step_s: float = 0.0
    other_s: Mapping[str, float] = field(default_factory=dict)
    residual_bytes: int = 0
    carried_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    offload_s: float = 0.0
    reload_s: float = 0.0
    recompute_s: float = 0.0
    keeps_inputs: bool = True
    static_bytes: Mapping[str, int] = field(default_factory=dict)
    transient_bytes: Mapping[str, int] = field(default_factory=dict)
    tied_bytes: Mapping[str, int] = field(default_factory=dict)
    for_owners: frozenset[str] = frozenset()
    pair_s: Mapping[str, float] = field(default_factory=dict)
    pair_factor: float = 1.0

    def __post_init__(self) -> None:
        if unknown := sorted(self.static_bytes.keys() - set(STATIC_KINDS)):
            raise ConfigError(
                f"stage cost has static bytes of kind {unknown[0]!r}",
                hint=f"the kinds are {', '.join(STATIC_KINDS)}",
            )
        if (odd := odd_figure(vars(self))) is not None:
            raise ConfigError(
                f"stage cost has {odd[0]} = {odd[1]}", hint="times and sizes are at least 0, and below 1e30"
            )
        if (away := self.offloaded_bytes + self.recomputed_bytes) > self.residual_bytes:
            raise ConfigError(
                f"stage cost offloads and recomputes {away} bytes of {self.residual_bytes}",
                hint="offloaded_bytes and recomputed_bytes are part of residual_bytes",
            )

    def seconds(self, kind: Kind) -> float:
        """How long an action takes; 0 for a kind that has no field and that `other_s` does not name.

        >>> StageCost(forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0).seconds(Kind("B"))
        2.0
        """
        row = KINDS.get(kind)
        own = getattr(self, row.seconds) if row is not None and row.seconds else self.other_s.get(kind, 0.0)
        return float(own)

    def residual_changes(self, kind: Kind) -> tuple[int, int]:
        """Bytes of residuals that come to the device when an action begins, and that leave it when it ends.

        Only of kinds that the table says it of.

        >>> from dataclasses import replace
        >>> cost = replace(equal_costs(1, residual_bytes=8)[0], offloaded_bytes=8)
        >>> cost.residual_changes(Kind("OFFLOAD"))
        (0, 8)
        """
        row = KINDS.get(kind)
        if row is None:
            return 0, 0
        comes, goes = (getattr(self, name) if name else 0 for name in (row.takes, row.frees))
        return comes, goes

    def held_change(self, kind: Kind) -> int:
        """Bytes of residuals that are there in addition, or below 0 no more, once F, B, I or W has run; what
        is copied or made again in between is not counted.

        >>> from dataclasses import replace
        >>> cost = replace(equal_costs(1, residual_bytes=8)[0], carried_bytes=3)
        >>> [cost.held_change(kind) for kind in (F, B, I, W)]
        [8, -8, -5, -3]
        """
        held, carried = self.residual_bytes, self.carried_bytes
        return {F: held, B: -held, I: carried - held, W: -carried}.get(kind, 0)


def action_seconds(costs: Sequence[StageCost], action: Action) -> float:
    """How long an action takes by itself; a declared operation as long as declared, unless `other_s` says
    otherwise."""
    cost = costs[action.stage]
    operation = OPERATIONS.get(action.kind)
    if operation is not None and action.kind not in cost.other_s:
        return operation.seconds_of(action.stage) + operation.share * cost.seconds(operation.anchor)
    return cost.seconds(action.kind)


def pair_seconds(costs: Sequence[StageCost], pair: Pair) -> float:
    """How long a pair takes.

    >>> cost = StageCost(forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0, pair_factor=0.9)
    >>> pair_seconds([cost], (Action(0, Kind("F"), 1), Action(0, Kind("B"), 0)))
    2.7
    """
    first, second = pair
    cost = costs[first.stage]
    both = cost.pair_factor * (action_seconds(costs, first) + action_seconds(costs, second))
    return cost.pair_s.get(f"{first.kind}&{second.kind}", both)


def pair_shares(costs: Sequence[StageCost], pairs: Iterable[Pair]) -> dict[Action, float]:
    """Each member of a pair -> its part of the pair's time, in proportion to what it takes by itself."""
    shares: dict[Action, float] = {}
    for pair in pairs:
        whole = pair_seconds(costs, pair)
        alone = [action_seconds(costs, action) for action in pair]
        for action, own in zip(pair, alone, strict=True):
            shares[action] = whole * own / sum(alone) if sum(alone) else whole / 2
    return shares


def equal_costs(
    stages: int,
    *,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
    residual_bytes: int = 0,
) -> tuple[StageCost, ...]:
    """The same costs for every stage, with B as long as I and W together: enough to compare schedules.

    >>> [cost.backward_s for cost in equal_costs(2)]
    [2.0, 2.0]
    """
    cost = StageCost(
        forward_s=forward_s,
        backward_s=input_grad_s + weight_grad_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        residual_bytes=residual_bytes,
    )
    return (cost,) * stages

"""When pairs and a user's operations run: the times that one clock per rank does not give."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.action import Action, Kind
from ..ir.added_rules import met
from ..ir.costs import StageCost, action_seconds, pair_shares
from ..ir.flow import Flow
from ..ir.operation import ANCHORS, OPERATIONS
from ..ir.schedule import Program


class Added:
    """Places actions in time. Operations on the streams "send" and "host" run beside the rank's computing,
    one at a time on each; what they precede waits for them, and so does the end of the row."""

    def __init__(self, program: Program, costs: Sequence[StageCost], flow: Flow) -> None:
        self._costs = costs
        self._flow = flow
        self._shares = pair_shares(costs, program.pairs)
        self._free: dict[tuple[int, str], float] = {}
        self._awaited: dict[tuple[int, Kind, int], float] = {}
        self._at: dict[Action, float] = {}

    def seconds(self, action: Action) -> float:
        """How long an action takes, as a part of its pair if it has one."""
        share = self._shares.get(action)
        return action_seconds(self._costs, action) if share is None else share

    def meets(self, clock: float, action: Action) -> Sequence[Action]:
        """Note that a rank has come to an action; return the actions that it must wait for."""
        others = met(action, OPERATIONS, self._flow)
        if others:
            self._at[action] = clock
        return others

    def place(self, rank: int, clock: float, action: Action) -> tuple[str, float, float]:
        """The stream, start and end of an action that its rank has come to, and all that it meets too."""
        operation = OPERATIONS.get(action.kind)
        start = max([clock, *(self._at[other] for other in met(action, OPERATIONS, self._flow))])
        if operation is None:
            key = (action.stage, action.kind, action.microbatch)
            start = max(start, self._awaited.pop(key, start))
            return "compute", start, start + self.seconds(action)
        if operation.stream != "compute":
            start = max(start, self._free.get((rank, operation.stream), start))
        end = start + self.seconds(action)
        if operation.stream != "compute":
            self._free[rank, operation.stream] = end
        if operation.before is not None:
            for kind in ANCHORS[operation.before]:
                key = (action.stage, kind, action.microbatch)
                self._awaited[key] = max(end, self._awaited.get(key, end))
        return operation.stream, start, end

    def all_done(self, rank: int, clock: float) -> float:
        """When everything that runs beside a rank's computing is over."""
        return max([clock, *(end for (home, _), end in self._free.items() if home == rank)])

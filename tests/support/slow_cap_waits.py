"""The slow simulator with caps: each rank decides, when it comes to an action, what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from slow_simulator import Slow

from pipeloom.ir.action import Action, Kind, Transfer

WAITING = ("F", "B", "I", "W", "RECOMPUTE", "RELOAD")


@dataclass
class SlowRoom(Slow):
    """caps: bytes by rank.  awaited: (rank, place in its row) -> the OFFLOAD that it waits for, if any."""

    caps: Sequence[int] = ()
    awaited: dict[tuple[int, int], Action | None] = field(default_factory=dict)

    def rank(self, rank: int) -> bool:
        at = self.at[rank]
        if at < len(self.program.rows[rank]) and self.clock[rank] <= self.now:
            if (rank, at) not in self.awaited:
                self.awaited[rank, at] = self.choose(rank, at)
            away = self.awaited[rank, at]
            if away is not None and not self.is_away(away):
                return False
        return super().rank(rank)

    def is_away(self, away: Action) -> bool:
        return self.done.get(("d2h", str(away)), (0.0, inf))[1] <= self.now

    def choose(self, rank: int, at: int) -> Action | None:
        step = self.program.rows[rank][at]
        if not isinstance(step, Action) or step.kind not in WAITING:
            return None
        begun = [a for a in self.program.rows[rank][:at] if isinstance(a, Action) and a.kind == "OFFLOAD"]
        going = [a for a in begun if not self.is_away(a)]
        last = None
        for number in range(len(going) + 1):
            assumed = set(going[:number])
            if self.held(rank, at, assumed) + self.need(rank, step, assumed) <= self.caps[rank]:
                break
            last = going[number] if number < len(going) else last
        return last

    def again(self, rank: int, action: Action) -> bool:
        return replace(action, kind=Kind("RECOMPUTE")) in self.program.rows[rank]

    def split(self, rank: int, action: Action) -> bool:
        return replace(action, kind=Kind("I")) in self.program.rows[rank]

    def outgoing(self, stage: int) -> tuple[int, int]:
        """Values for later stages, and gradients for earlier ones."""
        s = self.stages
        return (
            sum(v.bytes for to in s.successors[stage] for v in s.between[stage, to]),
            sum(v.bytes for of in s.predecessors[stage] for v in s.gradients(of, stage)),
        )

    def incoming(self, stage: int) -> int:
        """What its backward frees: values that it read, and gradients."""
        s = self.stages
        return sum(v.bytes for of in s.predecessors[stage] for v in s.between[of, stage]) + sum(
            v.bytes for to in s.successors[stage] for v in s.gradients(stage, to)
        )

    def gone(self, rank: int, offload: Action, assumed: set[Action]) -> bool:
        return offload in self.program.rows[rank] and (offload in assumed or self.is_away(offload))

    def need(self, rank: int, step: Action, assumed: set[Action]) -> int:
        cost = self.costs[step.stage]
        values, gradients = self.outgoing(step.stage)
        own = {
            "F": cost.residual_bytes - cost.recomputed_bytes * self.again(rank, step) + values,
            "B": gradients,
            "I": gradients,
            "RECOMPUTE": cost.recomputed_bytes,
            "RELOAD": cost.offloaded_bytes * self.gone(rank, replace(step, kind=Kind("OFFLOAD")), assumed),
        }
        return own.get(step.kind, 0) + cost.transient_bytes.get(step.kind, 0)

    def held(self, rank: int, at: int, assumed: set[Action]) -> int:
        """What a rank holds when it comes to a place of its row, if some OFFLOADs have ended by then."""
        row, placement = self.program.rows[rank], self.program.placement
        own = [cost for cost, home in zip(self.costs, placement, strict=True) if home == rank]
        total = sum(sum(cost.static_bytes.values()) for cost in own)
        for step in row[:at]:
            if not isinstance(step, Action):
                continue
            cost, (_, gradients) = self.costs[step.stage], self.outgoing(step.stage)
            split, freed = self.split(rank, step), self.incoming(step.stage)
            if step.kind == "F":
                total += self.need(rank, step, assumed) - cost.transient_bytes.get("F", 0)
            elif step.kind == "RECOMPUTE":
                total += cost.recomputed_bytes
            elif step.kind == "OFFLOAD" and self.gone(rank, step, assumed):
                total -= cost.offloaded_bytes
            elif step.kind == "RELOAD":
                total += cost.offloaded_bytes * self.gone(rank, replace(step, kind=Kind("OFFLOAD")), assumed)
            elif step.kind == "B":
                total += gradients - cost.residual_bytes - freed
            elif step.kind == "I":
                total += gradients + cost.carried_bytes - cost.residual_bytes
            elif step.kind == "W":
                total -= cost.carried_bytes + freed
            assert split or step.kind not in ("I", "W")
        for (source, target), sends in self.program.messages.items():
            for send in sends:
                assert isinstance(send, Transfer)
                through = self.done.get(("send", str(send)), (0.0, inf))[1] <= self.now
                if source == rank and through:
                    total -= self.bytes(send)
                if target == rank and self.posted.get(str(send), inf) <= self.now:
                    total += self.bytes(send)
        return total

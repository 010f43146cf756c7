"""What a stage holds while residuals are made again inside its backward, by keeping a set of tensors alive.

A plain reference for planner/stage_cost/recompute_liveness.py, from the graph and the profile alone: it
lists what happens in the backward one by one, and looks for each tensor at what still reads it. Gradients
are left out: the level of a choice is that of the gradients, which no choice changes, and of the tensors
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.planner.stage_cost.model import CostModel


@dataclass(frozen=True)
class Step:
    """One thing that happens. kind: "again" (an op of the forward) or "backward".  at: of which op's backward
    it is a part."""

    kind: str
    op: str
    at: int


class SlowStage:
    """Ops 0 .. end of a model whose values are no views, with residuals dropped by name."""

    def __init__(self, model: CostModel, end: int, dropped: frozenset[str]) -> None:
        self.ops = model.readers.ops[:end]
        self.costs = model.profile.costs
        self.size = {v.name: v.bytes for op in self.ops for v in op.outputs}
        self.maker = {v.name: op.name for op in self.ops for v in op.outputs}
        self.op = {op.name: op for op in self.ops}
        self.saved = {op.name: [v for v in self.costs[op.name].saves if v in self.maker] for op in self.ops}
        self.residuals = {v for saved in self.saved.values() for v in saved}
        self.dropped = dropped & self.residuals
        self.sent = {v for op in model.readers.ops[end:] for v in op.inputs if v in self.maker}
        self.steps = self._steps()

    def _steps(self) -> list[Step]:
        """The backward in its order, with each op that runs again in front of the first that needs it."""
        order = {op.name: place for place, op in enumerate(self.ops)}
        steps: list[Step] = []
        done: set[str] = set()
        for place in reversed(range(len(self.ops))):
            name = self.ops[place].name
            needed: set[str] = set()
            pending = [v for v in self.saved[name] if v in self.dropped]
            while pending:
                maker = self.maker[pending.pop()]
                if maker not in needed and maker not in done:
                    needed.add(maker)
                    inputs = [v for v in self.op[maker].inputs if v in self.maker]
                    pending += [v for v in inputs if v not in self.residuals or v in self.dropped]
            done |= needed
            steps += [Step("again", op, place) for op in sorted(needed, key=order.__getitem__)]
            steps.append(Step("backward", name, place))
        return steps

    def _reads(self, step: Step) -> set[str]:
        if step.kind == "backward":
            return set(self.saved[step.op])
        return {v for v in self.op[step.op].inputs if v in self.maker}

    def backward(self) -> list[tuple[Step, float, float]]:
        """Bytes of tensors, without those of gradients, in each step and after it."""
        last = {value: index for index, step in enumerate(self.steps) for value in self._reads(step)}
        alive = set(self.residuals - self.dropped)
        extra = {op.name: self.costs[op.name].extra_saved_bytes for op in self.ops}
        found: list[tuple[Step, float, float]] = []
        for index, step in enumerate(self.steps):
            held = sum(extra.values())
            if step.kind == "again":
                made = {v.name for v in self.op[step.op].outputs}
                besides = self.costs[step.op].transient_bytes + self.costs[step.op].extra_saved_bytes
                twice = sum(self.size[v] for v in made & alive)  # those that were kept are made once more
                alive |= made
                here = held + twice + besides + self._bytes(alive)
            else:
                here = held + self._bytes(alive)
                held -= extra.pop(step.op)
            alive = {v for v in alive if last.get(v, -1) > index}
            found.append((step, here, held + self._bytes(alive)))
        return found

    def stays(self, place: int) -> bool:
        """Whether what the backward of an op lets go of early is read again later."""
        value = self.costs[self.ops[place].name].lets_go
        return any(value in self._reads(step) for step in self.steps[self._backward_at(place) + 1 :])

    def _backward_at(self, place: int) -> int:
        return self.steps.index(Step("backward", self.ops[place].name, place))

    def forward(self) -> list[float]:
        """Bytes of tensors in each op; what is sent stays to the end."""
        last = {v: place for place, op in enumerate(self.ops) for v in op.inputs}
        held, alive, found = 0.0, set[str](), []
        for place, op in enumerate(self.ops):
            alive |= {v.name for v in op.outputs}
            held += self.costs[op.name].extra_saved_bytes
            found.append(held + self.costs[op.name].transient_bytes + self._bytes(alive))
            kept = (self.residuals - self.dropped) | self.sent
            alive = {v for v in alive if v in kept or last.get(v, place) > place}
        return found

    def _bytes(self, values: set[str]) -> float:
        return float(sum(self.size[v] for v in values))

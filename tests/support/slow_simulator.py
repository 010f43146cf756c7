"""The simulator once more, slow and plain: one clock for all ranks, which goes from event to event.

Shares nothing with `pipeloom.simulator`. Times are exact to the bit where no two requests for one shared
resource come at the same time, as with random times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeloom.ir.action import Action, Transfer
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.costs import StageCost
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph

COPIES = {"OFFLOAD": "d2h", "RELOAD": "h2d"}


@dataclass
class Slow:
    """Runs a program without tied parameters, registered operations or stages on several ranks.

    done: (stream, action) -> start and end; of messages by the SEND's text on stream "send".
    """

    program: Program
    stages: StageGraph
    costs: Sequence[StageCost]
    cluster: Cluster
    ahead: int
    done: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = len(self.program.rows)
        self.now = 0.0
        self.at, self.clock = [0] * ranks, [0.0] * ranks
        self.agenda = {0.0}
        self.sent: dict[str, float] = {}
        self.posted: dict[str, float] = {}
        self.received: dict[tuple[int, int], int] = defaultdict(int)
        self.moved: dict[tuple[int, int], int] = defaultdict(int)
        self.free: dict[object, float] = defaultdict(float)
        self.issued: dict[tuple[int, str], list[Action]] = defaultdict(list)
        self.begun: dict[tuple[int, str], int] = defaultdict(int)

    def run(self) -> dict[tuple[str, str], tuple[float, float]]:
        for pair in self.program.messages:
            self.post(pair, self.ahead)
        while self.agenda:
            self.now = min(self.agenda)
            self.agenda.discard(self.now)
            while any(
                [*map(self.rank, range(len(self.at))), *map(self.pipe, self.program.messages), self.copies()]
            ):
                pass
        assert all(at == len(row) for at, row in zip(self.at, self.program.rows, strict=True)), "stuck"
        return self.done

    def take(self, key: tuple[str, str], start: float, seconds: float) -> float:
        end = start + seconds
        self.done[key] = start, end
        self.agenda.add(end)
        return end

    def rank(self, rank: int) -> bool:
        """One more step of a rank, if it may take it now."""
        row = self.program.rows[rank]
        if self.at[rank] == len(row) or self.clock[rank] > self.now:
            return False
        step = row[self.at[rank]]
        if isinstance(step, Transfer):
            if not (self.send(rank, step) if step.sends else self.receive(rank, step)):
                return False
        elif isinstance(step, Action) and step.kind in COPIES:
            self.issued[rank, COPIES[step.kind]].append(step)
        elif not self.compute(rank, step):
            return False
        self.at[rank] += 1
        return True

    def send(self, rank: int, step: Transfer) -> bool:
        self.sent[str(step)] = self.now
        link = self.cluster.link(rank, self.program.placement[step.peer])
        self.spend(rank, link.occupied_s(self.bytes(step)))
        return True

    def spend(self, rank: int, seconds: float) -> None:
        self.clock[rank] = self.now + seconds
        self.agenda.add(self.clock[rank])

    def receive(self, rank: int, step: Transfer) -> bool:
        pair = self.program.placement[step.peer], rank
        sends = [str(send) for send in self.program.messages[pair]]
        place = sends.index(str(step.other_end))
        self.post(pair, place + 1)
        arrived = self.done.get(("send", sends[place]))
        if arrived is None or arrived[1] > self.now:
            return False
        self.spend(rank, self.cluster.link(*pair).occupied_s(self.bytes(step.other_end)))
        # What this makes room for is posted once the message is taken.
        self.received[pair] += 1
        self.post(pair, self.received[pair] + self.ahead, self.clock[rank])
        return True

    def post(self, pair: tuple[int, int], count: int, at: float | None = None) -> None:
        for send in self.program.messages[pair][:count]:
            self.posted.setdefault(str(send), self.now if at is None else at)

    def compute(self, rank: int, step: object) -> bool:
        cost = self.costs[step.stage]  # type: ignore[attr-defined]
        if not isinstance(step, Action):  # STEP
            waiting = [
                (r, s) for r, s in self.issued if r == rank and self.begun[r, s] < len(self.issued[r, s])
            ]
            if waiting or any(self.free[rank, stream] > self.now for stream in COPIES.values()):
                return False
            self.clock[rank] = self.take(("compute", str(step)), self.now, cost.step_s)
            return True
        reload = Action(step.stage, "RELOAD", step.microbatch)  # type: ignore[arg-type]
        if step.kind in ("B", "I", "RECOMPUTE") and reload in self.program.rows[rank]:
            if self.done.get(("h2d", str(reload)), (0.0, float("inf")))[1] > self.now:
                return False
        self.clock[rank] = self.take(("compute", str(step)), self.now, cost.seconds(step.kind))
        return True

    def bytes(self, send: Transfer) -> int:
        if send.kind == "SEND_F":
            return sum(v.bytes for v in self.stages.between[send.stage, send.peer])
        return sum(v.bytes for v in self.stages.gradients(send.peer, send.stage))

    def pipe(self, pair: tuple[int, int]) -> bool:
        """Move the next message from one rank to another, if it may move now."""
        sends = self.program.messages[pair]
        if self.moved[pair] == len(sends) or self.free[pair] > self.now:
            return False
        send = sends[self.moved[pair]]
        assert isinstance(send, Transfer)
        ready = max(self.sent.get(str(send), float("inf")), self.posted.get(str(send), float("inf")))
        if ready > self.now:
            self.agenda |= {ready} - {float("inf")}
            return False
        seconds = self.cluster.link(*pair).transfer_s(self.bytes(send))
        self.free[pair] = self.take(("send", str(send)), self.now, seconds)
        self.moved[pair] += 1
        return True

    def copies(self) -> bool:
        """Begin the next copy of each rank and direction, if it may begin now."""
        some = False
        for (rank, stream), queue in list(self.issued.items()):
            begun = self.begun[rank, stream]
            if begun == len(queue) or self.free[rank, stream] > self.now:
                continue
            step = queue[begun]
            away = Action(step.stage, "OFFLOAD", step.microbatch)  # type: ignore[arg-type]
            if stream == "h2d" and self.done.get(("d2h", str(away)), (0.0, float("inf")))[1] > self.now:
                continue
            seconds = self.costs[step.stage].seconds(step.kind)
            self.free[rank, stream] = self.take((stream, str(step)), self.now, seconds)
            self.begun[rank, stream] += 1
            some = True
        return some

"""The simulator once more, slow and plain: one clock for all ranks, which goes from event to event.

Shares nothing with `pipeloom.simulator`. Times are exact to the bit where no two requests for one shared
resource come at the same time, as with random times.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pipeloom.ir.action import Action
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph

COPIES = {"OFFLOAD": "d2h", "RELOAD": "h2d"}


@dataclass
class Slow:
    """Runs a program without registered operations or stages on several ranks.

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
        self.moved: dict[object, int] = defaultdict(int)
        self.free: dict[object, float] = defaultdict(float)
        self.issued: dict[tuple[int, str], list[Action]] = defaultdict(list)
        self.begun: dict[object, int] = defaultdict(int)
        shared: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, readers in self.stages.tied.items():
            shared[tuple(sorted({self.program.placement[s] for s in readers}))].append(name)
        self.sums = {ranks: self.sum_of(ranks, shared[ranks]) for ranks in sorted(shared)}
        self.came: dict[tuple[int, ...], set[int]] = {ranks: set() for ranks in self.sums}

    def run(self) -> dict[tuple[str, str], tuple[float, float]]:
        for pair in self.program.messages:
            self.post_ahead(pair)
        while self.agenda:
            self.now = min(self.agenda)
            self.agenda.discard(self.now)
            while any([self.rank(rank) for rank in range(len(self.at))]) or self.grant():
                pass
        assert all(at == len(row) for at, row in zip(self.at, self.program.rows, strict=True)), "stuck"
        return {key: times for key, times in self.done.items() if key[0] != "sum"}

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
        if step.is_transfer:
            if not (self.send(rank, step) if step.sends else self.receive(rank, step)):
                return False
        elif step.kind in COPIES:
            self.issued[rank, COPIES[step.kind]].append(step)
        elif not self.compute(rank, step):
            return False
        self.at[rank] += 1
        return True

    def send(self, rank: int, step: Action) -> bool:
        self.sent[str(step)] = self.now
        link = self.cluster.link(rank, self.program.placement[step.peer])
        self.spend(rank, link.occupied_s(self.bytes(step)))
        return True

    def spend(self, rank: int, seconds: float) -> None:
        self.clock[rank] = self.now + seconds
        self.agenda.add(self.clock[rank])

    def receive(self, rank: int, step: Action) -> bool:
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
        self.post_ahead(pair, self.clock[rank])
        return True

    def post_ahead(self, pair: tuple[int, int], at: float | None = None) -> None:
        """Post what the receiver comes to next, and what is sent in front of it."""
        sends = [str(send) for send in self.program.messages[pair]]
        receives = [step for step in self.program.rows[pair[1]] if step.is_transfer and not step.sends]
        of_pair = [str(step.other_end) for step in receives if self.program.placement[step.peer] == pair[0]]
        following = of_pair[: self.received[pair] + self.ahead]
        self.post(pair, max((sends.index(send) + 1 for send in following), default=0), at)

    def post(self, pair: tuple[int, int], count: int, at: float | None = None) -> None:
        for send in self.program.messages[pair][:count]:
            self.posted.setdefault(str(send), self.now if at is None else at)

    def compute(self, rank: int, step: object) -> bool:
        cost = self.costs[step.stage]  # type: ignore[attr-defined]
        if step.is_stage_wide:
            waiting = [
                (r, s) for r, s in self.issued if r == rank and self.begun[r, s] < len(self.issued[r, s])
            ]
            if waiting or any(self.free[rank, stream] > self.now for stream in COPIES.values()):
                return False
            if step.kind == "REDUCE":  # type: ignore[attr-defined]
                return self.reduce(rank)
            self.clock[rank] = self.take(("compute", str(step)), self.now, cost.step_s)
            return True
        reload = Action(step.stage, "RELOAD", step.microbatch)  # type: ignore[arg-type]
        if step.kind in ("B", "I", "RECOMPUTE") and reload in self.program.rows[rank]:
            if self.done.get(("h2d", str(reload)), (0.0, inf))[1] > self.now:
                return False
        self.clock[rank] = self.take(("compute", str(step)), self.now, cost.seconds(step.kind))
        return True

    def reduce(self, rank: int) -> bool:
        """Come to the sums of a rank all at once; they go on one after the other."""
        end = 0.0
        for ranks in self.sums:
            if rank in ranks:
                self.came[ranks].add(rank)
        for ranks, (seconds, _) in self.sums.items():
            if rank in ranks:
                start, _ = self.done.get(("sum", str(ranks)), (inf, inf))
                end = max(end, start) + seconds
        if self.now < end < inf:
            self.agenda.add(end)
        return end <= self.now

    def sum_of(self, ranks: tuple[int, ...], names: list[str]) -> tuple[float, dict[object, float]]:
        """Its seconds with nothing else on its way, and seconds that it takes of shared links."""
        size = sum(max(self.costs[s].tied_bytes.get(n, 0) for s in self.stages.tied[n]) for n in names)
        seconds, links = 0.0, dict[object, float]()
        if len(ranks) == 1:
            return 0.0, links
        piece, times = -(-size // len(ranks)), 2 * (len(ranks) - 1)
        for a, b in [(a, ranks[(i + 1) % len(ranks)]) for i, a in enumerate(ranks)]:
            alone, node = self.cluster.link(a, b).transfer_s(piece), self.node_link(a, b)
            if node is not None:
                alone = max(alone, node.transfer_s(piece))
                ends = [self.cluster.devices[rank].node for rank in (a, b)]
                for link in (("out of", ends[0]), ("into", ends[1])):
                    links[link] = links.get(link, 0.0) + times * piece / node.bandwidth_bytes_per_s
            seconds = max(seconds, times * alone)
        return max([seconds, *links.values()]), links

    def node_link(self, a: int, b: int) -> Link | None:
        """What messages between two ranks share with others."""
        one, other = (self.cluster.devices[rank] for rank in (a, b))
        grouped = one.group is not None and one.group == other.group
        return None if grouped or one.node == other.node else self.cluster.node_link

    def bytes(self, send: Action) -> int:
        if send.kind == "SEND_F":
            return sum(v.bytes for v in self.stages.between[send.stage, send.peer])
        return sum(v.bytes for v in self.stages.gradients(send.peer, send.stage))

    def grant(self) -> bool:
        """Of all messages and copies that could move now, let the one first in the rows have its links."""
        asking = [*self.messages(), *self.copies(), *self.summed()]
        if not asking:
            return False
        _, _, stream, step, own, seconds, links = min(asking, key=lambda a: a[:2])
        begin = max([self.now, *(self.free[link] for link, _ in links)])
        for link, slot in links:
            self.free[link] = begin + slot
        self.free[own] = self.take((stream, str(step)), begin, seconds)
        if stream == "send":
            self.moved[own] += 1
        else:
            self.begun[own] += 1
        return True

    def messages(self) -> Iterator[Any]:
        """Those that could move now: rank, place in its row, stream, step, its own link, seconds, and the
        shared links with the seconds that it takes of each."""
        for pair, sends in self.program.messages.items():
            if self.moved[pair] == len(sends) or self.free[pair] > self.now:
                continue
            send = sends[self.moved[pair]]
            ready = max(self.sent.get(str(send), inf), self.posted.get(str(send), inf))
            if ready > self.now:
                self.agenda |= {ready} - {inf}
                continue
            size, node = self.bytes(send), self.node_link(*pair)
            seconds, links = self.cluster.link(*pair).transfer_s(size), []
            ends = [self.cluster.devices[rank] for rank in pair]
            if node is not None:
                seconds = max(seconds, node.transfer_s(size))
                slot = size / node.bandwidth_bytes_per_s
                links = [(("out of", ends[0].node), slot), (("into", ends[1].node), slot)]
            row = self.program.rows[pair[0]]
            yield pair[0], row.index(send), "send", send, pair, seconds, links

    def summed(self) -> Iterator[Any]:
        """The same for sums that all their ranks have come to; behind all that asks at the same time."""
        for place, (ranks, (seconds, links)) in enumerate(self.sums.items()):
            if self.came[ranks] == set(ranks) and ("sum", str(ranks)) not in self.done:
                yield inf, place, "sum", ranks, ("sum", ranks), seconds, list(links.items())

    def copies(self) -> Iterator[Any]:
        """The same for copies."""
        for own, queue in self.issued.items():
            rank, stream = own
            if self.begun[own] == len(queue) or self.free[own] > self.now:
                continue
            step = queue[self.begun[own]]
            away = Action(step.stage, "OFFLOAD", step.microbatch)  # type: ignore[arg-type]
            if stream == "h2d" and self.done.get(("d2h", str(away)), (0.0, inf))[1] > self.now:
                continue
            cost, switch = self.costs[step.stage], self.cluster.devices[rank].switch
            seconds, links = cost.seconds(step.kind), []
            if switch is not None:  # a copy of nothing takes its turn too
                uplink = self.cluster.switches[switch]
                if cost.offloaded_bytes:
                    seconds = max(seconds, uplink.transfer_s(cost.offloaded_bytes))
                links = [((switch, stream), cost.offloaded_bytes / uplink.bandwidth_bytes_per_s)]
            yield rank, self.program.rows[rank].index(step), stream, step, own, seconds, links

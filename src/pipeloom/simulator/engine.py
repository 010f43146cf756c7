"""The discrete-event engine: every rank walks its row with a clock of its own.

Messages from one rank to another move in the order of the sender's row, so when one moves is known as soon
as its send and its receive are. No global queue of events is needed: time grows linearly with the program.
"""

from __future__ import annotations

from ..ir.action import REDUCE, Action, Instruction, StageAction, Transfer
from ..ir.board import Board, Process
from ..ir.check import check_program
from ..ir.cluster import Cluster
from ..ir.costs import StageCost
from ..ir.errors import PlanError
from ..ir.flow import flow_of
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.ties import Reduction, reductions
from ..ir.timeline import Event, Timeline
from .added import Added
from .memory import Memory
from .pipe import Pipe


def simulate(
    program: Program, stages: StageGraph, costs: tuple[StageCost, ...], cluster: Cluster,
    *, receive_ahead: int = 2,
) -> Timeline:  # fmt: skip
    """Predict one step.

    program: as `lower` makes it, or one that `check_program` accepts.
    costs: for each stage, on the device of its rank (see `StageCost.slowed`).
    receive_ahead: receives that a rank keeps posted for each rank that sends to it, each with a buffer.

    A send occupies its rank for `Link.occupied_s`, with no event. The message moves when it is sent, its
    receive is posted and the link of that pair of ranks is free, and takes `Link.transfer_s`. Events: compute
    actions and STEP on stream "compute"; each message on "send" of its sender; time that a rank waits for
    one, where there is any, and REDUCE with its waits on "recv".

    Raises: PlanError if an argument does not fit the program; DeadlockError if the program blocks.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> from pipeloom.ir.costs import equal_costs
    >>> from pipeloom.ir.schedule import parse_program
    >>> from pipeloom.ir.stages import chain
    >>> rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0")
    >>> program = parse_program(1, (0, 1), rows)
    >>> device = Device(name="any", memory_bytes=1)
    >>> link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.5)  # 4 bytes take 0.5 s
    >>> cluster = Cluster(devices=(device, device), within_node=link)
    >>> round(simulate(program, chain(2), equal_costs(2), cluster).step_s, 6)
    7.0
    """
    _refuse_mismatch(program, stages, costs, cluster)
    if receive_ahead < 1:
        raise PlanError(f"{receive_ahead} receives posted ahead", hint="post at least 1")
    run = _Run(program, stages, costs, cluster, receive_ahead)
    if run.board.run([run.rank(rank) for rank in range(len(program.rows))]):
        check_program(program, stages)
        raise AssertionError("the simulator is stuck on a program that the checks let pass")
    events = tuple(sorted(run.events, key=lambda event: event.start_s))
    memory, peaks = run.memory.result()
    return Timeline(source="predicted", ranks=len(program.rows), events=events, memory=memory, peaks=peaks)


class _Run:
    """The state of one simulation."""

    def __init__(
        self, program: Program, stages: StageGraph, costs: tuple[StageCost, ...], cluster: Cluster, ahead: int
    ) -> None:
        self.program = program
        self.costs = costs
        self.cluster = cluster
        self.ahead = ahead
        self.board = Board()
        self.events: list[Event] = []
        self.memory = Memory(program, stages, costs)
        self.added = Added(program, costs, flow_of(stages))
        self.sums = reductions(stages, program.placement)
        self.at_sum: dict[tuple[str, int], float] = {}
        self.arrival: dict[Transfer, float] = {}
        self.pipes = {pair: self.pipe(*pair) for pair in program.messages}
        for source, target in self.pipes:
            self.post(source, target, ahead, 0.0)

    def pipe(self, source: int, target: int) -> Pipe:
        messages = [step for step in self.program.messages[source, target] if isinstance(step, Transfer)]
        link = self.cluster.link(source, target)
        return Pipe(messages, [link.transfer_s(self.memory.message_bytes(m)) for m in messages])

    def rank(self, rank: int) -> Process:
        """One rank, from the start of the step to the end of its row."""
        clock = 0.0
        for step in self.program.rows[rank]:
            if isinstance(step, Action):
                for partner in self.added.meets(clock, step):
                    self.board.post(step)
                    yield from self.board.wait(partner)
                clock = self.compute(rank, clock, step)
            elif isinstance(step, StageAction):
                clock = self.added.all_done(rank, clock)
                if step.kind == REDUCE:
                    begin = clock
                    for reduction in self.sums[rank]:
                        self.at_sum[reduction.name, rank] = clock
                        self.board.post((reduction.name, rank))
                        for other in reduction.ranks:
                            yield from self.board.wait((reduction.name, other))
                        clock = self.sum_up(reduction)
                    self.record(rank, "recv", step, begin, clock)
                    self.memory.scratch(begin, clock, step)
                else:
                    clock = self.optimize(rank, clock, step)
            elif step.sends:
                clock = self.send(rank, clock, step)
            else:
                source = self.program.placement[step.peer]
                # Whatever the order of waiting, all receives up to this one are posted by now.
                self.post(source, rank, self.pipes[source, rank].place[step.other_end] + 1, clock)
                yield from self.board.wait(step.other_end)
                clock = self.receive(rank, clock, step)

    def compute(self, rank: int, clock: float, action: Action) -> float:
        stream, start, end = self.added.place(rank, clock, action)
        self.record(rank, stream, action, start, end)
        self.memory.start(start, action)
        self.memory.end(end, action)
        return end if stream == "compute" else clock

    def optimize(self, rank: int, clock: float, step: StageAction) -> float:
        cost = self.costs[step.stage]
        end = clock + cost.step_s
        self.record(rank, "compute", step, clock, end)
        self.memory.scratch(clock, end, step)
        return end

    def send(self, rank: int, clock: float, message: Transfer) -> float:
        target = self.program.placement[message.peer]
        self.pipes[rank, target].sent.append(clock)
        self.move(rank, target)
        return clock + self.cluster.link(rank, target).occupied_s(self.memory.message_bytes(message))

    def post(self, source: int, rank: int, count: int, clock: float) -> None:
        """Post receives of `rank` until `count` of the messages from `source` have one."""
        pipe = self.pipes[source, rank]
        for message in pipe.messages[len(pipe.posted) : count]:
            pipe.posted.append(clock)
            self.memory.posted(clock, message.other_end)
        self.move(source, rank)

    def move(self, source: int, target: int) -> None:
        for message, start, end in self.pipes[source, target].moves():
            self.record(source, "send", message, start, end)
            self.memory.sent(end, message)
            self.arrival[message] = end
            self.board.post(message)

    def receive(self, rank: int, clock: float, message: Transfer) -> float:
        arrival = self.arrival.pop(message.other_end)
        if arrival > clock:
            self.record(rank, "recv", message, clock, arrival)
        source = self.program.placement[message.peer]
        pipe = self.pipes[source, rank]
        pipe.received += 1
        end = max(clock, arrival)
        self.post(source, rank, pipe.received + self.ahead, end)
        return end

    def sum_up(self, reduction: Reduction) -> float:
        """When a sum is done that all its ranks have reached."""
        start = max(self.at_sum[reduction.name, rank] for rank in reduction.ranks)
        size = max(self.costs[stage].tied_bytes.get(reduction.name, 0) for stage in reduction.stages)
        every = len(self.program.rows)
        return start + all_reduce_s(size, reduction.ranks, self.cluster, all_ranks=every)

    def record(self, rank: int, stream: str, step: Instruction, start: float, end: float) -> None:
        self.events.append(Event(rank=rank, stream=stream, action=str(step), start_s=start, end_s=end))


def all_reduce_s(size: int, ranks: tuple[int, ...], cluster: Cluster, *, all_ranks: int) -> float:
    """Seconds for the sum of `size` bytes over `ranks`, at the pace of the slowest link between them.

    Over all ranks it is a ring: each of n ranks passes on 2 (n - 1) pieces of size / n.
    Over some of them the lowest collects and returns everything, one rank after the other.
    Source of the ring: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    if count < all_ranks:
        lowest, *others = ranks
        both_ways = [link for r in others for link in (cluster.link(r, lowest), cluster.link(lowest, r))]
        return sum(link.transfer_s(size) for link in both_ways)
    ring = [cluster.link(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
    piece = -(-size // count)
    return 2 * (count - 1) * max(link.transfer_s(piece) for link in ring)


def _refuse_mismatch(
    program: Program, stages: StageGraph, costs: tuple[StageCost, ...], cluster: Cluster
) -> None:
    if not len(costs) == len(stages.stages) == len(program.placement):
        raise PlanError(
            f"{len(costs)} stage costs and {len(stages.stages)} stages for a program of "
            f"{len(program.placement)} stages",
            hint="give one StageCost per stage",
        )
    if len(cluster.devices) < len(program.rows):
        raise PlanError(
            f"the program has {len(program.rows)} ranks, the cluster {len(cluster.devices)} devices",
            hint="add devices, or use fewer ranks",
        )

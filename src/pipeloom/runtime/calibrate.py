"""What this rank's stages, optimizer and link take: memory from their graphs, times from running them.

All ranks calibrate at the same time, so that they share caches and memory bandwidth as they will in a step.
How long the stages' actions take: see `rehearsal.py`.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ..ir.action import RECOMPUTE, REDUCE, STEP, B, F, I, W
from ..ir.cluster import Link, MiB
from ..ir.costs import StageCost
from ..ir.errors import CommunicationError
from ..ir.graph import Value
from ..ir.shared_weights import Reduction
from ..ir.stages import StageGraph
from ..tracer.stage.functions import StageFunctions
from .channel import Channel, dist_channel
from .connect import connect, watch_ranks
from .launch import launch
from .ledger import crossing_bytes
from .messages import Message
from .recorder import Clock, HostClock
from .reduce_and_step import begin_sums
from .weights import Weights, clip_factor

STEPS, LONG_STEPS, LONG_S = 6, 2, 0.1
"""Timed optimizer steps; so many where the first one, which does not count, takes longer than this."""

MEETINGS = 17
"""The same of what ranks wait for each other in. It takes several times as long now and then, when a thread
of the transport finds no core free: so it is the mean that counts."""


def graph_memory(functions: StageFunctions, stages: StageGraph) -> StageCost:
    """A StageCost with the bytes of a stage's graphs alone, and times of 1 s for F, I and W and 2 s for B."""
    sent, back = crossing_bytes(stages, functions.index)
    residual = sum(functions.residual_bytes.values())
    dropped = sum(functions.residual_bytes[name] for name in functions.recomputed)
    away = sum(functions.residual_bytes[name] for name in functions.offloaded)
    peak = functions.peak_bytes
    return StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        residual_bytes=residual,
        recomputed_bytes=dropped,
        offloaded_bytes=away,
        carried_bytes=functions.carried_bytes,
        keeps_inputs=not functions.kept_inputs.isdisjoint(functions.received),
        transient_bytes={
            F: max(0, peak["forward"] - (residual - dropped) - sent),
            RECOMPUTE: max(0, peak.get("recompute", 0) - dropped),
            B: max(0, peak.get("backward", 0) - back),
            I: max(0, peak.get("input_grad", 0) - back),
            W: max(0, peak.get("weight_grad", 0)),
        },
    )


def stage_memory(
    functions: StageFunctions,
    stages: StageGraph,
    weights: Weights,
    *,
    batch_bytes: int,
    counted: Collection[str] = (),
) -> StageCost:
    """`graph_memory` with all else that a rank holds for the stage.

    batch_bytes: of the whole batch.
    counted: parameters and buffers that another stage of the rank counts.
    """
    params = {name: weights.params[name] for name in functions.params}
    uncounted = [param for name, param in params.items() if name not in counted]
    trained = sum(p.nbytes for p in uncounted if p.requires_grad)
    stepped = [weights.update_bytes[n] for n in params if n in weights.stepped and n not in counted]
    graph_cost = graph_memory(functions, stages)
    return replace(
        graph_cost,
        static_bytes={
            "parameters": sum(p.nbytes for p in uncounted)
            + sum(weights.casts[n].nbytes for n in params if n in weights.casts and n not in counted)
            + trained * (weights.copies - 1),
            "gradients": trained * weights.gradient_sets,
            "optimizer": sum(update.state for update in stepped),
            "buffers": sum(weights.buffers[n].nbytes for n in functions.buffers if n not in counted),
            "batch": batch_bytes,
        },
        transient_bytes={**graph_cost.transient_bytes, STEP: weights.step_bytes, REDUCE: 0},
        tied_bytes={n: params[n].nbytes for n in stages.tied if n in params and params[n].requires_grad},
    )


def time_optimizer(weights: Weights, clock: Clock) -> float:
    """Seconds of one optimizer step. It runs on copies of the optimizer's state, so for this time there are
    two; parameters, state and random numbers stay as they are."""
    optimizers = weights.optimizers
    if not weights.stepped:
        return 0.0
    params = weights.params.values()
    values = [p.detach().clone() for p in params]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    states, gradients = [dict(optimizer.state) for optimizer in optimizers], weights.last_gradients
    newest, previous = weights.newest, {name: tensor.clone() for name, tensor in weights.previous.items()}
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.state.update(copy.deepcopy(state, {id(p): p for p in state}))
    times_s: list[float] = []
    try:
        devices = {p.device for p in params if p.device.type != "cpu"}
        kind = next((device.type for device in devices), "cpu")
        with torch.random.fork_rng(devices, device_type=kind):
            while len(times_s) < (LONG_STEPS if times_s and times_s[0] > LONG_S else STEPS):
                for name in weights.summed.sums:
                    weights.summed.total(name)
                start = clock.mark()
                weights.step()
                times_s.append(clock.seconds(start, clock.mark()))
    finally:
        for optimizer, state, own in zip(optimizers, states, groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, own, strict=True):
                group.clear()
                group.update(before)
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)
        weights.restart_versions(newest, previous)
        weights.last_gradients = gradients
        weights.discard_gradients()
    return statistics.median(times_s[1:])  # the first one may make the state


def time_clipping(weights: Weights, channel: Channel, clock: Clock) -> float:
    """Mean seconds that clipping takes: finding the global norm, scaling the gradients, which any norm does
    here. Every rank calls it."""
    for name in weights.summed.sums:
        weights.summed.total(name)

    def clip() -> None:
        squares = weights.norm_squares(list(weights.summed.sums)).reshape(1)
        channel.all_reduce(squares)
        weights.scale_gradients(clip_factor(squares.sqrt(), 0.0))

    return _time_together(clip, weights, channel, clock)


def time_sums(weights: Weights, shared: Sequence[Reduction], channel: Channel, clock: Clock) -> float:
    """Mean seconds of the sums of gradients over ranks. Every rank calls it.

    shared: what this rank sums, see `reduce_and_step.shared_by`.
    """

    def sum_over_ranks() -> None:
        for begun in begin_sums(weights.summed, shared, channel):
            begun.wait()

    return _time_together(sum_over_ranks, weights, channel, clock)


def _time_together(act: Callable[[], None], weights: Weights, channel: Channel, clock: Clock) -> float:
    """Mean seconds of what all ranks do with their gradients at once."""
    times_s: list[float] = []
    first_s = torch.zeros(1, device=weights.device)  # of all ranks together
    while len(times_s) < (LONG_STEPS if float(first_s) > LONG_S * channel.ranks else MEETINGS):
        first_s.fill_(times_s[0] if times_s else 0.0)
        channel.all_reduce(first_s)  # all begin together, and decide alike
        start = clock.mark()
        act()
        times_s.append(clock.seconds(start, clock.mark()))
    weights.discard_gradients()
    return statistics.fmean(times_s[1:])


LONG_BYTES = 1 << 20
"""The long message has at least so many: of shorter ones the size hardly counts, and of sums it does."""

ECHOES = 25
"""Echoes of each size, of which the first warms up."""

WRITTEN_BYTES, MATRIX_SIZE, PRODUCTS = 1 << 24, 384, 2
"""Work before each message, as a step's come after an action: memory written, and the size and number of
matrix products. Data and code then have left the caches, the processor is busy with wide arithmetic, and a
message takes about twice as long as after a pause."""

QUANTILE = 0.1
"""Of the echoes, sorted by time, the one at this share counts. What other processes of the machine do to a
message is not added to a step: a rank kept waiting for a core now computes undisturbed for longer afterwards,
and the rehearsed actions have their share of it already."""


ROUNDS, LONGEST_S = 49, 0.01
"""Rounds of work with a message, of which the first warms up, and the longest work of one, in seconds."""


def measure_link(channel: Channel, size: int, clock: Clock, device: torch.device) -> Link:
    """The link between ranks 0 and 1, from echoes of 8 bytes and of `size` bytes.

    With one-way times t(8) and t(size), of which the sender itself is busy for o(8) and o(size):

        time on the link per byte = (t(size) - t(8) - (o(size) - o(8))) / (size - 8)
        latency                   = t(8) - o(8)

    Every rank calls it; all get the same answer. A rank that waits for a message pays for its arrival last,
    so that is not part of the latency.

    size: bytes of the long message, see `LONG_BYTES`.
    Raises: CommunicationError, PeerError as the channel does.
    """
    size = max(size // 4 * 4, LONG_BYTES)
    small, large = (_echo(channel, length, clock, device) for length in (8, size))
    (one_way_s, sender_s), (large_one_way_s, large_sender_s) = channel.broadcast_object((small, large))
    sender_s_per_byte = max(0.0, large_sender_s - sender_s) / (size - 8)
    s_per_byte = max((large_one_way_s - one_way_s) / (size - 8) - sender_s_per_byte, 1e-15)
    return Link(
        bandwidth_bytes_per_s=1 / s_per_byte,
        latency_s=max(0.0, one_way_s - sender_s),
        overhead_s=sender_s,
        overhead_s_per_byte=sender_s_per_byte,
    )


def _echo(channel: Channel, size: int, clock: Clock, device: torch.device) -> tuple[float, float]:
    """Seconds one way, and of these how long the sender itself is busy; on rank 0.

    rank 0   work, send ───────▶                     ▶ receive
    rank 1                receive, work, send ───────┘
    """
    if channel.ranks == 1:
        return 1e-6, 0.0
    there, back = (_messages(size, source, 1 - source, ECHOES) for source in (0, 1))
    data = torch.zeros(size // 4, device=device)
    channel.begin(there if channel.rank == 1 else back if channel.rank == 0 else [])
    sums, sending = [], []
    work = _work(device)

    def work_and_send(message: Message) -> tuple[object, object]:
        work(PRODUCTS)
        fresh = data.clone()  # as a step sends what was just made
        start = clock.mark()
        channel.send(message, [fresh])
        return start, clock.mark()

    def take(message: Message) -> object:
        channel.receive(message)
        channel.release(message)
        return clock.mark()

    for out, home in zip(there, back, strict=True):
        if channel.rank == 0:
            begin, sent = work_and_send(out)
            sums.append(clock.seconds(begin, take(home)))
        elif channel.rank == 1:
            came = take(out)
            begin, sent = work_and_send(home)
            sums.append(-clock.seconds(came, begin))
        if channel.rank < 2:
            sending.append(clock.seconds(begin, sent))
    channel.end()
    # The time between arrival and reply is on rank 1's clock: only the sum of both ranks' times is known.
    mine, theirs, *_ = channel.all_gather_object((sums[1:], sending[1:]))
    one_way = [(a + b) / 2 for a, b in zip(mine[0], theirs[0], strict=True)]
    return _quantile(one_way), _quantile([*mine[1], *theirs[1]])


def busy_link(channel: Channel, size: int, clock: Clock, device: torch.device, *, action_s: float) -> Link:
    """`measure_link`, with what a message costs ranks that compute all the time.

    action_s: seconds of an action of this rank.

    An echo finds a rank that waits for it. In a step all ranks compute, and where they are as many as the
    cores, the transport's threads must take one away: who posts a transfer while such a thread is kept off a
    core waits for its lock, now and then for 3 ms and more; the sooner, the longer it has computed.
    """
    link = measure_link(channel, size, clock, device)
    if channel.ranks == 1 or device.type != "cpu":  # an accelerator computes beside the transport's threads
        return link
    size = max(size // 4, 2) * 4
    posting_s = _posting_s(channel, size, clock, device, action_s) - size * link.overhead_s_per_byte
    return replace(link, overhead_s=max(link.overhead_s, posting_s))


def _posting_s(channel: Channel, size: int, clock: Clock, device: torch.device, action_s: float) -> float:
    """Mean seconds that a send takes in a rank that computes, as its peer does; on all ranks the same.

    ranks 0 and 1, 2 and 3, ...    send, work, receive │ send, work, receive │ ...
    a last one without a peer            work          │       work          │ ...
    """
    peer = channel.rank ^ 1
    paired = peer < channel.ranks
    outgoing = _messages(size, channel.rank, peer, ROUNDS)
    incoming = _messages(size, peer, channel.rank, ROUNDS) if paired else []
    channel.begin(incoming)
    data, work = torch.zeros(size // 4, device=device), _work(device)
    sends_s: list[float] = []
    for index in range(ROUNDS):
        fresh = data.clone()
        if paired:
            start = clock.mark()
            channel.send(outgoing[index], [fresh])
            sends_s.append(clock.seconds(start, clock.mark()))
        begin = time.perf_counter()
        while time.perf_counter() - begin < min(action_s, LONGEST_S):
            work(1)
        if paired:
            channel.receive(incoming[index])
            channel.release(incoming[index])
    channel.end()
    found = [each for each in channel.all_gather_object(sends_s[1:]) if each]
    return statistics.fmean(second for each in found for second in each)


def _messages(size: int, source: int, target: int, count: int) -> list[Message]:
    value = Value(name="echo", shape=(size // 4,), dtype="float32")
    return [
        Message(key=f"echo{source}-{i}", source=source, target=target, values=(value,)) for i in range(count)
    ]


def _work(device: torch.device) -> Callable[[int], None]:
    """What a step does between messages: it writes memory, and multiplies so many matrices."""
    cold = torch.empty(WRITTEN_BYTES, dtype=torch.uint8, device=device)
    matrix = torch.zeros(MATRIX_SIZE, MATRIX_SIZE, device=device)

    def work(products: int) -> None:
        cold.fill_(1)
        for _ in range(products):
            torch.mm(matrix, matrix)

    return work


def _quantile(times: list[float]) -> float:
    return sorted(times)[int(QUANTILE * len(times))]


def local_links() -> list[Link]:
    """The link measured a few times over, between two new processes with one thread each (gloo, loopback).

    Raises: CommunicationError if one of them fails; what it failed with has then been printed.
    """
    with tempfile.TemporaryDirectory(prefix="pipeloom-link-") as folder:
        path = Path(folder) / "links.json"
        if status := launch(_measure, 2, args=(path,)):
            raise CommunicationError(
                f"two processes that send each other messages ended with exit status {status}",
                hint="what they printed says why",
            )
        return msgspec.json.decode(path.read_bytes(), type=list[Link])


def _measure(path: Path) -> None:
    device = torch.device("cpu")
    torch.set_num_threads(1)
    group = connect(device)
    with watch_ranks(group) as watch:
        channel = dist_channel(group, watch, device=device)
        links = [measure_link(channel, 4 * MiB, HostClock(), device) for _ in range(3)]
        if channel.rank == 0:
            path.write_bytes(msgspec.json.encode(links))

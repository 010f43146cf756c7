"""Batches: their shapes as text, how they are spread over micro-batches, and each one's share of the loss.

A step's loss is the mean over its batch (over its tokens, with `Job.weight`). Micro-batches need not be of
one size, so each loss, a mean over its own micro-batch, counts with its share of the whole:

    loss = sum_m w_m loss_m,    w_m = weight_m / sum_k weight_k,    d loss / d loss_m = w_m

The backward of micro-batch m therefore starts from the gradient w_m, and sums of gradients need no division.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import TypeAlias

import torch
from torch import Tensor

from ..ir.errors import BatchError, CommunicationError, of_type
from ..ir.stages import StageGraph
from ..ir.user_code import call_own
from ..tracer.job_calls import JoinedBatches, common_rows
from .channel import Channel
from .rank import Microbatch


def rows_of(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def signature_of(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple([f"{n}{list(t.shape)}{str(t.dtype).removeprefix('torch.')}" for n, t in batch.items()])


def checksum_of(batch: Mapping[str, Tensor]) -> int:
    checksum = 0
    for tensor in batch.values():
        host = tensor.detach().cpu().contiguous()
        checksum = zlib.crc32(host.flatten().view(torch.uint8).numpy().data, checksum)
    return checksum


def split_batch(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Micro-batches of nearly equal size, contiguous as the stages were traced; of several batches each by
    itself.

    Raises: BatchError as `common_rows` does, or if there are fewer rows than parts.
    """
    common = common_rows(batch)
    rows = batch.rows if isinstance(batch, JoinedBatches) else (common,)
    sizes: list[int] = []
    for count, pieces in zip(rows, microbatch_rows(parts, len(rows)), strict=True):
        if not 0 < pieces <= count:
            raise BatchError(
                f"a batch of {count} rows cannot be split into {pieces} micro-batches",
                hint=f"give at least {pieces} rows, or plan with fewer micro-batches"
                if pieces
                else f"plan with a micro-batch for each of the {len(rows)} batches of a step",
            )
        sizes += microbatch_rows(count, pieces)
    split = [map(Tensor.contiguous, torch.split(tensor, sizes)) for tensor in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*split, strict=True)]


def microbatch_rows(rows: int, parts: int) -> list[int]:
    """Rows of each micro-batch: as even as possible, the larger ones first.

    >>> microbatch_rows(10, 4)
    [3, 3, 2, 2]
    """
    more = rows % parts
    return [rows // parts + 1] * more + [rows // parts] * (parts - more)


Weight: TypeAlias = Callable[[Mapping[str, Tensor]], "float | Tensor"]


def loss_shares(parts: Sequence[Mapping[str, Tensor]], weight: Weight | None) -> list[float]:
    """Each micro-batch's share of the step's loss; they add up to 1.

    parts: the inputs of all micro-batches.  weight: of one of them; None for its number of rows.
    Raises: BatchError if no micro-batch has any weight, or one a weight that is no number; ConfigError if the
        user's function takes other arguments, or fails.
    """
    weights = [_own_weight(weight, part) if weight else float(rows_of(part)) for part in parts]
    total = sum(weights)
    if total <= 0:
        raise BatchError("no token of this batch counts for the loss", hint="check Job.weight")
    return [each / total for each in weights]


def _own_weight(weight: Weight, part: Mapping[str, Tensor]) -> float:
    hint = "it gets a micro-batch, and returns how many of its tokens count for the loss"
    count = call_own("Job.weight", weight, part, hint=hint)
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several
        number = nan
    if not 0 <= number < inf:
        got = number if isinstance(count, int | float) else of_type(count)
        raise BatchError(f"Job.weight returned {got}, which counts no tokens", hint=hint)
    return number


def off_mean(whole: float, parts: Sequence[float], rows: Sequence[int], *, least: float = 1e-12) -> float:
    """How far a number of a whole batch is from the mean over its rows, relative to the largest number.

    whole: of all rows.  parts, rows: of each part of the batch, and how many it has.
    least: what it is relative to where all are smaller.
    Returns: 0 where neither is finite, of which nothing can be said; infinity where one of them is not.

    >>> off_mean(3.0, [2.0, 6.0], [3, 1]), off_mean(4.0, [2.0, 6.0], [3, 1])
    (0.0, 0.16666666666666666)
    """
    mean = sum(part * count for part, count in zip(parts, rows, strict=True)) / sum(rows)
    if not isfinite(mean) and not isfinite(whole):
        return 0.0
    if not isfinite(mean) or not isfinite(whole):
        return inf
    return abs(mean - whole) / max(abs(whole), *map(abs, parts), least)


SAME_BATCH = "give all ranks the same batch: seed what shuffles and draws, or Pipeline(data='first')"


def read_loss(
    losses: Mapping[int, Tensor], microbatches: Sequence[Microbatch], device: torch.device, *others: Tensor
) -> list[float]:
    """This rank's part of a step's loss, and other scalars, read as `read_scalars` does.

    losses: by micro-batch; none but on the loss stage's rank.
    """
    numbers, total = iter(read_scalars([*losses.values(), *others], device)()), 0.0
    for index in losses:
        total += next(numbers) * microbatches[index].weight
    return [total, *numbers]


def read_scalars(scalars: Sequence[Tensor], device: torch.device) -> Callable[[], list[float]]:
    """Begin to read numbers of a device, in one copy. What it returns gives them: there the host waits until
    the device has done all that it was given before. So a step begins this once, at its end, on all ranks:
    marks of a `Clock` are then read without a wait.
    """
    now = torch.zeros((), device=device)
    numbers = torch.stack([*[scalar.reshape(()) for scalar in scalars], now])
    if device.type == "cpu":
        return numbers.tolist()[:-1].copy
    host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.Event(device=device)
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return list(host.tolist()[:-1])

    return read


def agree_on_batch(
    channel: Channel, shapes: tuple[str, ...], refusal: BatchError | None = None, checksum: int = 0
) -> None:
    """All ranks must have a batch of the same shapes, or transfers would not match, and of the same checksum;
    and if one of them cannot use its batch, none may begin the step. Nothing else has been sent, so all can
    go on with another batch.

    refusal: why this rank cannot use its batch.
    Raises: BatchError on all ranks if these differ or one refuses, with its own reason if it has one.
    """
    mine = batch_digest(shapes, refusal, checksum)
    total = mine.clone()
    channel.all_reduce(total)
    if total[2]:  # first, as whoever refuses may not know any shapes
        channel.agree(refusal, None)
    if not torch.equal(total[:2], channel.ranks * mine[:2]):
        raise BatchError(
            f"rank {channel.rank} has a batch of {', '.join(shapes)}, and other ranks have another",
            hint=SAME_BATCH,
        )


def batch_digest(shapes: tuple[str, ...], refusal: BatchError | None, checksum: int) -> Tensor:
    """Three numbers whose sum over all ranks is that of equal ones only if all have these shapes and this
    checksum, and all or none refuse their batch.

    They are h, h^2 and 0 or 1, for a hash h: only if all hashes are equal, the sums over n ranks are n h and
    n h^2 (the variance is zero). Exact in float64 for 1000 ranks.
    """
    mine = float(zlib.crc32(repr((shapes, checksum)).encode()) % 2**21)
    return torch.tensor([mine, mine * mine, refusal is not None], dtype=torch.float64)


def agree_on_layouts(channel: Channel, stages: StageGraph) -> None:
    """What crosses has to lie in memory alike for all ranks: a message is a row of numbers. Each rank
    captures by itself, and which kernels it sees is up to its PyTorch. Every rank calls it, for the same
    stages.

    Raises: CommunicationError, on all ranks, that names a value which lies otherwise on one of them.
    """
    mine = {c.value.name: (c.value.shape, c.value.dtype, c.value.order) for c in stages.crossings}
    first, *others = channel.all_gather_object(mine)
    for rank, theirs in enumerate(others, start=1):
        if odd := next((name for name in first | theirs if first.get(name) != theirs.get(name)), None):
            raise CommunicationError(
                f"{odd} lies in memory otherwise for rank {rank} than for rank 0, where the model was "
                f"captured: {_described(theirs.get(odd))}, and {_described(first.get(odd))}",
                hint="start all ranks with the same versions and settings of PyTorch, such as which kernels "
                "attention may use",
            )


def _described(value: tuple[tuple[int, ...], str, tuple[int, ...]] | None) -> str:
    if value is None:
        return "no such value"
    shape, dtype, order = value
    return f"{dtype}{list(shape)} in the order {list(order or range(len(shape)))}"

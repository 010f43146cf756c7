"""k, the ratio of copying to computing: how much offloading hides behind the computing of a stage.

    k = (seconds that everything offloaded takes out and back) / (seconds of the stage's F, I and W)
      = 2 bytes / (bandwidth x compute seconds)     where both directions are equally fast

Both directions run at once, so a device with a link of its own uses it for k/2 of the time; where two devices
share one duplex uplink, each direction is used for k. While that is at most 1 all copies hide behind
computing in the long run. So of v stages on a rank about v / utilisation may be offloaded whole.

Source: PipeOffload (arXiv 2503.01328), section 1; the bound by utilisation is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.cluster import Cluster
from ..ir.errors import ConfigError
from ..ir.plan import Plan, StagePlan


@dataclass(frozen=True, kw_only=True)
class CopyLoad:
    """What offloading all residuals of a stage that are not made again would ask of its device's link.

    ratio: k.  utilisation: share of the time in which the busier direction copies, with those that share the
        uplink copying as much.  offloadable: how many stages of its rank may leave whole: its first
        ones, whose residuals live longest, until its link is busy all the time.
    """

    ratio: float
    utilisation: float
    offloadable: int


def transformer_ratio(
    hidden: int, context: int, *, flops_per_s: float = 220e12, host_bytes_per_s: float = 15e9
) -> float:
    """k of a layer of a plain transformer: 10 / (3 (6 h + s)) x FLOP/s / host bytes per second.

    hidden: h, the width.  context: s, tokens of a sequence.  flops_per_s: achieved.  host_bytes_per_s: of one
    direction. The defaults are the paper's A100.
    Of b sequences F takes 24 b s h^2 + 4 b s^2 h operations, and F, I and W three times that; 20 b s h bytes
    are copied: 34 b s h of half precision with flash attention, less the outputs of norms, GELU and dropout,
    which are made again. Attention counts whole, without causal halves, all heads have keys and values of
    their own, and the feed-forward part is 4 h wide.

    Source: PipeOffload (arXiv 2503.01328), section 1 and appendix C.
    Raises: ConfigError if a number is not above 0.

    >>> round(transformer_ratio(4096, 4096), 2), round(transformer_ratio(10240, 4096), 2)
    (1.71, 0.75)
    """
    numbers = {"hidden": hidden, "context": context, "FLOP/s": flops_per_s, "bytes/s": host_bytes_per_s}
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{name} is {number}", hint="use a number above 0")
    return 10 / (3 * (6 * hidden + context)) * flops_per_s / host_bytes_per_s


def copy_loads(plan: Plan, cluster: Cluster) -> tuple[CopyLoad | None, ...]:
    """That of each stage of a plan's first replica; None where its device has no link to a host."""
    loads = [_load(part, cluster, plan.placement[stage]) for stage, part in enumerate(plan.stages)]
    allowed = {rank: _allowed(plan, loads, rank) for rank in set(plan.placement)}
    return tuple(
        None if load is None else CopyLoad(ratio=load[0], utilisation=load[1], offloadable=allowed[rank])
        for load, rank in zip(loads, plan.placement, strict=False)
    )


def _seconds(part: StagePlan) -> float:
    return part.forward_s + part.input_grad_s + part.weight_grad_s + part.recompute_s


def _load(part: StagePlan, cluster: Cluster, rank: int) -> tuple[float, float] | None:
    """k and the link's utilisation of one stage."""
    device, size, compute_s = cluster.devices[rank], part.kept_bytes + part.offloaded_bytes, _seconds(part)
    if device.host_link is None or device.reload_link is None or compute_s <= 0:
        return None
    out, back = (size / link.bandwidth_bytes_per_s for link in (device.host_link, device.reload_link))
    busy = max(out, back) / compute_s
    if device.switch is not None:
        sharing = sum(other.switch == device.switch for other in cluster.devices)
        uplink = cluster.switches[device.switch].bandwidth_bytes_per_s
        busy = max(busy, sharing * size / uplink / compute_s)
    return (out + back) / compute_s, busy


def _allowed(plan: Plan, loads: Sequence[tuple[float, float] | None], rank: int) -> int:
    """How many stages of a rank, from the first on, keep its link busy for no longer than it computes."""
    own = [stage for stage in range(len(loads)) if plan.placement[stage] == rank]
    whole_s = sum(_seconds(plan.stages[stage]) for stage in own)
    copying_s, count = 0.0, 0
    for stage in own:
        load = loads[stage]
        if load is None:
            break
        copying_s += load[1] * _seconds(plan.stages[stage])
        if copying_s > whole_s * (1 + 1e-9):
            break
        count += 1
    return count

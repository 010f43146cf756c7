"""What a bit more memory or bandwidth would buy: the same request planned for slightly better devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..ir.cluster import Cluster, Device, Link
from ..ir.errors import InfeasibleError
from ..ir.plan import Plan

MORE = 1.1


@dataclass(frozen=True, kw_only=True)
class Change:
    """what: as "10 % more memory".  step_s: with it, None if no plan fits even so.  gain: share of the step's
    time that it saves; 0 if there was no plan before.
    """

    what: str
    step_s: float | None
    gain: float


def changed_clusters(cluster: Cluster, factor: float = MORE) -> Mapping[str, Cluster]:
    """By what is different: memory, links between devices, links to the host where there are any."""
    more = f"{(factor - 1) * 100:.0f} % more"
    found = {
        f"{more} memory": _devices(cluster, lambda d: {"memory_bytes": int(d.memory_bytes * factor)}),
        f"{more} bandwidth between devices": replace(
            cluster,
            within_node=_faster(cluster.within_node, factor),
            between_nodes=_maybe(cluster.between_nodes, factor),
            node_link=_maybe(cluster.node_link, factor),
            groups={name: _faster(link, factor) for name, link in cluster.groups.items()},
        ),
    }
    if any(device.host_link is not None for device in cluster.devices):
        found[f"{more} bandwidth to the host"] = replace(
            _devices(
                cluster,
                lambda d: {
                    "host_link": _maybe(d.host_link, factor),
                    "host_link_back": _maybe(d.host_link_back, factor),
                },
            ),
            switches={name: _faster(link, factor) for name, link in cluster.switches.items()},
        )
    return found


def what_if(plan: Plan | None, cluster: Cluster, again: Callable[[Cluster], Plan]) -> list[Change]:
    """What each change would make of a plan; None: of a request for which there was none.

    again: makes the plan for another cluster.
    """
    changes = []
    for what, other in changed_clusters(cluster).items():
        try:
            step_s = again(other).predicted_step_s
        except InfeasibleError:
            changes.append(Change(what=what, step_s=None, gain=0.0))
            continue
        gain = 1 - step_s / plan.predicted_step_s if plan is not None and plan.predicted_step_s else 0.0
        changes.append(Change(what=what, step_s=step_s, gain=gain))
    return changes


def _devices(cluster: Cluster, better: Callable[[Device], dict[str, object]]) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, **better(d)) for d in cluster.devices))  # type: ignore[arg-type]


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)


def _maybe(link: Link | None, factor: float) -> Link | None:
    return None if link is None else _faster(link, factor)

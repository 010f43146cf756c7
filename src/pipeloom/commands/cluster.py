"""pipeloom cluster: devices that are known by name, what a cluster is made of, and measuring this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..clusters.devices import BuiltIn, Figure, built_in_devices
from ..clusters.files import save_cluster
from ..clusters.names import find_cluster
from ..ir.cluster import Device
from ..ir.text import as_plain, format_bytes
from ..viewer.table import Column, Table
from .common import NEW_FILE, OneOf, emit, json_option

if TYPE_CHECKING:
    from ..ir.cluster import Cluster, Link

UNITS = {"flops_per_s": "FLOP/s", "memory_bytes_per_s": "B/s", "efficiency": "", "launch_s": "s"}
"""Figures of a device that times depend on."""


@click.group()
def cluster() -> None:
    """Describe devices and the links between them, by name, from a file, or by measuring."""


@cluster.command("list")
@json_option
def list_(*, as_json: bool) -> None:
    """List the devices that clusters can be made of."""
    entries = list(built_in_devices().values())
    listed = [
        {
            "name": entry.name,
            "aliases": entry.aliases,
            "about": entry.about,
            "memory_bytes": entry.bytes("memory"),
            "memory_bytes_per_s": entry.number("memory_bytes_per_s"),
            "flops_per_s": entry.numbers("flops_per_s."),
        }
        for entry in entries
    ]
    emit({"devices": listed}, _list_screen(entries), as_json=as_json)


def _list_screen(entries: Sequence[BuiltIn]) -> Iterator[Table | str]:
    columns = (
        Column("name", left=True),
        Column("also", left=True),
        Column("memory", format_bytes),
        *(Column(f"{kind} TFLOP/s", "{:,.4g}".format) for kind in ("16-bit", "float32")),
        Column("memory GB/s", "{:,.0f}".format),
        Column("about", left=True),
    )
    rows = []
    for entry in entries:
        rates = entry.numbers("flops_per_s.")
        half = max(rates.get("bfloat16", 0.0), rates.get("float16", 0.0))
        figures = (half / 1e12, rates["float32"] / 1e12, entry.number("memory_bytes_per_s") / 1e9)
        size = entry.bytes("memory") or "a share"
        rows.append((entry.name, ", ".join(entry.aliases), size, *figures, entry.about))
    yield Table("", columns, rows)
    yield "\nclusters of them: 8 x a100-40, 2 nodes of 8 x h100, 4 x v100-32 + 4 x rtx-2080ti"


@cluster.command()
@click.argument("name")
@click.option("--output", "-o", type=NEW_FILE, help="Write the cluster to this file, to be changed by hand.")
@json_option
def show(*, name: str, output: Path | None, as_json: bool) -> None:
    """Show every figure of NAME with its source: a device, a cluster as "8 x a100-40", or a cluster file."""
    described = find_cluster(name)
    if output is not None:
        save_cluster(described, output, note=f"{name}; for sources: pipeloom cluster show")
    kinds, own = [], dict[str, Device]()
    for device in described.devices:
        known = built_in_devices().get(device.name)
        plain = replace(device, node=0, group=None, switch=None)
        if known is None or plain != known.device(memory_bytes=device.memory_bytes):
            own.setdefault(device.name, device)
        elif known not in kinds:
            kinds.append(known)
    sources = {
        kind.name: {f.name: {**f.table, "source": f.source} for f in kind.figures.values()} for kind in kinds
    }

    def screen() -> Iterator[Table | str]:
        yield from _cluster_screen(described)
        columns = (Column("figure", left=True), Column("value"), Column("source", left=True))
        for kind in kinds:
            yield f"\n{kind.name}: {kind.about}"
            yield Table("", columns, [(f.name, _value(f), f.source) for f in kind.figures.values()])
        for device in own.values():
            yield f"\n{device.name}: with the figures of {name}"
            yield Table("", columns[:2], list(_own_figures(device)))

    emit(_described(described) | {"sources": sources}, screen(), as_json=as_json)


@cluster.command()
@click.option("--device", type=OneOf(["auto", "cpu", "cuda"]), default="cpu", help="What to measure.")
@click.option("--devices", type=click.IntRange(1), help="How many; by default one per core, or all GPUs.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where files of offloaded tensors would be; for the CPU.",
)
@click.option("--output", "-o", type=NEW_FILE, help="Write the cluster to this file.")
@json_option
def detect(
    *, device: str, devices: int | None, directory: Path | None, output: Path | None, as_json: bool
) -> None:
    """Measure this machine, to plan, profile and simulate with --cluster FILE. Takes about half a minute."""
    from ..machine import detect as measure

    def progress(what: str) -> None:
        click.echo(f"measuring {what}", err=True)

    detected, measured = measure(device, devices=devices, directory=directory, progress=progress)
    if output is not None:
        head = "Measured by `pipeloom cluster detect`; lowest and highest of what was found:"
        rows = [
            f"{row.name}: {_amount(row.low, row.unit)} to {_amount(row.high, row.unit)} over {row.of}"
            for row in measured
        ]
        save_cluster(detected, output, note="\n".join([head, *rows]))

    def screen() -> Iterator[Table | str]:
        yield from _cluster_screen(detected)
        columns = (Column("figure", left=True), *map(Column, ("measured", "lowest", "highest")))
        rows = [
            (row.name, *(_amount(value, row.unit) for value in (row.value, row.low, row.high)), row.of)
            for row in measured
        ]
        yield ""
        yield Table("", (*columns, Column("of", left=True)), rows)
        if output is not None:
            yield f"\nwritten to {output}"

    result = _described(detected) | {"measured": measured}
    emit(result, screen(), as_json=as_json)


def _described(described: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = as_plain(described)
    return {"devices": values.pop("devices"), "links": values}


def _cluster_screen(described: Cluster) -> Iterator[Table | str]:
    columns = (
        *(Column("ranks"), Column("device", left=True), Column("node"), Column("memory", format_bytes)),
        *(Column("to host GB/s", _rate), Column("back GB/s", _rate), Column("host memory", format_bytes)),
        Column("shares", left=True),
    )
    rows = []
    first = 0
    for device, same in groupby(described.devices):
        count = len(list(same))
        ranks = str(first) if count == 1 else f"{first}-{first + count - 1}"
        shares = ", ".join(name for name in (device.group, device.switch) if name)
        host = (device.host_link, device.reload_link)
        figures = (device.node, device.memory_bytes, *host, device.host_memory_bytes or None)
        rows.append((ranks, device.name, *figures, shares or None))
        first += count
    yield Table("", columns, rows)
    links = {"within a node": described.within_node, "between nodes": described.between_nodes}
    links |= {"node": described.node_link, **described.groups, **described.switches}
    for name, link in links.items():
        if link is not None:
            yield f"{name}: {_rate(link)} GB/s, {link.latency_s * 1e6:.1f} us"


def _own_figures(device: Device) -> Iterator[tuple[str, str]]:
    """What times depend on; the rest is in the table of ranks."""
    for name in UNITS:
        value = getattr(device, name)
        for key, one in value.items() if isinstance(value, Mapping) else [("", value)]:
            yield f"{name}.{key}".rstrip("."), _amount(one, UNITS[name])


def _value(figure: Figure) -> str:
    if "value" not in figure.table:
        size = f" for {figure.size}" if "size" in figure.table else ""
        return f"{_rate(figure.link)} GB/s, {figure.link.latency_s * 1e6:.1f} us{size}"
    if isinstance(figure.value, str):
        return figure.value
    return _amount(float(figure.value), UNITS.get(figure.name.split(".")[0], ""))


def _amount(value: float, unit: str) -> str:
    """
    >>> _amount(312e12, "FLOP/s"), _amount(3.3e-6, "s"), _amount(0.87, "")
    ('312 TFLOP/s', '3.3 us', '0.87')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit in ("FLOP/s", "B/s") and value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    if unit == "s" and value < 1:
        return f"{value * 1e6:.4g} us"
    return f"{value:.3g} {unit}".rstrip()


def _rate(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.4g}"

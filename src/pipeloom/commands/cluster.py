"""pipeloom cluster: devices that are known by name, what a cluster is made of, and measuring this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import NEW_FILE, console, json_option, new_table, print_json

if TYPE_CHECKING:
    from ..clusters.devices import BuiltIn, Figure
    from ..ir.cluster import Cluster, Link
    from ..machine import Detected


@click.group()
def cluster() -> None:
    """Describe devices and the links between them, by name, from a file, or by measuring."""


@cluster.command("list")
@json_option
def list_(*, as_json: bool) -> None:
    """List the devices that clusters can be made of.

    With --json: devices, a list of name, aliases, about, memory_bytes, memory_bytes_per_s and flops_per_s.
    """
    from ..clusters.devices import built_in_devices
    from ..ir.units import format_bytes

    entries = list(built_in_devices().values())
    if as_json:
        print_json({"devices": [_listed(entry) for entry in entries]})
        return
    heads = ("name", "also", "memory", "16-bit TFLOP/s", "float32 TFLOP/s", "memory GB/s", "about")
    table = new_table(*heads, left=("name", "also", "about"))
    for entry in entries:
        rates = entry.numbers("flops_per_s")
        half = max(rates.get("bfloat16", 0.0), rates.get("float16", 0.0))
        size = entry.bytes("memory")
        table.add_row(
            entry.name,
            ", ".join(entry.aliases),
            format_bytes(size) if size else "a share",
            f"{half / 1e12:,.4g}",
            f"{rates['float32'] / 1e12:,.4g}",
            f"{entry.number('memory_bytes_per_s') / 1e9:,.0f}",
            entry.about,
        )
    out = console()
    out.print(table)
    out.print("\nclusters of them: 8 x a100-40, 2 nodes of 8 x h100, 4 x v100-32 + 4 x rtx-2080ti")


@cluster.command()
@click.argument("name")
@click.option("--output", "-o", type=NEW_FILE, help="Write the cluster to this file, to be changed by hand.")
@json_option
def show(*, name: str, output: Path | None, as_json: bool) -> None:
    """Show every figure of NAME with its source: a device, a cluster as "8 x a100-40", or a cluster file.

    With --json: devices (a list of what ranks have), links, and sources: per built-in device and figure,
    its value and source.
    """
    from ..clusters.devices import built_in_devices
    from ..clusters.files import save_cluster
    from ..clusters.names import find_cluster

    described = find_cluster(name)
    if output is not None:
        save_cluster(described, output, note=f"{name}; for sources: pipeloom cluster show")
    built_in = built_in_devices()
    kinds = [built_in[kind] for kind in dict.fromkeys(d.name for d in described.devices) if kind in built_in]
    if as_json:
        print_json({**_described(described), "sources": {kind.name: _sourced(kind) for kind in kinds}})
        return
    _print_cluster(described)
    for kind in kinds:
        _print_figures(kind)


@cluster.command()
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What to measure."
)
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
    """Measure this machine, to plan, profile and simulate with --cluster FILE. Takes about half a minute.

    With --json: devices, links, and measured: a list of name, value, low, high, unit, of.
    """
    from ..clusters.files import save_cluster
    from ..machine import detect as measure

    detected = measure(
        device,
        devices=devices,
        directory=directory,
        progress=lambda what: click.echo(f"measuring {what}", err=True),
    )
    if output is not None:
        save_cluster(detected.cluster, output, note=_note(detected))
    if as_json:
        print_json({**_described(detected.cluster), "measured": [vars(row) for row in detected.measured]})
        return
    _print_cluster(detected.cluster)
    table = new_table("figure", "measured", "lowest", "highest", "of", left=("figure", "of"))
    for row in detected.measured:
        values = (_amount(value, row.unit) for value in (row.value, row.low, row.high))
        table.add_row(row.name, *values, row.of)
    out = console()
    out.print()
    out.print(table)
    if output is not None:
        out.print(f"\nwritten to {output}", highlight=False)


def _listed(entry: BuiltIn) -> dict[str, Any]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "about": entry.about,
        "memory_bytes": entry.bytes("memory"),
        "memory_bytes_per_s": entry.number("memory_bytes_per_s"),
        "flops_per_s": entry.numbers("flops_per_s"),
    }


def _sourced(kind: BuiltIn) -> dict[str, Any]:
    return {f.name: {**f.table, "source": f.source} for f in kind.figures.values()}


def _described(described: Cluster) -> dict[str, Any]:
    """Devices and links as JSON."""
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(described)
    return {"devices": values.pop("devices"), "links": values}


def _print_cluster(described: Cluster) -> None:
    from itertools import groupby

    from ..ir.units import format_bytes

    heads = ("ranks", "device", "node", "memory", "to host GB/s", "back GB/s", "host memory", "shares")
    table = new_table(*heads, left=("device", "shares"))
    first = 0
    for device, same in groupby(described.devices):
        count = len(list(same))
        shared = [name for name in (device.group, device.switch) if name]
        table.add_row(
            str(first) if count == 1 else f"{first}-{first + count - 1}",
            device.name,
            str(device.node),
            format_bytes(device.memory_bytes),
            _rate(device.host_link),
            _rate(device.reload_link),
            format_bytes(device.host_memory_bytes) if device.host_memory_bytes else "–",
            ", ".join(shared) or "–",
        )
        first += count
    out = console()
    out.print(table)
    links = {"within a node": described.within_node, "between nodes": described.between_nodes}
    links |= {"node": described.node_link, **described.groups, **described.switches}
    for name, link in links.items():
        if link is not None:
            out.print(f"{name}: {_rate(link)} GB/s, {link.latency_s * 1e6:.1f} us", highlight=False)


def _print_figures(kind: BuiltIn) -> None:
    out = console()
    out.print(f"\n{kind.name}: {kind.about}", highlight=False)
    table = new_table("figure", "value", "source", left=("figure", "source"))
    for figure in kind.figures.values():
        table.add_row(figure.name, _value(figure), figure.source)
    out.print(table)


def _value(figure: Figure) -> str:
    """As written; rates with their unit."""
    if "value" not in figure.table:
        size = f" for {figure.size}" if "size" in figure.table else ""
        return f"{_rate(figure.link)} GB/s, {figure.link.latency_s * 1e6:.1f} us{size}"
    units = {"flops_per_s": "FLOP/s", "memory_bytes_per_s": "B/s", "launch_s": "s"}
    if isinstance(figure.value, str):
        return figure.value
    return _amount(float(figure.value), units.get(figure.name.split(".")[0], ""))


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


def _rate(link: Link | None) -> str:
    return "–" if link is None else f"{link.bandwidth_bytes_per_s / 1e9:.4g}"


def _note(detected: Detected) -> str:
    """The head of a measured file."""
    rows = [
        f"{row.name}: {_amount(row.low, row.unit)} to {_amount(row.high, row.unit)} over {row.of}"
        for row in detected.measured
    ]
    return "\n".join(["Measured by `pipeloom cluster detect`; lowest and highest of what was found:", *rows])

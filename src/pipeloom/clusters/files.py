"""Cluster files (TOML): read, and written so that reading gives the same cluster.

name = "two-cards"                  # optional
[[device]]
name = "card"
count = 2                           # so many of them, one rank each
memory = "24GiB"
flops_per_s = { float32 = 35e12, bfloat16 = 71e12 }
memory_bytes_per_s = 936e9
efficiency = { matmul = 0.7, default = 0.6 }
launch_s = 5e-6
node = 0
group = "pair"                      # joined by a link of their own, see [groups]
switch = "left"                     # share an uplink to the host, see [switches]
host_link = { bandwidth = "12GB", latency_s = 1e-5 }     # to the host; bandwidth: bytes per second
host_link_back = { bandwidth = "11GB", latency_s = 1e-5 }     # from the host, if that differs
host_memory = "64GiB"
[within_node]
bandwidth = "12GB"
latency_s = 1e-5
[between_nodes]
bandwidth = "3GB"
[groups]
pair = { bandwidth = "50GB" }
[switches]
left = { bandwidth = "13GB" }       # per direction, of all devices below it
[node_link]
bandwidth = "12GB"                  # per direction, of all messages that leave or enter a node
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import tomli_w

from ..ir.cluster import MOST_DEVICES, OP_CLASSES, Cluster, Device, Link, refuse_too_many
from ..ir.errors import ConfigError, shown
from ..ir.graph import DTYPE_BYTES
from ..ir.text import LARGEST, parse_bytes, parse_toml, refuse_unknown, shortened, write_whole

_TOP = ("name", "device", "within_node", "between_nodes", "groups", "switches", "node_link")
_LINK = ("bandwidth", "latency_s", "overhead_s", "overhead_s_per_byte")
_AS_FIELDS = ("flops_per_s", "memory_bytes_per_s", "efficiency", "launch_s", "node", "group", "switch")
_HOST_LINKS = ("host_link", "host_link_back")
_DEVICE = ("name", "count", "memory", *_AS_FIELDS, *_HOST_LINKS, "host_memory")


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file; see the module's docstring.

    Raises: ConfigError if it is missing, no TOML, or has a key or value that is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read cluster {path}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="write it in UTF-8") from None
    table = parse_toml(text, str(path))
    try:
        return _cluster(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {shortened(error.message)}", hint=error.hint) from None


def _cluster(table: Mapping[str, Any]) -> Cluster:
    refuse_unknown(table, _TOP, "the file")
    rows = table.get("device", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise ConfigError("no [[device]] table", hint="add one table per kind of device")
    kinds = [_kind(row, f"device {index + 1}") for index, row in enumerate(rows)]
    refuse_too_many(sum(count for _, count in kinds))
    devices = tuple(device for device, count in kinds for _ in range(count))
    if "within_node" not in table:
        raise ConfigError("no [within_node] table", hint='add one with bandwidth = "12GB", for instance')
    nodes = {device.node for device in devices}
    if len(nodes) > 1 and "between_nodes" not in table:
        raise ConfigError(
            f"devices are in {len(nodes)} nodes and there is no [between_nodes] table",
            hint='add one with bandwidth = "12GB", for instance',
        )
    return Cluster(
        devices=devices,
        within_node=link_of(table["within_node"], "within_node"),
        between_nodes=_optional(table, "between_nodes"),
        groups=_links(table, "groups"),
        switches=_links(table, "switches"),
        node_link=_optional(table, "node_link"),
    )


def _links(table: Mapping[str, Any], key: str) -> dict[str, Link]:
    rows = table.get(key, {})
    if not isinstance(rows, dict):
        raise ConfigError(f"{key} is not a table", hint=f'write [{key}] and name = {{ bandwidth = "12GB" }}')
    return {name: link_of(row, f"{name} of {key}") for name, row in rows.items()}


def _optional(table: Mapping[str, Any], key: str, where: str = "") -> Link | None:
    return link_of(table[key], key + where) if key in table else None


def _kind(row: Mapping[str, Any], where: str) -> tuple[Device, int]:
    refuse_unknown(row, _DEVICE, where)
    for key in ("name", "memory"):
        if key not in row:
            raise ConfigError(f"{where} has no {key}", hint=f"add {key} to its table")
    device = Device(
        name=str(row["name"]),
        memory_bytes=_bytes(row, "memory", where),
        flops_per_s=_rates(row, "flops_per_s", where, tuple(DTYPE_BYTES)),
        memory_bytes_per_s=_number(row, "memory_bytes_per_s", where),
        efficiency=_rates(row, "efficiency", where, OP_CLASSES),
        launch_s=_number(row, "launch_s", where),
        node=_whole(row, "node", where, default=0),
        group=_name(row, "group", where),
        switch=_name(row, "switch", where),
        **{key: _optional(row, key, f" of {where}") for key in _HOST_LINKS},
        host_memory_bytes=_bytes(row, "host_memory", where) if "host_memory" in row else 0,
    )
    count = _whole(row, "count", where, default=1, below=inf)
    if not 1 <= count <= MOST_DEVICES:
        hint = f"use at least 1 and at most {MOST_DEVICES}, or drop the table"
        raise ConfigError(f"{where} has count {shown(count)}", hint=hint)
    return device, count


def link_of(row: Any, where: str) -> Link:
    """A link's table. Raises: ConfigError that says `where`."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a table", hint="write { bandwidth = ..., latency_s = ... }")
    refuse_unknown(row, _LINK, where)
    if "bandwidth" not in row:
        raise ConfigError(f"{where} has no bandwidth", hint='add bandwidth = "12GB", bytes per second')
    bandwidth = row["bandwidth"]
    per_second = float(bandwidth) if isinstance(bandwidth, float) else _bytes(row, "bandwidth", where)
    rest = {key: _number(row, key, where) for key in _LINK if key != "bandwidth"}
    try:
        return Link(bandwidth_bytes_per_s=per_second, **rest)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None


def _name(row: Mapping[str, Any], key: str, where: str) -> str | None:
    name = row.get(key)
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"{where}: {key} is {shown(name)}", hint='write a name, as "left"')
    return name


def _bytes(row: Mapping[str, Any], key: str, where: str) -> int:
    return parse_bytes(row[key], what=f"{key} of {where}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST


def _number(row: Mapping[str, Any], key: str, where: str) -> float:
    value = row.get(key, 0.0)
    if not _is_number(value):
        hint = "write a number that is at least 0 and below 1e30"
        raise ConfigError(f"{where}: {key} is {shown(value)}", hint=hint)
    return float(value)


def _whole(row: Mapping[str, Any], key: str, where: str, *, default: int, below: float = LARGEST) -> int:
    value = row.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        hint = "write a whole number, at least 0 and below 1e30"
        raise ConfigError(f"{where}: {key} is {shown(value)}", hint=hint)
    return value


def _rates(row: Mapping[str, Any], key: str, where: str, known: tuple[str, ...]) -> dict[str, float]:
    rates = row.get(key, {})
    if isinstance(rates, dict):
        refuse_unknown(rates, known, f"{key} of {where}")
    if not isinstance(rates, dict) or not all(_is_number(rate) for rate in rates.values()):
        hint = f"write {key} = {{ name = number, ... }}, each at least 0 and below 1e30"
        raise ConfigError(f"{where}: {key} is {shown(rates)}", hint=hint)
    return {name: float(rate) for name, rate in rates.items()}


def save_cluster(cluster: Cluster, path: Path, *, note: str = "") -> None:
    """Write a cluster file that `load_cluster` reads as an equal cluster.

    note: lines of comment for its head.
    Raises: ConfigError if the file cannot be written.
    """
    rows = [_row(device, len(list(same))) for device, same in groupby(cluster.devices)]
    table: dict[str, Any] = {"device": rows, "within_node": _link_row(cluster.within_node)}
    for key in ("between_nodes", "node_link"):
        if (link := getattr(cluster, key)) is not None:
            table[key] = _link_row(link)
    for key in ("groups", "switches"):
        if links := getattr(cluster, key):
            table[key] = {name: _link_row(link) for name, link in links.items()}
    head = "".join(f"# {line}".rstrip() + "\n" for line in note.splitlines())
    write_whole(path, head + tomli_w.dumps(table))


def _row(device: Device, count: int) -> dict[str, Any]:
    """Leave out what has its default."""
    row: dict[str, Any] = {"name": device.name, "count": count, "memory": device.memory_bytes}
    for key in _AS_FIELDS:
        if value := getattr(device, key):
            row[key] = dict(value) if isinstance(value, Mapping) else value
    for key in _HOST_LINKS:
        if (link := getattr(device, key)) is not None:
            row[key] = _link_row(link)
    if device.host_memory_bytes:
        row["host_memory"] = device.host_memory_bytes
    return row


def _link_row(link: Link) -> dict[str, float]:
    values = {f.name: float(getattr(link, f.name)) for f in fields(link)}
    bandwidth = values.pop("bandwidth_bytes_per_s")
    return {"bandwidth": bandwidth, **{key: value for key, value in values.items() if value}}

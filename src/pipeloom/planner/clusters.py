"""Cluster files (TOML) and built-in clusters.

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
    host_link = { bandwidth = "12GB", latency_s = 1e-5 }     # bandwidth: per second and direction
    host_memory = "64GiB"
    [within_node]
    bandwidth = "12GB"
    latency_s = 1e-5
    [between_nodes]
    bandwidth = "3GB"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..ir.cluster import OP_CLASSES, Cluster, Device, Link
from ..ir.errors import ConfigError
from ..ir.graph import DTYPE_BYTES
from ..ir.units import parse_bytes

_TOP = ("name", "device", "within_node", "between_nodes")
_LINK = ("bandwidth", "latency_s")
_DEVICE = (
    "name", "count", "memory", "flops_per_s", "memory_bytes_per_s", "efficiency", "launch_s", "node",
    "host_link", "host_memory",
)  # fmt: skip


def cpu_cluster(devices: int, *, memory: str | int | None = None) -> Cluster:
    """Processes of one thread each on this machine.

    memory: cap of each; by default an equal share of the machine's memory.
    The rates are round figures for one core of a current server (AVX2 at 3 GHz peaks at 96e9 single
    precision operations per second; loopback TCP moves about 2 GB/s): for planning before measuring.
    """
    if devices < 1:
        raise ConfigError(f"a cluster of {devices} devices", hint="use at least 1")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = Device(
        name="cpu", memory_bytes=total // devices if memory is None else parse_bytes(memory),
        flops_per_s={"float32": 96e9, "float64": 48e9, "bfloat16": 48e9, "float16": 24e9},
        memory_bytes_per_s=10e9, launch_s=4e-6,
        efficiency={"matmul": 0.8, "attention": 0.4, "convolution": 0.6, "default": 0.5},
    )  # fmt: skip
    return Cluster(devices=(device,) * devices, within_node=Link(bandwidth_bytes_per_s=2e9, latency_s=1e-4))


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file; see the module's docstring.

    Raises: ConfigError if it is missing, no TOML, or has a key or value that is not understood.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read cluster {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="mend that line") from None
    try:
        return _cluster(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None


def _cluster(table: Mapping[str, Any]) -> Cluster:
    _refuse_unknown(table, _TOP, "the file")
    rows = table.get("device", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise ConfigError("no [[device]] table", hint="add one table per kind of device")
    devices = tuple(d for index, row in enumerate(rows) for d in _devices(row, f"device {index + 1}"))
    if "within_node" not in table:
        raise ConfigError("no [within_node] table", hint='add one with bandwidth = "12GB", for instance')
    between = table.get("between_nodes")
    return Cluster(
        devices=devices,
        within_node=_link(table["within_node"], "within_node"),
        between_nodes=None if between is None else _link(between, "between_nodes"),
    )


def _devices(row: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    _refuse_unknown(row, _DEVICE, where)
    for key in ("name", "memory"):
        if key not in row:
            raise ConfigError(f"{where} has no {key}", hint=f"add {key} to its table")
    host = row.get("host_link")
    device = Device(
        name=str(row["name"]),
        memory_bytes=_at(where, parse_bytes, row["memory"]),
        flops_per_s=_rates(row, "flops_per_s", where, tuple(DTYPE_BYTES)),
        memory_bytes_per_s=_number(row, "memory_bytes_per_s", where),
        efficiency=_rates(row, "efficiency", where, OP_CLASSES),
        launch_s=_number(row, "launch_s", where),
        node=_whole(row, "node", where, default=0),
        host_link=None if host is None else _link(host, f"host_link of {where}"),
        host_memory_bytes=_at(where, parse_bytes, row["host_memory"]) if "host_memory" in row else 0,
    )
    count = _whole(row, "count", where, default=1)
    if count < 1:
        raise ConfigError(f"{where} has count {count}", hint="use at least 1, or drop the table")
    return (device,) * count


def _link(row: Any, where: str) -> Link:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a table", hint="write { bandwidth = ..., latency_s = ... }")
    _refuse_unknown(row, _LINK, where)
    if "bandwidth" not in row:
        raise ConfigError(f"{where} has no bandwidth", hint='add bandwidth = "12GB", bytes per second')
    bandwidth = row["bandwidth"]
    per_second = float(bandwidth) if isinstance(bandwidth, float) else _at(where, parse_bytes, bandwidth)
    return Link(bandwidth_bytes_per_s=per_second, latency_s=_number(row, "latency_s", where))


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{where} has the unknown key {key!r}", hint=hint)


def _at(where: str, read: Any, value: Any) -> int:
    try:
        return int(read(value))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _number(row: Mapping[str, Any], key: str, where: str) -> float:
    value = row.get(key, 0.0)
    if not _is_number(value):
        raise ConfigError(f"{where}: {key} is {value!r}", hint="write a number that is at least 0")
    return float(value)


def _whole(row: Mapping[str, Any], key: str, where: str, *, default: int) -> int:
    value = row.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where}: {key} is {value!r}", hint="write a whole number")
    return value


def _rates(row: Mapping[str, Any], key: str, where: str, known: tuple[str, ...]) -> dict[str, float]:
    rates = row.get(key, {})
    if isinstance(rates, dict):
        _refuse_unknown(rates, known, f"{key} of {where}")
    if not isinstance(rates, dict) or not all(_is_number(rate) for rate in rates.values()):
        raise ConfigError(f"{where}: {key} is {rates!r}", hint=f"write {key} = {{ name = number, ... }}")
    return {name: float(rate) for name, rate in rates.items()}

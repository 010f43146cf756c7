"""Built-in devices: figures with their sources, one TOML file each in `catalogue/`.

    name = "card-40"
    aliases = ["card"]
    like = "card-80"                     # has that device's figures and sources, but for those given here
    without = ["switch"]                 # and for these
    about = "one line"
    [sources]
    sheet = "vendor, name of the datasheet (year)"
    [figures]
    memory = { value = "40GiB", source = "sheet" }
    flops_per_s.float32 = { value = 19.5e12, source = "sheet" }
    host_link = { bandwidth = "25GB", latency_s = 1e-5, source = "sheet" }

Links that devices share have a `size`: so many neighbours in rank order share it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from ..ir.cluster import Device, Link
from ..ir.errors import ConfigError
from ..ir.text import parse_bytes
from .files import link_of


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a built-in device.

    name: dotted, as "flops_per_s.bfloat16".  table: its keys as written, "source" left out.
    source: who says so: a datasheet, a measurement, or "assumption: ..." with its reason.
    """

    name: str
    table: Mapping[str, Any]
    source: str

    @property
    def value(self) -> Any:
        return self.table["value"]

    @property
    def size(self) -> int:
        return int(self.table["size"])

    @property
    def link(self) -> Link:
        table = {key: value for key, value in self.table.items() if key != "size"}
        return link_of(table, self.name)


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A device that pipeloom knows by name, with the links of the machines it is usually in.

    figures: by name. `memory` less `reserved` is what plans may use; without `memory` the device has a share
        of this machine's. `group` and `switch` are shared by `size` neighbours; `within_node` is the link
        of devices that are in no common group, `between_nodes` of one device to one in another node, and
        `node_link` what all devices of a node share.
    """

    name: str
    about: str
    aliases: tuple[str, ...]
    figures: Mapping[str, Figure]

    def number(self, name: str) -> float:
        return float(self.figures[name].value) if name in self.figures else 0.0

    def bytes(self, name: str) -> int:
        return parse_bytes(self.figures[name].value) if name in self.figures else 0

    def link(self, name: str) -> Link | None:
        return self.figures[name].link if name in self.figures else None

    def numbers(self, prefix: str) -> dict[str, float]:
        return {n.removeprefix(prefix): self.number(n) for n in self.figures if n.startswith(prefix)}

    def device(self, *, memory_bytes: int) -> Device:
        """One such device with so much memory for plans; without a node, a group or a switch."""
        return Device(
            name=self.name,
            memory_bytes=memory_bytes,
            flops_per_s=self.numbers("flops_per_s."),
            memory_bytes_per_s=self.number("memory_bytes_per_s"),
            efficiency=self.numbers("efficiency."),
            launch_s=self.number("launch_s"),
            host_link=self.link("host_link"),
            host_link_back=self.link("host_link_back"),
            host_memory_bytes=self.bytes("host_memory"),
        )


@cache
def built_in_devices() -> Mapping[str, BuiltIn]:
    """All built-in devices by name, in alphabetical order; aliases are not among the keys."""
    folder = files(__package__) / "catalogue"
    found = [tomllib.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".toml")]
    tables = {table["name"]: table for table in found}
    return {name: _built_in(tables, name) for name in sorted(tables)}


def built_in(name: str) -> BuiltIn:
    """The built-in device of that name or alias; capital letters and blanks do not matter.

    >>> built_in("A100-40").name
    'a100-40-sxm'

    Raises: ConfigError with the nearest names if there is none.
    """
    devices = built_in_devices()
    names = {alias: entry for entry in devices.values() for alias in (entry.name, *entry.aliases)}
    wanted = "-".join(name.lower().split())
    if wanted not in names:
        near = get_close_matches(wanted, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(devices)}."
        raise ConfigError(f"no built-in device is called {name!r}", hint=hint)
    return names[wanted]


def peak_flops_per_s(name: str, dtype: str) -> float | None:
    """Operations per second of matrix products in a dtype at most, of the device that PyTorch calls so; None
    for one that is not built in.

    >>> peak_flops_per_s("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops_per_s("some other card", "float32")
    (989500000000000.0, None)
    """
    try:
        return built_in(name).numbers("flops_per_s.").get(dtype)
    except ConfigError:
        return None


def _built_in(tables: Mapping[str, dict[str, Any]], name: str) -> BuiltIn:
    line = [tables[name]]  # behind the devices that it is like
    while "like" in line[0]:
        line.insert(0, tables[line[0]["like"]])
    sources: dict[str, str] = {}
    figures: dict[str, dict[str, Any]] = {}
    for table in line:
        sources |= table.get("sources", {})
        for dropped in table.get("without", []):
            del figures[dropped]
        figures |= dict(_flat(table["figures"]))
    rows = {
        key: ({k: v for k, v in row.items() if k != "source"}, row["source"]) for key, row in figures.items()
    }
    return BuiltIn(
        name=name,
        about=tables[name]["about"],
        aliases=tuple(tables[name].get("aliases", ())),
        figures={key: Figure(name=key, table=row, source=sources[by]) for key, (row, by) in rows.items()},
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables that have a source, by their dotted names."""
    for key, row in table.items():
        if "source" in row:
            yield prefix + key, row
        else:
            yield from _flat(row, f"{prefix}{key}.")

"""Coarser pieces than ops: the repeated layers of a model, and the runs of ops that one module's call makes.

A layer is what one entry of a numbered container makes: `model.layers.3` of a Llama, `encoder.block.0` of a
T5. What stands before, between and behind them (embeddings, the head and the loss) is a piece of its own.

Containers may lie in containers. The outermost one is that of the layers, `layers.3` and not
`layers.3.mlp.0`, as long as its entries run one after another. Entries that run side by side, none reading
what another made, are branches: in `towers.0.layers.3` the layers are those within, if the tower repeats
something there, that is if two entries of the inner container have parameters and the same structure. A
tower that repeats nothing is a layer itself, and so is each of several tables of embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.graph import Op

_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass(frozen=True)
class Piece:
    """Ops [start, end) by position. layer: the FQN of the repeated layer, "" for what is between layers."""

    start: int
    end: int
    layer: str = ""


def numbered(module: str) -> list[str]:
    """The entries of numbered containers that a module is, or is in, the outermost first.

    >>> numbered("towers.0.layers.3.mlp"), numbered("0.1"), numbered("lm_head")
    (['towers.0', 'towers.0.layers.3'], ['0', '0.1'], [])
    """
    return [module[: found.end()] for found in _NUMBERED.finditer(module)]


def container_of(entry: str) -> str:
    """The container of an entry: "towers.0.layers" of "towers.0.layers.3"."""
    return entry.rpartition(".")[0]


def layer_names(ops: Sequence[Op]) -> dict[str, str]:
    """Module -> the layer that it is, or is in; "" if it is in none.

    Takes time ops x (entries of containers) / 64.

    >>> ops = [Op(name=m, target="x", inputs=(), outputs=(), module=m) for m in ("h.3.mlp.0", "lm_head")]
    >>> layer_names(ops)
    {'h.3.mlp.0': 'h.3', 'lm_head': ''}
    """
    entries = {module: numbered(module) for module in dict.fromkeys(op.module for op in ops)}
    if not any(len(found) > 1 for found in entries.values()):
        return {module: found[0] if found else "" for module, found in entries.items()}
    branches = _side_by_side(ops, entries)
    repeated = _repeated(ops, entries)
    # Branches within which there are layers: what else is in them is in no layer.
    forked = {
        outer
        for found in entries.values()
        for outer, inner in zip(found, found[1:], strict=False)
        if container_of(outer) in branches and container_of(inner) in repeated
    }

    def layer(found: list[str]) -> str:
        for place, entry in enumerate(found):
            if entry not in forked:
                return entry
            if place + 1 < len(found) and container_of(found[place + 1]) not in repeated:
                return ""
        return ""

    return {module: layer(found) for module, found in entries.items()}


def _side_by_side(ops: Sequence[Op], entries: Mapping[str, list[str]]) -> set[str]:
    """Containers with several entries, none of which reads, over however many ops, what another one made."""
    number: dict[str, int] = {}
    for found in entries.values():
        for entry in found:
            number.setdefault(entry, len(number))
    # As bits: the entries that an op is in, those of each container, those that a value has come through.
    own = {module: sum(1 << number[entry] for entry in found) for module, found in entries.items()}
    among: dict[str, int] = {}
    for entry, bit in number.items():
        among[container_of(entry)] = among.get(container_of(entry), 0) | 1 << bit
    serial: set[str] = set()
    through: dict[str, int] = {}
    for op in ops:
        before = 0
        for name in op.inputs:
            before |= through.get(name, 0)
        # It reads, over whatever ops, what another entry of its container made: they are in series.
        for entry in entries[op.module]:
            if before & among[container_of(entry)] & ~(1 << number[entry]):
                serial.add(container_of(entry))
        for value in op.outputs:
            through[value.name] = before | own[op.module]
    return {container for container, bits in among.items() if bits.bit_count() > 1} - serial


def _repeated(ops: Sequence[Op], entries: Mapping[str, list[str]]) -> set[str]:
    """Containers of which two entries have parameters and the same ops in modules of the same names."""
    structure: dict[str, list[tuple[str, str]]] = {}
    learns: set[str] = set()
    for op in ops:
        for entry in entries[op.module]:
            structure.setdefault(entry, []).append((op.module[len(entry) :], op.target))
            if op.params:
                learns.add(entry)
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    repeated: set[str] = set()
    for entry in structure.keys() & learns:
        key = container_of(entry), tuple(sorted(structure[entry]))
        if key in seen:
            repeated.add(key[0])
        seen.add(key)
    return repeated


def layers(ops: Sequence[Op]) -> list[Piece]:
    """The ops in pieces, each a layer or what is between two.

    What stands within a layer and is of an earlier one, or of none, belongs to it. A model without numbered
    containers has one piece per call of a module; one without modules one per op.
    """
    layer_of = layer_names(ops)
    names = [layer_of[op.module] for op in ops]
    if not any(names):
        return calls(ops)
    final = {name: index for index, name in enumerate(names)}
    own: list[str] = []
    begun: set[str] = {""}
    current = ""
    for index, name in enumerate(names):
        if name not in begun:
            begun.add(name)
            current = name
        elif not name and current and index > final[current]:
            current = ""
        own.append(current)
    starts = [index for index in range(len(ops)) if index == 0 or own[index] != own[index - 1]]
    ends = [*starts[1:], len(ops)]
    return [Piece(start, end, own[start]) for start, end in zip(starts, ends, strict=True)]


def calls(ops: Sequence[Op]) -> list[Piece]:
    """One piece per call of a module: consecutive ops of one innermost module; per op without modules."""
    pieces: list[Piece] = []
    start = 0
    for index in range(1, len(ops) + 1):
        if index == len(ops) or ops[index].module != ops[start].module or not ops[start].module:
            pieces.append(Piece(start, index, ops[start].module))
            start = index
    return pieces


def borders(pieces: Sequence[Piece], allowed: Sequence[int]) -> list[int]:
    """Where pieces begin, of the positions in which cuts are allowed, and both ends."""
    starts = {piece.start for piece in pieces}
    return [position for position in allowed if position in starts | {allowed[0], allowed[-1]}]


@dataclass(frozen=True)
class WholeModule:
    """A module that is cut in front of, or not at all: a layer, or what else the model holds beside layers.

    name: its FQN.  ops: its own, cheap ones left out.  together: these, and those of the code around it until
    the next module begins, which go with it.
    """

    name: str
    ops: tuple[str, ...]
    together: tuple[str, ...]


def whole_modules(ops: Sequence[Op]) -> list[WholeModule]:
    """The modules of a model, in the order of the forward: its layers (see above), and the largest ones that
    hold no layer. If that is a single one, its own are taken.

    >>> ops = [Op(name=m, target="x", inputs=(), outputs=(), module=m) for m in ("emb", "", "h.0.a", "h.1.a")]
    >>> [(module.name, module.together) for module in whole_modules(ops)]
    [('emb', ('emb', '')), ('h.0', ('h.0.a',)), ('h.1', ('h.1.a',))]
    """
    ops = [op for op in ops if not op.cheap]
    names = _module_names(ops)
    own: dict[str, list[str]] = {}
    together: dict[str, list[str]] = {}
    current, before = "", list[str]()
    for op in ops:
        if name := names[op.module]:
            own.setdefault(name, []).append(op.name)
            current = name
        (together.setdefault(current, []) if current else before).append(op.name)
    if not together:  # nothing is in a module: then nothing is cut
        return []
    first = next(iter(together))
    together[first] = before + together[first]
    return [WholeModule(name, tuple(own[name]), tuple(together[name])) for name in own]


def _module_names(ops: Sequence[Op]) -> dict[str, str]:
    """Module -> the whole module that it is, or is in; "" if it holds several."""
    layer_of = layer_names(ops)
    holders = {part for layer in layer_of.values() for part in _outer(layer)[:-1]} | {""}
    names = {
        module: layer or next((part for part in _outer(module) if part not in holders), "")
        for module, layer in layer_of.items()
    }
    only, *others = set(names.values()) - {""} or {""}
    if others or not any(module.startswith(f"{only}.") for module in names):
        return names
    inner = {module: module.removeprefix(f"{only}.") if module != only else "" for module in names}
    below = _module_names([replace(op, module=inner[op.module]) for op in ops])
    return {module: f"{only}.{below[part]}" if below[part] else "" for module, part in inner.items()}


def _outer(module: str) -> list[str]:
    """The modules that hold a module, the outermost first, and it: "a", "a.b", "a.b.c"."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]

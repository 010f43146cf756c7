"""Checkpoints that do not depend on the plan: saved on two ranks, loaded on one or on five.

Names are made from the model's own FQNs: `model.<fqn>` for parameters and buffers, `optimizer.<fqn>.<state
name>` for optimizer state that is a tensor, `previous.<fqn>` for the version of the weights before the
newest. Each rank writes one safetensors file with the tensors of which it is the lowest holder; all else
stands in JSON (`checkpoint_directory`). Of a parameter that is split by words each rank writes the rows
that it has, and reads those that it needs, whatever parts they were saved in.

Hyper-parameters belong to a parameter, not to a numbered group, so that they find their way when parameters
are spread over other ranks.

One rank's failure is everybody's: ranks agree on the outcome before and after each step that can fail, so
that none of them waits for another that has given up. With several machines the directory must be one that
all of them see.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import (
    tree_flatten,
    tree_map,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from ..ir.errors import CheckpointError, of_type, shown
from ..ir.graph import PartRows
from . import checkpoint_directory as files
from .channel import Channel
from .checkpoint_directory import SCHEMA, Index

T = TypeVar("T")

_PLAIN = (bool, int, float, str, type(None))
_OF_MASTERS = {"float32", "bfloat16", "float16"}


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """One rank's part of the training state.

    parameters, buffers: original FQN -> tensor; loading fills these tensors in place. A tied parameter
        stands under its first FQN on every rank that has a replica; the lowest such rank writes it.
    optimizers: each parameter they hold must be one of `parameters` (the same object).
    aliases: other FQN of a tied parameter -> its first FQN.
    previous: trained parameters of the version before the newest, see `ir.weight_policies`; empty without
        one. Loading adds those that the checkpoint has, if `keeps_previous`.
    rows: of the parameters that are parts of one.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizers: tuple[Optimizer, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    previous: dict[str, Tensor] = field(default_factory=dict)
    keeps_previous: bool = False
    rows: Mapping[str, PartRows] = field(default_factory=dict)

    def own_name(self, name: str) -> str:
        """Of a tensor, or of what it is a part of, in the user's model."""
        return self.rows[name].whole if name in self.rows else name

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, or of what it is a part of."""
        shape = tuple(self.model[name].shape)
        return (self.rows[name].of, *shape[1:]) if name in self.rows else shape

    def stored(self, name: str, key: str, tensor: Tensor) -> str:
        """The key under which a tensor like a parameter is saved. What an optimizer keeps besides those, such
        as a count of steps, is the same for each part."""
        rows = self.rows.get(name)
        like = rows is not None and tensor.ndim > 0 and tensor.shape[0] == len(self.model[name])
        return files.key_of(key, (rows.start, rows.stop) if rows is not None and like else None)

    @property
    def model(self) -> dict[str, Tensor]:
        """Parameters and buffers by FQN, without their autograd history."""
        return {name: tensor.detach() for name, tensor in {**self.parameters, **self.buffers}.items()}

    def optimized(self) -> Iterator[tuple[Optimizer, dict[str, Any], list[str]]]:
        """(optimizer, one of its parameter groups, the FQNs in that group)."""
        names = {id(tensor): name for name, tensor in self.parameters.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if foreign := [p for p in group["params"] if id(p) not in names]:
                    raise CheckpointError(
                        f"the optimizer holds a {list(foreign[0].shape)} tensor that is not the model's",
                        hint="give the optimizer the parameters it is called with, and nothing else",
                    )
                yield optimizer, group, [names[id(p)] for p in group["params"]]


def save(
    directory: Path,
    state: TrainState,
    *,
    step: int,
    extra: Mapping[str, Any],
    channel: Channel | None = None,
    keep: int = 2,
) -> Path:
    """Save the training state of all ranks as `directory/step-XXXXXXXX`.

    Every rank calls it. A crash at any moment leaves the checkpoints that were complete before.

    step: optimizer steps done.  extra: whatever else resuming needs, JSON-able, rank 0's is kept.
    channel: to the other ranks, if there are any.  keep: newest checkpoints kept, at least 1.

    Raises: CheckpointError, on all ranks, if any of them cannot write its part.
    """
    rank, problem, tensors = channel.rank if channel else 0, None, dict[str, Tensor]()
    index = Index(schema=SCHEMA, step=step, model={})
    partial = directory / (files.name_of(step) + ".partial")
    try:
        tensors, index = _flatten(state, step=step, extra=extra)
        if rank == 0:
            files.prepare(directory, step)
    except CheckpointError as error:
        problem = error
    parts = _agree(problem, (index, list(tensors)), channel, _SAVE)
    lower = {key for _, keys in parts[:rank] for key in keys}
    name, written, problem = f"rank-{rank}.safetensors", dict[str, tuple[int, int]](), None
    tensors = {key: tensor for key, tensor in tensors.items() if key not in lower}
    try:
        if tensors:
            _write(partial / name, tensors)
        written = files.checksums(partial, [name] if tensors else [])
    except (OSError, SafetensorError) as error:
        # The library's text is long; a full disk is the usual reason.
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        problem = CheckpointError(
            f"cannot write checkpoint {partial.with_suffix('')}: {reason}",
            hint="is the disk full, and do all ranks see it? checkpoints that were complete before stay",
        )
    try:
        sums = _agree(problem, written, channel, _SAVE)
    except CheckpointError:
        if rank == 0:
            files.discard(partial)
        raise
    problem = None
    if rank == 0:
        try:
            files.publish(partial, _merge(parts, sums), keep=keep)
        except CheckpointError as error:
            problem = error
    _agree(problem, None, channel, _SAVE)
    return partial.with_suffix("")


def load(
    directory: Path,
    state: TrainState,
    *,
    channel: Channel | None = None,
    refuse: Callable[[Mapping[str, Any]], None] = lambda extra: None,
    overwrite: Callable[[], None] = lambda: None,
) -> tuple[int, dict[str, Any]]:
    """Fill `state` from the newest checkpoint in `directory` (or from that checkpoint itself).

    Every rank calls it with its own part, however the parts were spread when saving. The parameters and
    buffers are filled in place; optimizers may be fresh ones without state yet.

    refuse: called with `extra`; raises CheckpointError if it is of another run.
    overwrite: called just before the first tensor of `state` is written.
    Returns: the step it was saved at, and `extra`.
    Raises: CheckpointError, on all ranks, if the checkpoint is missing, damaged, or of another model or
        optimizer. Damage and mismatches are found before anything is overwritten.
    """
    rank, ranks = (channel.rank, channel.ranks) if channel else (0, 1)
    problem, index, saved, path = None, None, None, directory
    try:
        path = files.newest(directory)
        index = files.read_index(path)
        files.verify(path, index, share=rank, shares=ranks)
        saved = SavedTensors(path, index)
        _require_fits(state, index)
        refuse(index.extra)
    except CheckpointError as error:
        problem = error
    seen = _agree(problem, (path.name, [*map(state.own_name, state.model)]), channel, _LOAD)
    assert index is not None and saved is not None
    for other, (name, _) in enumerate(seen):
        if name != seen[0][0]:
            raise CheckpointError(
                f"in {directory} rank 0 finds {seen[0][0]} and rank {other} finds {name}",
                hint="put checkpoints in a directory that all machines share",
            )
    leftover = sorted(set(index.model) - {name for _, names in seen for name in names})
    if leftover:
        more = f" and {len(leftover) - 1} more" if len(leftover) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} holds {leftover[0]}{more}, which the model does not have",
            hint="load a checkpoint of this model",
        )
    overwrite()
    try:
        for name, tensor in state.model.items():
            own = state.own_name(name)
            tensor.copy_(saved.read(f"model.{own}", own, state.rows.get(name)))
        for name, parameter in state.parameters.items() if state.keeps_previous else ():
            own = state.own_name(name)
            if {*index.keys(key := f"previous.{own}", own)} <= index.tensors.keys():
                before = saved.read(key, own, state.rows.get(name))
                state.previous[name] = torch.empty_like(parameter.detach()).copy_(before)
        _restore_optimizers(state, index, saved)
    except CheckpointError as error:
        problem = error
    _agree(problem, None, channel, _LOAD)
    return index.step, dict(index.extra)


def export_safetensors(directory: Path, path: Path) -> Path:
    """Write the model of a checkpoint (newest, or that one) as a single safetensors file.

    Needs no process group and no model. A tied parameter is stored once; its other names stand in the
    file's metadata, alias -> stored name, as `safetensors.torch.save_model` writes them.

    Returns: the checkpoint that was read.
    Raises: CheckpointError if the checkpoint is missing or damaged, or the file cannot be written.
    """
    source = files.newest(directory)
    if source.resolve() in path.resolve().parents:
        raise CheckpointError(f"{path} is in the checkpoint itself", hint="choose another file")
    index = files.read_index(source)
    files.verify(source, index, share=0, shares=1)
    saved = SavedTensors(source, index)
    _write_model(path, {name: saved.read(f"model.{name}", name) for name in index.model}, index.aliases)
    return source


def _write_model(path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Raises: CheckpointError if it cannot be written."""
    if odd := [name for name, tensor in tensors.items() if _in_pairs(tensor)]:
        raise CheckpointError(
            f"{odd[0]} is {tensors[odd[0]].dtype}, which safetensors does not have",
            hint="take Pipeline.state_dict(), and save it by torch.save",
        )
    try:
        save_file(_apart(tensors), path, metadata={"format": "pt", **aliases})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}", hint="choose another file") from None


class SafetensorsFolder:
    """Weights in one safetensors file, or in the files of a folder, of which only what is asked for is read.

    Raises: CheckpointError if there are none, or a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        found = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(
                f"there are no weights in {path}", hint="name a safetensors file, or a folder of them"
            )
        self._files: dict[str, Any] = {}
        try:
            for file in found:
                opened = safe_open(file, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}", hint="is it a safetensors file?") from None

    def read(self, name: str) -> Tensor | None:
        """A tensor, or None if none has this name."""
        if name not in self._files:
            return None
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def find_weights(
    state: TrainState,
    read: Callable[[str], Tensor | None],
    *,
    channel: Channel,
    stays: Callable[[str], bool] = lambda name: False,
) -> dict[str, Tensor]:
    """Weights for this rank's parameters and buffers, by its names of them.

    read: the model's own name -> tensor, None if there is none of that name. A tied parameter is looked for
        under each.  stays: whether one of that name is not looked for.
    Raises: CheckpointError, on all ranks, if one is missing or has another shape.
    """
    others: dict[str, list[str]] = {}
    for alias, name in state.aliases.items():
        others.setdefault(name, []).append(alias)
    found: dict[str, Tensor] = {}
    problem = None
    for name in state.model:
        own, shape, rows = state.own_name(name), state.whole_shape(name), state.rows.get(name)
        if stays(own):
            continue
        read_names = (read(each) for each in (own, *others.get(own, ())))
        loaded = next((each for each in read_names if each is not None), None)
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != shape:
            what = "is missing"
            if isinstance(loaded, Tensor):
                what = f"is {list(loaded.shape)}, not {list(shape)}"
            elif loaded is not None:
                what = f"is {of_type(loaded)}, no tensor"
            problem = CheckpointError(
                f"among the weights {own} {what}", hint="give the weights of this model, by its own names"
            )
            break
        found[name] = loaded if rows is None else loaded[rows.start : rows.stop]
    channel.agree(problem, None, "all ranks to load weights")
    return found


def joined(tensors: Mapping[str, Tensor], rows: Mapping[str, PartRows]) -> dict[str, Tensor]:
    """Tensors by the names of the user's model, with parts of one put together; all parts must be there."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name in tensors:
        if name in rows:
            parts.setdefault(rows[name].whole, []).append((rows[name].start, tensors[name]))
    for each in parts.values():
        each.sort(key=lambda part: part[0])
    whole = {name: torch.cat([tensor for _, tensor in each]) for name, each in parts.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in rows} | whole


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], channel: Channel
) -> None:
    """Write weights as one safetensors file; rank 0 does it. Raises: CheckpointError on all ranks if it
    cannot be written."""
    problem = None
    if channel.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_model(path, tensors, aliases)
        except OSError as error:
            problem = CheckpointError(f"cannot write {path}: {error}", hint="choose another file")
        except CheckpointError as error:
            problem = error
    channel.agree(problem, None, "rank 0 to write the weights")


_SAVE, _LOAD = "all ranks to save a checkpoint", "all ranks to load a checkpoint"


class SavedTensors:
    """The tensors in the files of a checkpoint, whose bytes have been verified.

    Raises: CheckpointError if a file is none of safetensors, or has not what the index says.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self._path, self._index = path, index
        self._files: dict[str, Any] = {}
        for name in sorted(set(index.tensors.values())):
            try:
                self._files[name] = safe_open(path / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._corrupt(name, str(error)) from None
        there = {name: set(file.keys()) for name, file in self._files.items()}
        for key, name in index.tensors.items():
            if key not in there[name]:
                raise self._corrupt(name, f"{shown(key)} is not in it")
        for name, (shape, _) in index.model.items():
            keys, above = index.keys(f"model.{name}", name), 0
            for key, rows in zip(keys, index.parts[name] if len(keys) > 1 else [None], strict=True):
                file, pair = index.tensors[key], (2,) if key in index.complex else ()
                expected = shape if rows is None else (rows[1] - rows[0], *shape[1:])
                actual = tuple(self._files[file].get_slice(key).get_shape())
                if actual != (*expected, *pair) or (rows is not None and rows[0] != above):
                    raise self._corrupt(
                        file, f"{shown(key)} is {list(actual)}, and not {shown(list(expected))}"
                    )
                above = 0 if rows is None else rows[1]
            if len(keys) > 1 and above != shape[0]:
                raise self._corrupt(file, f"{shown(name)} has {shown(list(shape))}, its parts {above} rows")

    def names(self, prefix: str, fqn: str) -> list[str]:
        """What stands behind a prefix in the keys of a parameter's tensors, whole or in parts."""
        ends = tuple(files.key_of("", rows) for rows in self._index.parts.get(fqn, ()))
        found: dict[str, None] = {}
        for key in self._index.tensors:
            if key.startswith(prefix):
                end = next((end for end in ends if key.endswith(end)), "")
                found[key.removeprefix(prefix).removesuffix(end)] = None
        return list(found)

    def read(self, key: str, fqn: str, rows: PartRows | None = None) -> Tensor:
        """A tensor of a parameter or buffer, or some of its rows."""
        keys = self._index.keys(key, fqn)
        if len(keys) == 1:
            part = None if rows is None else (rows.start, rows.stop)
            return self._read(key, part, of=0 if rows is None else rows.of)
        start, stop = (0, self._index.parts[fqn][-1][1]) if rows is None else (rows.start, rows.stop)
        inside = [
            self._read(part, (max(start, a) - a, min(stop, b) - a), of=b - a)
            for part, (a, b) in zip(keys, self._index.parts[fqn], strict=True)
            if a < stop and start < b
        ]
        return inside[0] if len(inside) == 1 else torch.cat(inside)

    def _read(self, key: str, rows: tuple[int, int] | None, *, of: int) -> Tensor:
        """of: how many rows a tensor has that is not the same for all of them."""
        if (name := self._index.tensors.get(key)) is None:
            raise files.corrupt(self._path, f"it has some parts of {shown(key)} only")
        try:
            stored = self._files[name].get_slice(key)
            shape = stored.get_shape()
            if rows is not None and shape and shape[0] == of:
                tensor: Tensor = stored[rows[0] : rows[1]]
            else:
                tensor = self._files[name].get_tensor(key)
            return torch.view_as_complex(tensor) if key in self._index.complex else tensor
        except (OSError, SafetensorError, RuntimeError) as error:
            raise self._corrupt(name, f"{shown(key)}: {error}") from None

    def _corrupt(self, name: str, why: str) -> CheckpointError:
        first, *_ = why.split("\n")
        return files.corrupt(self._path, f"{name}: {first}")


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(_apart({k: torch.view_as_real(t) if _in_pairs(t) else t for k, t in tensors.items()}), file)
    files.sync(file)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors takes them: without a copy in memory, but of what is not contiguous or shares its
    storage with something else."""
    taken: set[int] = set()
    dense: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        plain = tensor.contiguous()
        storage = plain.untyped_storage()
        dense[key] = plain.clone() if storage.data_ptr() in taken else plain
        taken.add(storage.data_ptr())
    return dense


def _in_pairs(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.complex32, torch.complex128)


def _merge(parts: list[tuple[Index, list[str]]], written: list[dict[str, tuple[int, int]]]) -> Index:
    """One index out of every rank's; where ranks hold the same name, the lowest rank's entry counts.

    parts: each rank's, with the keys of its tensors.  written: each rank's file, if it has written any.
    """
    indices = [index for index, _ in parts]

    def merged(name: str) -> dict[str, Any]:
        return {key: value for part in reversed(indices) for key, value in getattr(part, name).items()}

    homes = {
        key: f"rank-{rank}.safetensors" for rank, (_, keys) in reversed([*enumerate(parts)]) for key in keys
    }
    return replace(
        indices[0],
        model=merged("model"),
        aliases=merged("aliases"),
        optimizers=merged("optimizers"),
        groups=merged("groups"),
        values=merged("values"),
        complex=tuple(sorted({key for part in indices for key in part.complex})),
        parts={
            name: tuple(sorted({rows for part in indices for rows in part.parts.get(name, ())}))
            for name in sorted({name for part in indices for name in part.parts})
        },
        files={name: sums for file in written for name, sums in file.items()},
        tensors=homes,
    )


def _agree(problem: CheckpointError | None, mine: T, channel: Channel | None, what: str) -> list[T]:
    """See `Channel.agree`."""
    if channel is not None:
        return channel.agree(problem, mine, what)
    if problem is not None:
        raise problem
    return [mine]


def refuse_unsaved(state: TrainState, extra: Mapping[str, Any]) -> None:
    """Raises: CheckpointError as `save` would, of settings of optimizers, or of `extra`."""
    _flatten(state, step=0, extra=extra)


def _flatten(state: TrainState, *, step: int, extra: Mapping[str, Any]) -> tuple[dict[str, Tensor], Index]:
    """This rank's tensors by checkpoint key, and its part of the index."""
    try:
        plain = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra cannot be written as JSON: {error}", hint="use dicts, lists, strings and numbers"
        ) from None
    model = state.model
    tensors = {state.stored(n, f"model.{state.own_name(n)}", t): t for n, t in model.items()}
    tensors |= {
        state.stored(name, f"previous.{state.own_name(name)}", tensor): tensor.detach()
        for name, tensor in state.previous.items()
    }
    parts: dict[str, tuple[tuple[int, int], ...]] = {}
    for name in model:
        if (rows := state.rows.get(name)) is not None:
            parts[rows.whole] = (*parts.get(rows.whole, ()), (rows.start, rows.stop))
    kinds: dict[str, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for optimizer, group, names in state.optimized():
        hyper = {key: _plain_hyper(key, value) for key, value in group.items() if key != "params"}
        for name, parameter in zip(names, group["params"], strict=True):
            own = state.own_name(name)
            kinds[own], groups[own] = type(optimizer).__name__, hyper
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[state.stored(name, f"optimizer.{own}.{key}", value)] = value.detach()
                    continue
                leaves, shape = tree_flatten(value)
                if odd := [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {own} has {of_type(odd[0])}",
                        hint="checkpoints hold optimizer state that is tensors, numbers, strings or None, "
                        "or lists, tuples and dicts of these",
                    )
                for at, leaf in enumerate(leaves):
                    if isinstance(leaf, Tensor):
                        tensors[state.stored(name, f"optimizer.{own}.{key}.{at}", leaf)] = leaf.detach()
                plain_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                nested = {"shape": treespec_dumps(shape), "leaves": plain_leaves}
                values.setdefault(own, {})[key] = value if isinstance(value, _PLAIN) else nested
    return tensors, Index(
        schema=SCHEMA,
        step=step,
        extra=plain,
        aliases=state.aliases,
        model={state.own_name(n): (state.whole_shape(n), _dtype_name(t)) for n, t in model.items()},
        optimizers=kinds,
        groups=groups,
        values=values,
        complex=tuple(key for key, tensor in tensors.items() if _in_pairs(tensor)),
        parts=parts,
    )


def _require_fits(state: TrainState, index: Index) -> None:
    for name, tensor in state.model.items():
        _refuse_mismatch(state.own_name(name), state.whole_shape(name), _dtype_name(tensor), index)
    for optimizer, _, parameters in state.optimized():
        names = [*map(state.own_name, parameters)]
        for name in names:
            kind = index.optimizers.get(name)
            if kind != type(optimizer).__name__:
                was = "no optimizer" if kind is None else shown(kind)
                raise CheckpointError(
                    f"{name} is trained with {type(optimizer).__name__}, the checkpoint was saved with {was}",
                    hint="use the optimizer of the checkpoint, or load the parameters alone",
                )
        if names:
            _common_hyper(names, index)


def _restore_optimizers(state: TrainState, index: Index, saved: SavedTensors) -> None:
    """Put saved state into the optimizers, fresh ones included.

    Raises: CheckpointError if parameters of one group were saved with different hyper-parameters, or if an
        optimizer does not take its state.
    """
    for optimizer in state.optimizers:
        only_this = TrainState(parameters=state.parameters, optimizers=(optimizer,), rows=state.rows)
        plain = optimizer.state_dict()
        restored: dict[int, dict[str, Any]] = {}
        states: list[tuple[Tensor, dict[str, Any]]] = []
        for (_, group, names), numbered in zip(only_this.optimized(), plain["param_groups"], strict=True):
            if not names:
                continue
            for key, value in _common_hyper([*map(state.own_name, names)], index).items():
                numbered[key] = like_live(value, group.get(key))
            for name, number in zip(names, numbered["params"], strict=True):
                own, rows = state.own_name(name), state.rows.get(name)
                prefix, like = f"optimizer.{own}.", state.parameters[name]
                loaded_state = {
                    key: _own(saved.read(prefix + key, own, rows), like) for key in saved.names(prefix, own)
                }
                for key, value in index.values.get(own, {}).items():
                    if isinstance(value, dict):
                        leaves = [loaded_state.pop(f"{key}.{at}", v) for at, v in enumerate(value["leaves"])]
                        value = tree_unflatten(leaves, treespec_loads(value["shape"]))
                    loaded_state[key] = value
                if loaded_state:
                    restored[number] = loaded_state
                    states.append((like, loaded_state))
        groups = optimizer.param_groups
        try:
            optimizer.load_state_dict({"state": restored, "param_groups": plain["param_groups"]})
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{type(optimizer).__name__} cannot take its state from the checkpoint: "
                f"{type(error).__name__}: {error}",
                hint="load an earlier checkpoint, or the parameters alone",
            ) from None
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        for parameter, loaded_state in states:
            _undo_casts(optimizer.state.get(parameter, {}), loaded_state)
        optimizer.param_groups = groups  # the same objects: one that holds several optimizers may list them


def _own(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy: what is read twice is one memory. Laid out as the parameter, as fused kernels go by memory."""
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _undo_casts(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """PyTorch gives the state of a floating-point parameter that parameter's dtype when it is loaded."""

    def undone(value: Any, loaded: Any) -> Any:
        both = isinstance(value, Tensor) and isinstance(loaded, Tensor)
        return value.to(loaded.device) if both and loaded.dtype != value.dtype else loaded

    for key, value in saved.items():
        if key in state and tree_structure(state[key]) == tree_structure(value):
            state[key] = tree_map(undone, value, state[key])


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_mismatch(name: str, shape: tuple[int, ...], dtype: str, index: Index) -> None:
    if name not in index.model:
        raise CheckpointError(f"the checkpoint has no tensor {name}", hint="load a checkpoint of this model")
    saved_shape, saved_dtype = index.model[name]
    if (tuple(saved_shape), saved_dtype) != (shape, dtype):
        masters = tuple(saved_shape) == shape and {"float32"} < {dtype, saved_dtype} <= _OF_MASTERS
        raise CheckpointError(
            f"{name} is {list(shape)} {dtype}, "
            f"the checkpoint has {str(list(saved_shape)):.60} {saved_dtype:.60}",
            hint="build the model with the sizes and the dtype of the checkpoint"
            + (", and give master_weights as then" if masters else ""),
        )


def _plain_hyper(key: str, value: Any) -> Any:
    """A hyper-parameter as JSON: a scalar tensor (capturable optimizers) becomes its number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain_hyper(key, v) for v in value]
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"optimizer setting {key!r} is {of_type(value)}",
        hint="checkpoints hold settings that are numbers, strings, None, or lists of these",
    )


def like_live(value: Any, live: Any) -> Any:
    """JSON knows neither tuples nor tensors, nor numbers as keys: follow the type of what a live optimizer or
    scheduler has there."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    if isinstance(live, dict) and isinstance(value, dict):
        numbers = bool(live) and all(isinstance(key, int) for key in live)
        keys = {key: int(key) if numbers else key for key in value}
        found = {keys[key]: like_live(each, live.get(keys[key])) for key, each in value.items()}
        return Counter(found) if isinstance(live, Counter) else found
    if isinstance(live, list) and isinstance(value, list):
        return [like_live(each, one) for each, one in zip_longest(value, live[: len(value)])]
    return tuple(value) if isinstance(live, tuple) else value


def _common_hyper(names: list[str], index: Index) -> Mapping[str, Any]:
    for name in names:
        if name not in index.groups:
            raise CheckpointError(
                f"the checkpoint has no optimizer settings of {name}", hint="load another checkpoint"
            )
    first = index.groups[names[0]]
    for name in names[1:]:
        differing = [key for key, value in index.groups[name].items() if first.get(key) != value]
        if differing:
            key = differing[0]
            raise CheckpointError(
                f"{names[0]} and {name} are in one optimizer group, "
                f"but were saved with {key} {first.get(key)} and {index.groups[name][key]}",
                hint="make the same parameter groups as when the checkpoint was saved",
            )
    return first

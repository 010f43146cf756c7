"""Checkpoints that do not depend on the plan: saved on two ranks, loaded on one or on five.

Tensors go through `torch.distributed.checkpoint` (DCP) under names made from the model's own FQNs. One
rank's failure is everybody's: ranks agree on the outcome before and after each step that can fail, so
that none of them waits for another that has given up.

With several machines the directory must be one that all of them see. No file of a checkpoint is code to
run: of DCP's only the tensors' own archives are kept, and what lies where stands in JSON (table.py).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ...ir.errors import CheckpointError
from . import files
from .files import Index
from .state import TrainState, empty_like_saved, flatten, restore_optimizers
from .table import TABLE, SavedTensor, TableReader, TableWriter, read_table

T = TypeVar("T")
Group = dist.ProcessGroup | None


def save(
    directory: Path,
    state: TrainState,
    *,
    step: int,
    extra: Mapping[str, Any],
    group: Group,
    keep: int = 2,
) -> Path:
    """Save the training state of all ranks of `group` as `directory/step-XXXXXXXX`.

    Every rank calls it. A crash at any moment leaves the checkpoints that were complete before.

    step: optimizer steps done.  extra: whatever else resuming needs, JSON-able, rank 0's is kept.
    group: None for one process without torch.distributed.  keep: newest checkpoints kept, at least 1.

    Raises: CheckpointError, on all ranks, if any of them cannot write its part.
    """
    rank, problem, tensors = _rank(group), None, dict[str, Tensor]()
    index = Index(schema=files.SCHEMA, step=step, model={})
    partial = directory / (files.name_of(step) + ".partial")
    try:
        tensors, index = flatten(state, step=step, extra=_as_json(extra))
        if rank == 0:
            files.prepare(directory, step)
    except CheckpointError as error:
        problem = error
    parts = _agree((problem, index), group)
    with _one_error(f"cannot write checkpoint {partial.with_suffix('')}", partial if rank == 0 else None):
        writer = TableWriter(partial, sync_files=True)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        state_dict_saver.save(
            tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
    sums, problem = dict[str, tuple[int, int]](), None
    try:
        sums = files.checksums(partial, _written_by(rank, partial))
    except OSError as error:
        problem = CheckpointError(f"cannot read back {partial}: {error.strerror}", hint="check the disk")
    all_sums = _agree((problem, sums), group)
    problem = None
    if rank == 0:
        try:
            files.publish(partial, _merge(parts, all_sums), keep=keep)
        except CheckpointError as error:
            problem = error
    _agree((problem, None), group)
    return partial.with_suffix("")


def load(directory: Path, state: TrainState, *, group: Group) -> tuple[int, dict[str, Any]]:
    """Fill `state` from the newest checkpoint in `directory` (or from that checkpoint itself).

    Every rank of `group` calls it with its own part, however the parts were spread when saving. The
    parameters and buffers are filled in place; optimizers may be fresh ones without state yet.

    Returns: the step it was saved at, and `extra`.
    Raises: CheckpointError, on all ranks, if the checkpoint is missing, damaged, or of another model or
        optimizer. Damage and mismatches are found before anything is overwritten.
    """
    problem, index, path = None, None, directory
    tensors, table = dict[str, Tensor](), dict[str, SavedTensor]()
    try:
        path = files.newest(directory)
        index = files.read_index(path)
        files.verify(path, index, share=_rank(group), shares=_size(group))
        table = read_table(path, index)
        tensors = empty_like_saved(state, index, {key: t.empty("meta") for key, t in table.items()})
    except CheckpointError as error:
        problem = error
    seen = _agree((problem, (path.name, list(state.model))), group)
    assert index is not None
    _require_same_checkpoint(directory, seen)
    _require_all_loaded(path, index, {name for _, names in seen for name in names})
    with _one_error(f"cannot read checkpoint {path}", None):
        reader = TableReader(path, table)
        state_dict_loader.load(
            dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None
        )
    try:
        restore_optimizers(state, index, tensors)
    except CheckpointError as error:
        problem = error
    _agree((problem, None), group)
    return index.step, dict(index.extra)


def export_safetensors(directory: Path, path: Path) -> Path:
    """Write the model of a checkpoint (newest, or that one) as a single safetensors file.

    Needs no process group and no model. A tied parameter is stored once; its other names stand in the
    file's metadata, alias -> stored name, as `safetensors.torch.save_model` writes them.

    Returns: the checkpoint that was read.
    Raises: CheckpointError if the checkpoint is missing or damaged, or the file cannot be written.
    """
    source = files.newest(directory)
    index = files.read_index(source)
    files.verify(source, index, share=0, shares=1)
    keys = {f"model.{name}": name for name in index.model}
    table = read_table(source, index)
    tensors = {key: table[key].empty("cpu") for key in keys}
    with _one_error(f"cannot read checkpoint {source}", None):
        state_dict_loader.load(dict(tensors), storage_reader=TableReader(source, table), no_dist=True)
    named = {keys[key]: tensor.contiguous() for key, tensor in tensors.items()}
    try:
        save_file(named, path, metadata={"format": "pt", **index.aliases})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}", hint="choose another file") from None
    return source


def _written_by(rank: int, partial: Path) -> list[str]:
    mine = [path.name for path in partial.glob(f"__{rank}_*")]
    return [*mine, TABLE] if rank == 0 else mine


def _merge(parts: list[Index], sums: list[dict[str, tuple[int, int]]]) -> Index:
    """One index out of every rank's; where ranks hold the same name, the lowest rank's entry counts."""

    def merged(name: str) -> dict[str, Any]:
        return {key: value for part in reversed(parts) for key, value in getattr(part, name).items()}

    return replace(
        parts[0],
        model=merged("model"),
        aliases=merged("aliases"),
        optimizers=merged("optimizers"),
        groups=merged("groups"),
        values=merged("values"),
        files={key: value for part in sums for key, value in part.items()},
    )


def _require_same_checkpoint(directory: Path, seen: list[tuple[str, list[str]]]) -> None:
    for rank, (name, _) in enumerate(seen):
        if name != seen[0][0]:
            raise CheckpointError(
                f"in {directory} rank 0 finds {seen[0][0]} and rank {rank} finds {name}",
                hint="put checkpoints in a directory that all machines share",
            )


def _require_all_loaded(path: Path, index: Index, model_names: set[str]) -> None:
    leftover = sorted(set(index.model) - model_names)
    if leftover:
        more = f" and {len(leftover) - 1} more" if len(leftover) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} holds {leftover[0]}{more}, which the model does not have",
            hint="load a checkpoint of this model",
        )


def _as_json(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra cannot be written as JSON: {error}", hint="use dicts, lists, strings and numbers"
        ) from None
    return dict(extra)


def _agree(mine: tuple[CheckpointError | None, T], group: Group) -> list[T]:
    """What every rank brings, in rank order: one all-gather, which every rank must reach.

    So a rank that has failed brings its error instead of raising it.
    Raises: CheckpointError on all ranks, with the error of the lowest rank that brings one.
    """
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * _size(group)
        dist.all_gather_object(everyone, mine, group=group)
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            where = f" (rank {rank})" if rank != _rank(group) else ""
            raise CheckpointError(problem.message + where, hint=problem.hint)
    return [value for _, value in everyone]


@contextmanager
def _one_error(what: str, partial: Path | None) -> Iterator[None]:
    """Turn DCP's failure, which it has already spread to all ranks, into one sentence."""
    try:
        with warnings.catch_warnings():
            # One process is meant when there is no group.
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            yield
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items(), key=lambda item: item[0])
        if partial is not None:
            files.discard(partial)
        # torch's archive writer hides the system's error when the disk is full: the hint says it.
        reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise CheckpointError(
            f"{what}: {reason} (rank {rank})",
            hint="is the disk full? checkpoints that were complete before are untouched",
        ) from None


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def _size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)

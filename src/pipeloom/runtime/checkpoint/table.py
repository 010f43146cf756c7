"""tensors.json: which tensor of a checkpoint lies where. DCP keeps such a table as a pickle, which is code to
run for whoever reads it; here it is JSON, and nothing of it is believed before it was held against the files.

    {"model.0.weight": {"shape": [8, 4], "dtype": "float32",
                        "file": "__0_0.distcp", "offset": 0, "bytes": 1650}, ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ...ir.errors import CheckpointError, shown
from . import files
from .files import Index

TABLE = "tensors.json"


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Where a whole tensor lies.

    dtype: torch's name of it.  file: of the checkpoint's folder.  offset, bytes: its part of that file, in
        bytes; torch's archive around the numbers included.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    bytes: int

    def empty(self, device: str) -> Tensor:
        """A tensor of that kind, with nothing in it yet."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class TableWriter(FileSystemWriter):
    """DCP's writer, with our table instead of its pickle."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        table = {}
        for result in (result for of_rank in results for result in of_rank):
            entry, place = metadata.state_dict_metadata[result.index.fqn], result.storage_data
            assert isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == 1, (
                "ranks save whole tensors"
            )
            table[result.index.fqn] = {
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "file": place.relative_path,
                "offset": place.offset,
                "bytes": place.length,
            }
        files.write_new(Path(self.path) / TABLE, json.dumps(table))


@dataclass(frozen=True)
class _Place:
    """Under the names that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class TableReader(FileSystemReader):
    """DCP's reader, told by a table that was checked. Tensors are read with `weights_only`, as DCP does."""

    def __init__(self, path: Path, table: Mapping[str, SavedTensor]) -> None:
        super().__init__(path)
        self.table = table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries, places = {}, {}
        for name, saved in self.table.items():
            shape = torch.Size(saved.shape)
            first = torch.Size([0] * len(shape))
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, saved.dtype)),
                size=shape,
                chunks=[ChunkStorageMetadata(offsets=first, sizes=shape)],
            )
            places[MetadataIndex(name, first)] = _Place(saved.file, saved.offset, saved.bytes)
        return Metadata(
            state_dict_metadata=dict(entries),
            storage_data=places,
            storage_meta=StorageMeta(load_id=self.load_id),
        )


def read_table(path: Path, index: Index) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint, by key. Raises: CheckpointError if the table is damaged or made up."""
    try:
        if TABLE not in index.files:
            raise ValueError(f"{files.INDEX} does not list it")
        table = msgspec.convert(json.loads(files.read(path / TABLE)), dict[str, SavedTensor])
        for key, saved in table.items():
            _require_possible(key, saved, index)
        for key in index.model:
            _require_as_indexed(key, table.get(f"model.{key}"), index)
    except OSError as error:
        raise CheckpointError(
            f"cannot read checkpoint {path}: {TABLE}: {error.strerror}", hint="check the path"
        ) from None
    except (ValueError, RecursionError) as error:  # json's and msgspec's errors are ValueErrors
        raise CheckpointError(
            f"checkpoint {path} is corrupt: {TABLE}: {error}", hint=files.ELSEWHERE
        ) from None
    return table


def _require_possible(key: str, saved: SavedTensor, index: Index) -> None:
    """Raises: ValueError for what would make a reader leave the folder, or ask for memory without end."""
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(key)} is of {shown(saved.dtype)}, which is no dtype")
    if saved.file not in index.files:
        raise ValueError(f"{shown(key)} is said to lie in {shown(saved.file)}, no file of the checkpoint")
    numbers = (*saved.shape, saved.offset, saved.bytes)
    end = saved.offset + saved.bytes
    if min(numbers) < 0 or end > index.files[saved.file][0]:
        raise ValueError(f"{shown(key)} is said to lie outside of {shown(saved.file)}")
    if math.prod(saved.shape) * dtype.itemsize > saved.bytes or max(saved.shape, default=0) >= 1 << 62:
        raise ValueError(f"{shown(key)} is said to be {shown(list(saved.shape))} in {saved.bytes} bytes")


def _require_as_indexed(key: str, saved: SavedTensor | None, index: Index) -> None:
    shape, dtype = index.model[key]
    if saved is None or (tuple(shape), dtype) != (saved.shape, saved.dtype):
        said = f"{shown(list(shape))} {shown(dtype)}"
        raise ValueError(f"{files.INDEX} has {shown(key)} as {said}, and it has not")

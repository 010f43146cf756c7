"""Copies of residuals in a file, and the places they take there."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import zoo

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import OffloadError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import cut
from pipeloom.runtime.file_tier import PAGE, FileCopy, FileTier
from pipeloom.tracer.stage.functions import Slot
from pipeloom.tracer.stage.trace import stage_residuals

SLOT = Slot("residual", "a")
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, 0)
    yield made
    made.close()


def never() -> None:
    return None


def offload(tier: FileTier) -> FileCopy:
    return tier.offload("0OFFLOAD0", {SLOT: torch.zeros(PAGE // 4)})


def there_and_back(tier: FileTier) -> None:
    copy = offload(tier)
    copy.reload()
    copy.take(never)


def test_no_thread_starts_in_a_step(tier: FileTier) -> None:
    """Where no memory was left for its stack, Python waited for the thread for ever."""
    before = {thread.ident for thread in threading.enumerate()}
    there_and_back(tier)
    assert {thread.ident for thread in threading.enumerate()} == before


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(("call", "asked"), [("pwrite", False), ("pwrite", True), ("preadv", True)])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(EIO, OffloadError), (MemoryError(), OffloadError), (TypeError("nobody thought of it"), TypeError)],
)
def test_it_is_said_and_its_place_and_bytes_are_given_back(
    tier: FileTier,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    asked: bool,
    error: Exception,
    kind: type[Exception],
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(error))
        copy = offload(tier)
        if asked:
            copy.reload()
        said = "rank 0 .* 4.0 KiB at 0OFFLOAD0: Input/" if error is EIO and call == "pwrite" else None
        with pytest.raises(kind, match=said):
            (copy.take if asked else copy.leave)(never)
        if call == "pwrite":
            with pytest.raises(kind):
                copy.gone()
    copy.discard()
    there_and_back(tier)  # copies back follow each other, so the place is given back now
    assert tier.used_bytes == 0
    assert {offload(tier).file_offset, offload(tier).file_offset} == {0, PAGE}
    assert os.fstat(tier._file.fileno()).st_size == 2 * PAGE


def test_steps_after_one_that_failed_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = zoo.job("skips")
    captured = runs.capture_of(job, 2)
    plan = runs.even_plan(job, 1, microbatches=4, schedule="gpipe")
    residuals = stage_residuals(captured, cut(captured.graph, runs.even(captured.graph, 1)), 0)
    plan = replace(plan, memory=MemoryPolicy(stages=(dict.fromkeys(residuals, "offload"),)))
    with Pipeline(job, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        tier = pipeline.tier
        assert isinstance(tier, FileTier)
        pipeline.step(job.batch(0, 8))
        for call in ("pwrite", "preadv"):
            with monkeypatch.context() as broken:
                broken.setattr(os, call, failing(EIO))
                with pytest.raises(OffloadError, match="Input/output error"):
                    pipeline.step(job.batch(1, 8))
            pipeline.step(job.batch(2, 8))
            assert tier.used_bytes == pipeline.ledger.host == 0
        assert tier._allocator._free == [(tier._allocator.end, 0)]

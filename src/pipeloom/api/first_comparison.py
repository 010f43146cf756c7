"""The first time that a model is trained here: two micro-batches as the plan cuts it, and in plain PyTorch.

Capturing a model can lose what no rule foresees. So before a plan's stages train they run two micro-batches
in this process, one after the other, and so does the user's own module: losses, gradients, buffers and an
update have to agree. A model that did is remembered in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from .. import __version__
from ..ir.errors import BatchError, VerifyError
from ..ir.flow import flow_of
from ..ir.graph import OpGraph, storages
from ..ir.memory_policy import KEEP_ALL
from ..ir.plan import Plan
from ..ir.units import format_bytes
from ..profiler.cores import usable_cores
from ..profiler.measure_op import torch_threads
from ..tracer.captured import Captured
from ..tracer.job import Job
from ..tracer.user_code import is_user_file
from .comparison import MakePipeline, Verification, compare
from .kept import cache_folder, keep
from .options import Options

_log = logging.getLogger("pipeloom")

MICROBATCHES = 2
"""The second shows what the first has left behind."""

LIMIT_BYTES = 8 * 2**30
SHARE_OF_MEMORY = 0.25
"""What the comparison may need: at most so much, and this share of the machine's memory."""


MOST_S = 20.0
"""Where by the plan's times computing takes longer than this, smaller micro-batches are compared."""

ENOUGH_S = 10.0
"""They are so small that it takes no longer than this. The model is then captured and traced anew, which
takes seconds itself, so that less than half must be left to compute."""

LONG_S = 5.0
"""A comparison that took longer is mentioned: the first step was late for it."""


def require_equal_once(
    make: MakePipeline, job: Job, plan: Plan, captured: Captured, options: Options
) -> None:
    """Compare, unless `options.compare` is off, the model has been compared before, or it does not fit; that
    and what else could not be compared is said in a warning.

    One rank calls it, before it trains. The model is built twice in this process, on the CPU.
    make: the class of pipelines.
    Raises: VerifyError if the numbers differ.
    """
    if not options.compare:
        return
    remembered = cache_folder("compared") / _key(job, plan, captured, options)
    if remembered.is_file():
        return
    limit = limit_bytes(plan)
    fitting = fitting_rows(captured.graph, plan.microbatch_size, limit)
    if not fitting:
        need = needed_bytes(captured.graph, 1 / plan.microbatch_size)
        _warn(job, f"that needs about {format_bytes(need)}, and {format_bytes(limit)} may be used for it")
        return
    start = time.perf_counter()
    rows = min(fitting, quick_rows(plan))
    try:
        try:
            found = compare_first(make, job, plan, captured, options, rows)
        except BatchError:
            if rows == fitting:
                raise
            rows = fitting  # it takes longer, but it is possible
            found = compare_first(make, job, plan, captured, options, rows)
    except BatchError as error:
        if rows == plan.microbatch_size:
            raise
        few = f"{rows} of its {plan.microbatch_size} rows"
        _warn(job, f"{format_bytes(limit)} may be used for it, enough for {few}, and {error.message}")
        return
    if rows < plan.microbatch_size:
        _say_smaller(job, plan, captured, rows, limit if rows == fitting else None)
    if (took_s := time.perf_counter() - start) > LONG_S:
        _log.warning("%s was compared with plain PyTorch in %.0f s, once for this model", job.name, took_s)
    if not found.passed:
        raise _difference(job, found)
    if not found.independent:
        _warn(job, f"it was compared with {found.reference}")
        return
    keep(remembered, f"equal within {found.tolerance:g}: {found.worst:.3g}\n", what="the comparison")


def compare_first(
    make: MakePipeline,
    job: Job,
    plan: Plan,
    captured: Captured,
    options: Options,
    rows: int | None = None,
) -> Verification:
    """The first micro-batches of a job by the stages of a plan, one by one, and by the module itself.

    make: the class of pipelines.  captured: as the ranks have it.  rows: of each micro-batch, instead of the
    plan's: the model is then captured anew for them, and cut alike.
    """
    plain = Options(seed=options.seed, autocast=options.autocast, timeout_s=options.timeout_s, compare=False)
    one_rank = in_one_rank(plan, captured.graph)
    sgd = replace(job, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with torch_threads(max(torch.get_num_threads(), usable_cores())):  # the other ranks wait meanwhile
        return compare(make, sgd, one_rank, options=plain, seed=0, captured=captured, rows=rows)


def in_one_rank(plan: Plan, graph: OpGraph) -> Plan:
    """The stages of a plan on one rank, with `MICROBATCHES` micro-batches, all forwards first.

    Two micro-batches are in flight, as in the plan, so that what one changes under the other shows.
    """
    order = flow_of(plan.stage_graph(graph)).order
    parts = [f"{s}F{m}" for m in range(MICROBATCHES) for s in order]
    parts += [f"{s}B{m}" for m in range(MICROBATCHES) for s in reversed(order)]
    return replace(
        plan,
        placement=(0,) * len(plan.stages),
        schedule="gpipe",
        schedule_rows=(" ".join(parts),),
        microbatches=MICROBATCHES,
        caps=(),
        peaks=(),
        memory=KEEP_ALL,
        weights="flush",
        width=1,
    )


def fitting_rows(graph: OpGraph, rows: int, limit: int) -> int:
    """Rows of the largest micro-batches with which the comparison keeps a limit in bytes, at most `rows`; 0
    if not even one row does."""
    state = needed_bytes(graph, 0.0)
    values = needed_bytes(graph) - state
    if state > limit:
        return 0
    return rows if state + values <= limit else int((limit - state) * rows // values)


def quick_rows(plan: Plan) -> int:
    """Rows of the largest micro-batches that are compared in time, by the plan's times; at least 1."""
    microbatch_s = sum(stage.forward_s + stage.input_grad_s + stage.weight_grad_s for stage in plan.stages)
    both_s = 2 * MICROBATCHES * microbatch_s  # by the stages, and by the module
    return plan.microbatch_size if both_s <= MOST_S else max(1, int(plan.microbatch_size * ENOUGH_S / both_s))


def needed_bytes(graph: OpGraph, share: float = 1.0) -> int:
    """About what the comparison holds: parameters, their gradients, and a copy of either, twice, and of each
    micro-batch all values that its forward makes, views aside, with their gradients.

    share: of the rows of the captured micro-batch.
    """
    state = sum(p.bytes for p in graph.parameters) + sum(b.bytes for b in graph.buffers)
    base = storages(graph)
    made = (value for op in graph.ops for value in op.outputs if base[value.name] == value.name)
    values = sum(value.bytes for value in made)
    return 7 * state + math.ceil(2 * MICROBATCHES * values * share)


def limit_bytes(plan: Plan) -> int:
    """What it may hold: no more than a rank of the plan, and no large share of the machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(LIMIT_BYTES, int(SHARE_OF_MEMORY * memory), *plan.caps)


def _say_smaller(job: Job, plan: Plan, captured: Captured, rows: int, limit: int | None) -> None:
    """limit: in bytes, if that is why; else it would have taken too long."""
    why = (
        f"would take more than {MOST_S:.0f} s"
        if limit is None
        else f"needs about {format_bytes(needed_bytes(captured.graph))}, and {format_bytes(limit)} may be "
        "used for it"
    )
    _log.warning(
        "%s was compared with plain PyTorch in micro-batches of %s; with %d, as it is trained, that %s",
        job.name,
        f"{rows} rows" if rows > 1 else "1 row",
        plan.microbatch_size,
        why,
    )


def _warn(job: Job, why: str) -> None:
    _log.warning(
        "%s was not compared with plain PyTorch before its first step: %s; `pipeloom verify` compares a "
        "smaller one of its kind",
        job.name,
        why,
    )


def _difference(job: Job, found: Verification) -> VerifyError:
    name, difference = found.largest
    return VerifyError(
        f"{job.name} does not train as in plain PyTorch: in its first {MICROBATCHES} micro-batches {name} "
        f"differs by {difference:.3g} relative, the tolerance is {found.tolerance:.3g}",
        hint="does its forward read what an earlier call has left, or what is not in its modules? "
        "`pipeloom verify` shows more; compare=false (Options.compare) trains all the same",
    )


def _key(job: Job, plan: Plan, captured: Captured, options: Options) -> str:
    """What a comparison holds for: the graph, how many stages, the user's files, and the versions."""
    model = captured.blueprint.model
    written = [*(type(module) for module in model.modules()), job.loss, job.model]
    files = {str(_file_of(thing)) for thing in written if thing is not None}
    parts = [captured.graph.fingerprint, str(len(plan.stages)), str(options.autocast), str(options.seed)]
    parts += [__version__, torch.__version__, *(_digest(name) for name in sorted(files))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _file_of(thing: object) -> str | None:
    try:
        return inspect.getsourcefile(thing)  # type: ignore[arg-type]
    except TypeError:  # a builtin, or an object that is called
        return None


def _digest(name: str) -> str:
    if not is_user_file(name) or not Path(name).is_file():
        return name
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()

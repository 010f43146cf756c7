"""What was found out about this machine or a model here, kept in the user's cache folder.

Measured figures are kept for a day, as a machine's other users come and go: op times, how ranks slow
each other, and how long compiled pieces take (`compiled_profiles.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from platformdirs import user_cache_path

from . import __version__
from .ir.errors import ConfigError, CutError, PlanError
from .ir.graph import OpGraph
from .ir.plan import Plan
from .ir.profile import Profile, batch_text
from .ir.text import from_json, to_json, write_whole
from .planner.joint.search_record import INTERRUPTED, PREFIX

if TYPE_CHECKING:
    from .profiler.contention import Contention
    from .tracer.captured import Captured

T = TypeVar("T")

A_DAY_S = 24 * 3600.0

OLD_S = 3600.0
"""Op times that are older than this are mentioned: the machine may have had other work then."""

KEEP_VARIABLE = "PIPELOOM_KEEP_PROFILES"
"""Environment: 0 measures each time, and keeps nothing."""

CONTENTION_VARIABLE = "PIPELOOM_CONTENTION"
"""Environment: a factor for all ops instead of measured ones, such as 1."""

SPEED_VARIABLES = ("ATEN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
"""What names of environment variables begin with that choose kernels or how they run."""

_log = logging.getLogger("pipeloom")


def cache_folder(name: str) -> Path:
    return user_cache_path("pipeloom") / name


def keep(path: Path, text: str) -> None:
    """Write a file of the cache folder. If that is not possible, the next run finds out again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except (OSError, ConfigError) as error:
        _log.debug("%s is not kept: %s", path, error)


def daily(
    path: Path,
    kind: type[T],
    measure: Callable[[T | None], T],
    is_whole: Callable[[T], bool] = lambda known: True,
) -> T:
    """What was measured during the last day and kept in a file, or what is measured now, and kept.

    measure: gets what is kept if it is not whole, else None.
    A file that is missing, too old or damaged counts as nothing kept. Old files beside it are removed.
    """
    known = None
    if age_s(path) < A_DAY_S:
        with suppress(OSError, ConfigError):
            known = from_json(path.read_bytes(), kind, what=str(path))
    if known is not None and is_whole(known):
        return known
    measured = measure(known)
    for old in path.parent.glob("*.json"):
        if age_s(old) >= A_DAY_S:
            with suppress(OSError):  # it is gone by now, or nothing may be written there
                old.unlink()
    keep(path, to_json(measured, indent=0) + "\n")
    return measured


def age_s(path: Path) -> float:
    """Seconds since a file was written; infinite if it is not there."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


def cache_key(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def machine_name() -> str:
    """Names this machine as far as its speed goes, PyTorch's version included."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    return cache_key(platform.node(), platform.machine(), model, cores, torch.__version__)


def kept_profile(captured: Captured, measure: Callable[[Captured], Profile]) -> Profile:
    """The times of a captured model's ops on this machine's CPU: those of the last day, or measured now.

    Kept times are of the same ops, arguments, layouts, machine, version and settings of PyTorch. A model that
    is cut between its modules, or has ops that are not PyTorch's own, is measured each time, because what
    these compute may change under the same name.
    """
    if not may_keep(captured):
        return measure(captured)
    path = cache_folder("profiles") / f"{times_key(captured)}.json"
    expected = ("measured", captured.graph.fingerprint, batch_text(captured.graph.inputs))

    def is_whole(known: Profile) -> bool:
        times = [t for c in known.costs.values() for t in (c.forward_s, c.input_grad_s, c.weight_grad_s)]
        complete = known.costs.keys() == {op.name for op in captured.graph.ops}
        same = (known.source, known.graph, known.batch) == expected
        return complete and same and min(times, default=0.0) >= 0.0

    profile = daily(path, Profile, lambda _: measure(captured), is_whole)
    if OLD_S < (age := age_s(path)) < A_DAY_S:  # what is measured now is written now
        text = "%s is planned with op times that were measured %.0f h ago; %s=0 measures them again"
        _log.warning(text, captured.graph.name, age / 3600, KEEP_VARIABLE)
    return profile


def may_keep(captured: Captured) -> bool:
    own = not captured.graph.fallback and all(op.target.startswith("aten.") for op in captured.graph.ops)
    return own and _keeps()


def _keeps() -> bool:
    return os.environ.get(KEEP_VARIABLE) != "0"


def times_key(captured: Captured, *more: object) -> str:
    import torch

    from .profiler.measure_ops import op_signatures

    set_there = sorted(item for item in os.environ.items() if item[0].startswith(SPEED_VARIABLES))
    return cache_key(
        machine_name(),
        __version__,
        captured.autocast,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        set_there,
        captured.graph.fingerprint,
        *op_signatures(captured).items(),
        *more,
    )


def beside_ranks(profile: Profile, graph: OpGraph, ranks: int) -> Profile:
    """A profile measured by one process of this machine's CPU, as ops take beside the other ranks; any other
    profile as it is. ranks: processes that will compute at once on this machine."""
    if ranks < 2 or profile.source != "measured" or profile.device != "cpu":
        return profile
    return contention(ranks).slowed(profile, graph)


def contention(ranks: int) -> Contention:
    from .profiler.contention import Contention, measure_contention  # only now: they import torch

    if given := os.environ.get(CONTENTION_VARIABLE):
        try:
            return Contention(ranks=ranks, products=float(given), others=float(given))
        except ValueError as error:
            what = f"{CONTENTION_VARIABLE} is {given!r}: {error}"
            raise ConfigError(what, hint="use 1 or more") from None
    if not _keeps():
        return measure_contention(ranks)
    path = cache_folder("contention") / f"{machine_name()}-{ranks}.json"
    return daily(path, Contention, lambda _: measure_contention(ranks))


def kept_plan(captured: Captured, make: Callable[[], Plan], *asked: object) -> Plan:
    """The plan of the last day for the same model, machine and request, or the one that `make` makes now. One
    whose search was interrupted is not used again."""
    from .tracer.split_words import split_words

    if not may_keep(captured):
        return make()
    updates = [(p.name, p.trainable, p.given_update) for p in captured.graph.parameters]
    slowed = os.environ.get(CONTENTION_VARIABLE)
    path = cache_folder("plans") / f"{times_key(captured, updates, slowed, *asked)}.json"

    def fits(plan: Plan) -> bool:
        if plan.notes.get(f"{PREFIX}ended") == INTERRUPTED:
            return False
        with suppress(CutError, PlanError):
            return len(plan.stage_graph(split_words(captured, plan.split_words).graph).stages) > 0
        return False

    return daily(path, Plan, lambda _: make(), fits)

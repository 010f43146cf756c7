"""`pipeoffload` beside `dawnpiper` on three devices over a grid of caps, in at most ten minutes; and the
lowest cap at which each has a plan, by bisection.

A transformer of 2 layers of width 2048 and context 1024 (`layered.py`, a vocabulary of 256, so that no logits
bind), 8 micro-batches of 16 rows, by roofline, with AdamW, on 2 devices: A100-40, H200 and this machine's CPU
with its disk to offload to. Caps are shares of what a rank of `1f1b` holds where there is none. All that may
be done with residuals is allowed, or, as `--treat offload` has it, nothing is made again.
"""

from __future__ import annotations

import time
from typing import Any

from layered import layered
from pipeoffload_planner import CONTEXT, ROWS, WIDTH, beside, cluster_of, planned, shown, summary
from pipeoffload_results import keep

from pipeloom.ir.memory_policy import Treatment

DEVICES = ("a100-40", "h200", "cpu")
RANKS, LAYERS, VOCABULARY = 2, 2, 256
OFFLOAD: tuple[Treatment, ...] = ("offload",)
SHARES: tuple[tuple[tuple[Treatment, ...] | None, tuple[float, ...]], ...] = (
    (None, (1.0, 0.75, 0.5, 0.44)),
    (OFFLOAD, (0.9, 0.7, 0.6)),
)
"""What may be done with residuals, and caps; the last of each are below what `dawnpiper` needs on an A100."""

MOST_S = 540.0
"""No cap is begun after so many seconds."""

BISECTED = ("a100-40", "cpu")
PLANNERS = (("dawnpiper", "1f1b"), ("dawnpiper", "gis_h"), ("pipeoffload", "1f1b"))
LEAST, CLOSE = 0.3, 0.02
"""Share of the largest cap from which on the lowest is sought, none having a plan below, and how closely."""


def grid(quick: bool) -> dict[str, Any]:
    """Never slower, and where it alone has a plan."""
    asked = [(device, allowed, share) for allowed, shares in SHARES for share in shares for device in DEVICES]
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for device, allowed, share in asked[-1:] if quick else asked:
        if time.perf_counter() - begin > MOST_S:
            break
        row: dict[str, Any] = {"device": device, "allowed": allowed, "share": share}
        rows.append(row | beside(cluster_of(device, RANKS), LAYERS, share, allowed, vocabulary=VOCABULARY))
        print("  " + ", ".join(f"{name} {shown(value)}" for name, value in rows[-1].items()), flush=True)
        if not quick:
            keep("grid", summary(rows, len(asked)))
    found = summary(rows, len(asked))
    print(
        f"grid: slower than dawnpiper at {found['slower']} of {len(rows)} caps, alone fits at "
        f"{found['alone_fits']}"
    )
    return found


def lowest(quick: bool) -> dict[str, Any]:
    """The lowest cap of each planner, for both that may be done with residuals."""
    graph = layered(LAYERS, hidden=WIDTH, length=CONTEXT, rows=ROWS, vocabulary=VOCABULARY)
    rows = []
    for device in BISECTED[:1] if quick else BISECTED:
        cluster = cluster_of(device, RANKS)
        free = planned(graph, cluster, "exact", "1f1b", None)
        assert free is not None
        whole = max(free.peaks)
        for allowed, _ in SHARES:
            for strategy, schedule in PLANNERS[:1] if quick else PLANNERS:
                low, high, name = LEAST, 1.0, None
                while high - low > CLOSE:
                    share = (low + high) / 2
                    plan = planned(graph, cluster, strategy, schedule, share * whole, allowed, fastest=False)
                    low, high = (share, high) if plan is None else (low, share)
                    name = name if plan is None else plan.schedule
                row = {"device": device, "allowed": allowed, "planner": f"{strategy}, {schedule}"}
                rows.append(row | {"share": high, "bytes": int(high * whole), "schedule": name})
                print(
                    "  " + ", ".join(f"{key} {shown(value)}" for key, value in rows[-1].items()), flush=True
                )
                if not quick:
                    keep("lowest", {"rows": rows, "within": CLOSE})
    return {"rows": rows, "within": CLOSE}

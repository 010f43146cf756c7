"""Real ranks: what they hold of residuals as their number grows, with none, half and all stages offloaded.

One model of 16 alike blocks and a small vocabulary, so that two stages on each of 2, 4 and 8 ranks are 4, 2
and 1 blocks: stages of one size, as the formulas have them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from model import Gpt, batch_of
from plotly import graph_objects
from plots import save_plot
from torch import Tensor

from pipeloom import Job, Options, Pipeline, Plan, plan
from pipeloom.planning import capture, profile
from pipeloom.runtime.launch import launch

RANKS = (2, 4, 8)
CHUNKS = 2
STEPS = 2
BLOCKS, VOCABULARY, MICROBATCH = 16, 256, 2


def even_gpt() -> Gpt:
    return Gpt(BLOCKS, VOCABULARY)


def tokens(seed: int, rows: int) -> dict[str, Tensor]:
    return batch_of(seed, rows, VOCABULARY)


def job() -> Job:
    return Job(model=even_gpt, batch=tokens, name="GPT of 16 blocks")


def train(made: Plan, folder: Path, results: Path) -> None:
    """A few steps of one rank; its residual peaks go to a file."""
    with Pipeline(job(), made, options=Options(offload_dir=folder)) as pipeline:
        predicted, rank = pipeline.expected, pipeline.rank
        own = [stage for stage, home in zip(made.stages, made.placement, strict=True) if home == rank]
        losses = [pipeline.step(tokens(step, MICROBATCH * made.microbatches)) for step in range(STEPS)]
        record = {
            "rank": pipeline.rank,
            "losses": losses,
            "residuals": pipeline.ledger.residual_peak,
            "host": pipeline.ledger.host_peak,
            "predicted": predicted.residual_peaks[pipeline.rank],
            "predicted_total": predicted.peak_bytes(pipeline.rank),
            "predicted_host": predicted.peak_bytes(pipeline.rank, "host"),
            "slot": max(stage.kept_bytes + stage.offloaded_bytes for stage in own),
            "total": pipeline.ledger.peak,
        }
        (results / f"{pipeline.rank}.json").write_text(json.dumps(record))


def memory(quick: bool) -> list[dict[str, Any]]:
    captured = capture(job(), MICROBATCH)
    measured = profile(captured)
    rows = []
    for ranks in RANKS[:1] if quick else RANKS:
        for name in (f"po:offload=0,v={CHUNKS}", f"po_h:v={CHUNKS}", f"po_f:v={CHUNKS}"):
            with tempfile.TemporaryDirectory() as text:
                folder, results = Path(text) / "away", Path(text) / "results"
                results.mkdir()
                made = plan(
                    job(),
                    ranks=ranks,
                    microbatches=4 * ranks,
                    microbatch_size=MICROBATCH,
                    schedule=name,
                    captured=captured,
                    profiled=measured,
                    **({} if "offload=0" in name else {"offload_dir": folder, "treatments": ()}),
                )
                assert launch(train, ranks, args=(made, folder, results)) == 0
                found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]
            most = max(each["residuals"] for each in found)
            off = [
                (each[what] - each[f"predicted_{what}" if what == "host" else "predicted"]) / each["slot"]
                for each in found
                for what in ("residuals", "host")
            ]
            row = {"schedule": name, "ranks": ranks, "times_ranks": most * ranks, "by_rank": found}
            rows.append(row | {"over predicted, in slots": off})
    print_spread(rows)
    if not quick:
        plot(rows)
    return [
        {key: value for key, value in row.items() if key != "by_rank"}
        | {key: [each[key] for each in row["by_rank"]] for key in ("residuals", "predicted", "host")}
        for row in rows
    ]


def print_spread(rows: list[dict[str, Any]]) -> None:
    """How far what the fullest rank holds, times the ranks, is from its mean over the numbers of ranks."""
    for name in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == name]
        measured, predicted = (
            spread([row["ranks"] * max(each[what] for each in row["by_rank"]) for row in own])
            for what in ("residuals", "predicted")
        )
        print(
            f"  {name}: bytes of the fullest rank x ranks are within {measured:.1%} of their mean, "
            f"predicted {predicted:.1%}",
            flush=True,
        )


def spread(values: list[int]) -> float:
    """The largest deviation from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value / mean - 1) for value in values)


def plot(rows: list[dict[str, Any]]) -> None:
    """The most residuals of any rank, measured, and predicted (dashed), over the number of ranks."""
    figure = graph_objects.Figure()
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    for name, ink in zip(names, ("#888888", "#1f77b4", "#d62728"), strict=True):
        own = [row for row in rows if row["schedule"] == name]
        for what, dash in (("residuals", "solid"), ("predicted", "dash")):
            most = [max(each[what] for each in row["by_rank"]) / 2**20 for row in own]
            figure.add_scatter(
                x=[row["ranks"] for row in own],
                y=most,
                mode="lines+markers",
                name=name.split(":")[0] + (", predicted" if dash == "dash" else ""),
                line={"color": ink, "dash": dash},
            )
    figure.update_xaxes(title="ranks", type="log", tickvals=RANKS)
    figure.update_yaxes(title="most residuals of a rank, MiB", rangemode="tozero")
    save_plot(figure, "offloading.png", 720, 420)

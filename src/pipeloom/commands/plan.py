"""pipeloom plan: cut a model into stages, and say what becomes of residuals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ir.errors import ConfigError
from ..ir.text import format_bytes, show_microbatches, show_time
from ..plan_settings import ROWS_OR_COUNT
from ..viewer.table import Column, Table
from .common import (
    FILE,
    MODEL_HELP,
    NEW_FILE,
    emit,
    exclusive,
    job_of,
    json_option,
    load_profile,
    model_argument,
    plan_options,
    settings_of,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..checks.updates import UpdateProof
    from ..ir.plan import Plan
    from ..planner.plan_table import Change, PlannedStage

STEPS_OF_BRANCHES = ("branches.step_s", "no_branches.step_s", "no_branches.sequential_step_s")
"""Notes of a plan that are seconds of a step."""

SHOWN = 5
"""Shapes that --closed-form lists: the chosen one, and the next best."""

CHOSEN = (
    *("replicas", "chunks", "microbatches", "microbatch_size", "max_batch", "best_batch"),
    *("memory", "offload_dir", "profile_file", "pair_nodes", "shard_optimizer", "compile"),
    *("lengths", "split_words", "time_limit"),
)
"""Options that say what --ranks auto chooses, or that do not go with it."""

DESCRIBED = "it is for devices that are described by figures"


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options(auto=" auto: ranks, replicas and micro-batches are chosen for --cluster and --global-batch.")
@click.option("--max-batch", is_flag=True, help="Search the largest micro-batch size that fits.")
@click.option(
    "--best-batch", is_flag=True, help="With --global-batch: search the micro-batch size of the fastest step."
)
@click.option("--profile", "profile_file", type=FILE, help="Use this saved profile instead of measuring.")
@click.option("--planners", is_flag=True, help="List the planners and stop.")
@click.option(
    "--pair-nodes",
    is_flag=True,
    help="Put first and last ranks together on nodes, which then need about as much host memory.",
)
@click.option("--closed-form", is_flag=True, help="With --ranks auto: by formulas, without simulating.")
@click.option("--what-if/--no-what-if", default=True, help="Plan again with 10 % more memory, bandwidth.")
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Whether the ranks of a plan for this machine rehearse a step, to say what it takes.",
)
@click.option("--output", "-o", type=NEW_FILE, help="Write the plan to this JSON file.")
@json_option
def plan(*, planners: bool, closed_form: bool, as_json: bool, **options: Any) -> None:
    """Cut MODEL into stages and print what each runs, takes and holds, what limits the plan, and what a bit
    more memory or bandwidth would buy.

    With --ranks auto it chooses width, depth, rows per micro-batch and recomputation.
    """
    if planners:
        _list(as_json=as_json)
    elif options["ranks"] == "auto":
        _plan_shape(closed_form=closed_form, as_json=as_json, **options)
    elif closed_form:
        raise ConfigError("--closed-form without --ranks auto", hint="add it: --ranks auto --closed-form")
    else:
        _plan(as_json=as_json, **options)


def reported(
    plan: Plan,
    stages: Sequence[PlannedStage],
    changes: Sequence[Change] = (),
    *,
    proof: UpdateProof,
    times: str,
    rehearsed_s: float | None = None,
    not_rehearsed: str = "",
) -> dict[str, Any]:
    """A plan, and what is said about it.

    stages: of the first replica.  changes: what other clusters would gain.  proof: of its updates.
    times: where those of ops come from, "profile" or "roofline".  rehearsed_s: a step of its ranks; None if
    they did not rehearse one, and not_rehearsed says why.
    """
    from .. import plan_request
    from ..plan_split_words import WHOLE_STEP, words_sentence
    from ..planner import plan_table
    from ..planner.branch_gain import branch_figures
    from ..planner.joint.search_record import searched_for, sentences

    step_s = plan.predicted_step_s if rehearsed_s is None else rehearsed_s
    # The steps beside it were only simulated: they are scaled as this one is.
    scale = step_s / plan.predicted_step_s if plan.predicted_step_s else 1.0
    beside = [key for key in (*STEPS_OF_BRANCHES, WHOLE_STEP) if plan.notes.get(key, "none") != "none"]
    notes = {**plan.notes, **{key: str(scale * float(plan.notes[key])) for key in beside}}
    scaled = replace(plan, predicted_step_s=step_s, notes=notes)
    told = searched_for(plan)  # of ops alone, as its bound is
    return {
        "predicted_step_s": step_s,
        "predicted_by": times if rehearsed_s is None else "rehearsal",
        "profiled_step_s": plan.predicted_step_s,  # what its ops make alone, as the plan file has it
        "not_rehearsed": not_rehearsed or None,
        **{key: getattr(plan, key) for key in ("planner", "schedule", "weights")},
        "replicas": plan.width,
        **{key: getattr(plan, key) for key in ("microbatches", "microbatch_size", "graph")},
        "compiled": plan.notes.get(plan_request.COMPILED),
        "split_words": plan.split_words or None,
        "words": words_sentence(scaled),
        "limits": [*plan_table.limits(scaled), *([] if told is None else sentences(told))],
        "branches": branch_figures(scaled) or None,
        "updates": proof,
        "search": told,
        "what_if": [replace(c, step_s=None if c.step_s is None else scale * c.step_s) for c in changes],
        "stages": stages,
    }


def _of_the_step(report: Mapping[str, Any]) -> str:
    """The end of a sentence that says what the predicted step counts."""
    if report["predicted_by"] == "rehearsal":
        return (
            "as its ranks rehearsed it here, with what they do between ops, messages, waits and the "
            f"optimizer; its ops alone make {show_time(report['profiled_step_s'])}"
        )
    timed = "that were timed one by one, without what ranks do between them"
    ops = "by roofline" if report["predicted_by"] == "roofline" else timed
    return f"that is made of ops {ops}; not rehearsed: {report['not_rehearsed']}"


def _plan(
    *,
    model: str | None,
    profile_file: Path | None,
    output: Path | None,
    as_json: bool,
    pair_nodes: bool,
    max_batch: bool,
    best_batch: bool,
    what_if: bool,
    rehearse: bool,
    **options: Any,
) -> None:
    one_size = "a profile is of one size: leave out one"
    compiles = "each size would be compiled: search the size without --compile, then plan for it"
    for one, other, hint in (
        (
            "memory",
            "cluster",
            "say each device's memory in the cluster, as in --cluster '4 x a100-40 with 20GiB'",
        ),
        ("microbatches", "global_batch", ROWS_OR_COUNT),
        ("max_batch", "best_batch", "leave out one"),
        *((search, "profile_file", one_size) for search in ("max_batch", "best_batch")),
        *((other, "lengths", "leave out one") for other in ("max_batch", "best_batch", "profile_file")),
        *((search, "compile", compiles) for search in ("max_batch", "best_batch")),
        ("pair_nodes", "replicas", "leave out one: the replicas of a stage are on neighbouring ranks"),
    ):
        exclusive(one, other, hint=hint)
    settings, profiled = settings_of(options), load_profile(profile_file)
    if pair_nodes:
        from ..planner.refusals import pair_low_with_high

        cluster = settings.described
        if cluster is None:
            raise ConfigError(
                "--pair-nodes without --cluster", hint="name the devices, as in '2 nodes of 8 x a100-80'"
            )
        cluster = replace(cluster, devices=cluster.devices[: settings.ranks])
        settings = settings.changed(cluster=pair_low_with_high(cluster), ranks=settings.ranks)
    why_not = "" if rehearse else "--no-rehearse was given"
    if settings.cluster is not None:
        why_not = DESCRIBED
    elif settings.lengths is not None:
        why_not = "it is the mean of several lengths"
    elif profile_file is not None:
        why_not = f"its costs are those of {profile_file}"
    from ..train.config import Config
    from ..train.rank_processes import RankProcesses

    with RankProcesses(0 if why_not else settings.devices, Config(job=model), needed=False) as processes:
        from .. import machine, plan_request, planning  # torch is loaded here, while the ranks load it, too
        from ..planner.plan_table import plan_rows, prove_plan

        job = job_of(model)
        with _watching() as watch:
            request = planning.make_request(settings, watch=watch)
            if best_batch or max_batch:
                sized_by = planning.best_plan if best_batch else planning.largest_plan
                plan, planned = planning.plan_at_size(request, job, sized_by)
            else:
                plan, planned = planning.plan_size(request, job, profiled=profiled)
            proof = prove_plan(plan, planned.graph)
            if output is not None:
                plan.save(output)
            changes = request.changes(plan, planned) if what_if else []
        rehearsed_s = None
        if not why_not:
            from ..train.measured_steps import measure_steps, why_not_rehearsed

            why_not = why_not_rehearsed(request, plan)
        if not why_not:
            measured = measure_steps(request.options, plan, job, processes, model=model, planned=planned)
            if isinstance(measured, int):
                why_not = f"its ranks ended with exit status {measured}"
            else:
                rehearsed_s = measured.rehearsed_s
    timed = request.local if profiled is None else profiled.source == "measured"
    report = reported(
        plan,
        plan_rows(plan, planned.graph, request.cluster),
        changes,
        proof=proof,
        times="profile" if timed else "roofline",
        rehearsed_s=rehearsed_s,
        not_rehearsed=why_not,
    )
    about = [_of_the_step(report), *plan_request.times_of(plan)]
    if request.options.offload_dir:
        about.append(machine.disk_speed(request.cluster))
    emit(report, _screen(report, about), as_json=as_json)


class _Line:
    """Shows how a search goes on, in one line on standard error if that is a terminal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("planning", total=None, way="")
        self.before, self.last = 0, 0

    def weighed(self, count: int) -> None:
        # A search for another request, as for another size of micro-batches, counts from 1 again.
        self.before += self.last if count < self.last else 0
        self.last = count
        self.progress.update(self.task, completed=self.before + count)

    def trying(self, what: str, best: tuple[str, float] | None, bound_s: float) -> None:
        told = f"; {what}"
        if best is not None and bound_s:
            gap = max(0.0, best[1] / bound_s - 1)
            told += f"; best {show_time(best[1])} ({best[0]}), bound {show_time(bound_s)}, gap {gap:.1%}"
        self.progress.update(self.task, way=told)


@contextmanager
def _watching() -> Iterator[_Line]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = "planning: {task.completed} stages weighed{task.fields[way]}"
    columns = (SpinnerColumn(), TextColumn(text, markup=False), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        yield _Line(progress)


def _screen(report: Mapping[str, Any], about: Sequence[str]) -> Iterator[Table | str]:
    """about: sentences on the step that it takes."""
    stages = report["stages"]
    yield stages_table(stages)
    if ways := _ways(stages):
        yield f"{', '.join(['kept', *ways])}: of one micro-batch's residuals"
    if any(stage.offload_ratio is not None for stage in stages):
        yield _offloadable([(stage.rank, stage.offloadable_stages or 0) for stage in stages])
    each = f"{show_microbatches(report['microbatches'])} of {report['microbatch_size']}"
    each += f" on {report['replicas']} replicas of every stage" if report["replicas"] > 1 else ""
    yield f"predicted step: {show_time(report['predicted_step_s'])} with {report['schedule']}, {each}"
    yield from about
    if report["words"] is not None:
        yield report["words"]
    yield from report["limits"]
    yield str(report["updates"])
    for change in report["what_if"]:
        if change.step_s is None:
            yield f"{change.what}: no plan"
        else:
            yield f"{change.what}: step {show_time(change.step_s)}, {_compared(change.gain)}"


def _compared(gain: float) -> str:
    """
    >>> [_compared(gain) for gain in (0.042, -0.01, -0.0001)]
    ['4.2% faster', '1.0% slower', 'no faster']
    """
    share = f"{abs(gain):.1%}"
    return "no faster" if share == "0.0%" else f"{share} {'faster' if gain > 0 else 'slower'}"


def _ways(stages: Sequence[PlannedStage]) -> list[str]:
    """What is done to residuals, apart from keeping them."""
    return [w for w in ("recomputed", "offloaded") if any(getattr(s, f"{w}_bytes") for s in stages)]


def _listed(ranks: Sequence[int]) -> str:
    """
    >>> _listed((0, 1)), _listed((4, 5, 6, 7)), _listed((0, 2, 4))
    ('0, 1', '4 .. 7', '0, 2, 4')
    """
    in_a_row = len(ranks) > 2 and list(ranks) == [*range(ranks[0], ranks[-1] + 1)]
    return f"{ranks[0]} .. {ranks[-1]}" if in_a_row else ", ".join(map(str, ranks))


def stages_table(stages: Sequence[PlannedStage]) -> Table:
    kinds = ["kept", *ways] if (ways := _ways(stages)) else ["residuals"]
    chain = all(s.reads in (None, (), (s.stage - 1,)) for s in stages)
    nodes = len({s.node for s in stages}) > 1
    columns = [Column("stage"), Column("rank"), Column("node"), Column("reads", left=True), Column("depth")]
    columns += [Column("ops"), Column("layers", left=True)]
    columns += [Column("F ms", "{:.2f}".format), Column("B ms", "{:.2f}".format)]
    columns += [Column(name, format_bytes) for name in ("parameters", *kinds, "peak", "cap")]
    columns += [Column("k", "{:.2f}".format), Column("link", "{:.0%}".format)]
    rows = [
        (
            *(s.stage, _listed(s.ranks), s.node if nodes else None),
            *((None, None) if chain else (", ".join(map(str, s.reads or ())) or "–", s.depth)),
            *(s.ops, s.layers),
            *(s.forward_s * 1e3, (s.input_grad_s + s.weight_grad_s + s.recompute_s) * 1e3),
            *(getattr(s, f"{name}_bytes") for name in ("parameters", *kinds, "peak", "cap")),
            *(s.offload_ratio, s.link_use),
        )
        for s in stages
    ]
    return Table("", columns, rows).without_empty_columns()


def _offloadable(stages: Sequence[tuple[int, int]]) -> str:
    """How many stages of each rank may be offloaded whole. stages: of each its rank, and that number.

    >>> print(_offloadable([(0, 1), (1, 0)]))
    k: copying by computing. Copies hide if these leave whole: 1 of 1 stages of rank 0, 0 of 1 of rank 1
    """
    ranks = [rank for rank, _ in stages]
    counts, allowed = {rank: ranks.count(rank) for rank in ranks}, dict(stages)
    each = {(allowed[rank], count) for rank, count in counts.items()}
    if len(each) == 1 and len(counts) > 1:
        whole = f"{allowed[0]} of the {counts[0]} stages of each rank"
    else:
        listed = [(f"{allowed[rank]} of {counts[rank]}", rank) for rank in sorted(counts)]
        whole = ", ".join(f"{n}{' stages' if i == 0 else ''} of rank {r}" for i, (n, r) in enumerate(listed))
    return f"k: copying by computing. Copies hide if these leave whole: {whole}"


def _list(*, as_json: bool) -> None:
    from ..planner.planners import PLANNERS

    keys = ("granularity", "optimises", "about", "source")
    rows = [{"name": name, **{key: getattr(p, key) for key in keys}} for name, p in PLANNERS.items()]
    heads = ("planner", "granularity", "frees memory", "about", "source")
    columns = [Column(head, left=True) for head in heads]
    emit({"planners": rows}, [Table("", columns, [tuple(r.values()) for r in rows])], as_json=as_json)


def _plan_shape(*, closed_form: bool, as_json: bool, output: Path | None, **options: Any) -> None:
    """Choose width, depth and micro-batches. Raises: ConfigError for options that do not fit."""
    for name in CHOSEN:
        exclusive("ranks", name, hint="leave out one: --ranks auto decides it, or does not take it")
    for name in ("planner", "granularity", "delay_correction", "master_weights"):
        exclusive("closed_form", name, hint="leave out one: formulas take equal parts of repeated layers")
    if closed_form and output is not None:
        raise ConfigError(
            "--closed-form makes no plan that could be written",
            hint="leave it out, and plans are simulated",
        )
    from .. import planning, shapes
    from ..planner.plan_table import plan_rows, prove_plan
    from ..planner.shape_search import rank_shapes

    job = job_of(options["model"])
    request = planning.make_request(settings_of({**options, "ranks": 1}))
    if closed_form:
        ranked = rank_shapes(shapes.shape_request(request, job))
        assert request.options.global_batch is not None, "refused before"
        batch = request.options.global_batch
        best, *others = [
            vars(shape)
            | {"microbatches": shape.microbatches(batch)}
            | {"rows_per_s": rate, "step_s": batch / rate, "peak_bytes": round(peak)}
            for shape, rate, peak in ranked[:SHOWN]
        ]

        def shapes_screen() -> Iterator[Table | str]:
            columns = {
                "width": Column("width"),
                "depth": Column("depth"),
                "microbatch_size": Column("rows"),
                "microbatches": Column("micro-batches"),
                "recompute": Column("recompute", lambda recompute: "yes" if recompute else "no"),
                "rows_per_s": Column("rows/s", "{:.2f}".format),
                "step_s": Column("step", show_time),
                "peak_bytes": Column("peak", format_bytes),
            }
            yield Table(
                "", list(columns.values()), [[row[key] for key in columns] for row in (best, *others)]
            )
            yield (
                f"{len(ranked)} shapes fit, by formulas; chosen: {best['width']} x {best['depth']} stages, "
                f"{show_microbatches(best['microbatches'])} of {best['microbatch_size']} rows in each"
            )

        emit({**best, "next": others}, shapes_screen(), as_json=as_json)
        return
    shaped, model = shapes.plan_shape(request, job)
    plan, shape = shaped.plan, shaped.shape
    proof = prove_plan(plan, model.graph)
    if output is not None:
        plan.save(output)
    rows = plan_rows(plan, model.graph)
    report = reported(plan, rows, proof=proof, times="roofline", not_rehearsed=DESCRIBED)
    count = plan.microbatches // plan.width
    figures = vars(shape) | {
        "microbatches": count,
        "rows_per_s": shaped.rows_per_s,
        "step_s": plan.predicted_step_s,
        "peak_bytes": max(plan.peaks),
        "simulated": shaped.simulated,
        "planner": plan.planner,
        "limits": report["limits"],
        "updates": proof,
        "stages": report["stages"],
    }
    treated = "some residuals recomputed" if shape.recompute else "every residual kept"
    about = [
        _of_the_step(report),
        f"width {shape.width}, depth {shape.depth}, {show_microbatches(count)} of {plan.microbatch_size} "
        f"rows in each pipeline, {treated}",
        f"{shaped.rows_per_s:.2f} rows/s, the most of what was simulated ({shaped.simulated} shapes)",
    ]
    emit(figures, _screen(report, about), as_json=as_json)

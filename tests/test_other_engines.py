"""Plans of whole modules, and what other engines are given of them.

torch's own parsers read what is exported for it. torchtitan 0.3.0 and megatron-core 0.16.1 read theirs where
they are installed; everywhere else stand their rules, written down from those versions.
"""

import csv
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch_net
from commands import bad, good, run
from refusals import refused
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline, schedules as theirs

from pipeloom import Plan, capture, plan
from pipeloom.ir.errors import PipeloomError, PlanError, ScheduleError
from pipeloom.ir.graph import Op
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.other_engines import export_for, stage_modules
from pipeloom.planner.planners import PLANNERS
from pipeloom.planner.search.layer_groups import whole_modules

LAYERS = [f"layers.{n}" for n in range(6)]
MODULES = ["words", "places", *LAYERS, "norm", "head"]


@cache
def captured() -> Any:
    return capture(torch_net.job(), torch_net.ROWS)


def planned(**changes: Any) -> Plan:
    settings = {"ranks": 2, "microbatch_size": torch_net.ROWS, "granularity": "module", **changes}
    settings.setdefault("cluster", f"{settings['ranks'] * settings.get('replicas', 1)} x a100-40")
    return plan(torch_net.job(), captured=captured(), **settings)


@cache
def usual(schedule: str = "1f1b") -> Plan:
    return planned(schedule=schedule)


# Whole modules


def ops_of(*modules: str) -> list[Op]:
    return [Op(name=f"o{n}", target="x", inputs=(), outputs=(), module=m) for n, m in enumerate(modules)]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("stem  stages.0.conv stages.1.conv fc", ["stem", "stages.0", "stages.1", "fc"]),
        ("model.emb model model.h.0.a.b model.h.1 head", ["model.emb", "model.h.0", "model.h.1", "head"]),
        ("net.a.x net.b net", ["net.a", "net.b"]),  # a shell around the model
        ("0.emb 0.h.0.a 0.h.1.a", ["0.emb", "0.h.0", "0.h.1"]),
        ("only only", ["only"]),
        (" ", []),
    ],
)
def test_the_largest_modules_that_hold_no_layer_are_whole(modules: str, expected: list[str]) -> None:
    assert [module.name for module in whole_modules(ops_of(*modules.split(" ")))] == expected


def test_a_module_that_is_called_twice_holds_together_what_is_between() -> None:
    first, second, _ = whole_modules(ops_of("a", "b", "a", "", "c"))
    assert first.ops == ("o0", "o2") and first.together == ("o0", "o2", "o3") and second.ops == ("o1",)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_cuts_between_whole_modules(planner: str) -> None:
    made = planned(ranks=4, planner=planner)
    assert [name for names in stage_modules(made) for name in names] == MODULES


def test_plans_of_ops_and_more_stages_than_modules_are_refused() -> None:
    said = refused(PlanError, stage_modules, planned(ranks=4, granularity="op", planner="balanced"))
    assert "within module" in said and "--granularity module" in said
    assert "stages" in refused(PlanError, planned, ranks=len(MODULES) + 1)


# Torch


def exported(made: Plan, engine: str, csv_file: Path | None = None) -> Any:
    return export_for(made, captured().graph, engine, csv_file)


@pytest.mark.sampled("1f1b", "zb_v")
@pytest.mark.parametrize("schedule", ("1f1b", "interleaved_1f1b", "zb_v", "dualpipev"))
def test_torch_reads_the_order(schedule: str, tmp_path: Path, folder: Path) -> None:
    made, file = usual(schedule), tmp_path / "order.csv"
    made.save(tmp_path / "plan.json")
    words = ("export-plan", tmp_path / "plan.json", "torch_net:job")
    settings = json.loads(good(*words, "--for", "torch", "--csv", file))
    with file.open() as text:
        actions = {
            rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(text))
        }
    stages = len(made.stages)
    assert theirs._validate_schedule(actions, 2, stages, 8) == dict(enumerate(settings["stage_to_rank"]))
    assert {r: " ".join(map(str, row)) for r, row in actions.items()} == {
        rank: row.replace("&", " ") for rank, row in enumerate(made.schedule_rows)
    }
    # It raises where it would hang.
    theirs._add_send_recv(actions, settings["stage_to_rank"].__getitem__, stages)
    assert settings["n_microbatches"] == 8 and settings["schedule_csv"] == str(file)


def test_torch_splits_at_the_points() -> None:
    made, net = usual("interleaved_1f1b"), torch_net.Net().double()
    points = exported(made, "torch").settings["split_points"]
    assert len(points) == 3
    batch = torch_net.batch(0, torch_net.ROWS)
    pipe = pipeline(net, (batch["tokens"],), split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    for stage, modules in enumerate(stage_modules(made)):
        held = {name for name, _ in pipe.get_stage_module(stage).named_parameters()}
        assert held == {n for n, _ in net.named_parameters() if n.startswith(tuple(f"{m}." for m in modules))}


# Torchtitan


def kept(model: nn.Module, names: list[str]) -> set[str]:
    """The parameters that torchtitan 0.3.0 leaves of a model: named children, and named entries of lists."""
    wanted = set()
    for child, module in model.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            wanted |= {name for name in names if name.startswith(f"{child}.")}
        elif child in names:
            wanted.add(child)
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{w}." for w in wanted))}


@pytest.mark.parametrize(
    ("schedule", "from_file", "named"),
    [
        ("1f1b", False, "1F1B"),
        ("interleaved_1f1b", False, "Interleaved1F1B"),
        ("interleaved_1f1b", True, "PipelineScheduleMulti"),
        ("zb_v", True, "ZBVZeroBubble"),
    ],
)
def test_torchtitan_is_given_names_and_a_way_to_place_them(schedule, from_file, named):
    settings = exported(usual(schedule), "torchtitan", Path("o.csv") if from_file else None).settings
    parts, net = settings["module_fqns_per_model_part"], torch_net.Net()
    assert [name for names in parts for name in names] == MODULES
    held = [kept(net, names) for names in parts]
    assert sorted(n for names in held for n in names) == sorted(n for n, _ in net.named_parameters())
    assert settings["pipeline_parallel_schedule"] == named
    assert issubclass(theirs.get_schedule_class(named), theirs._PipelineSchedule)


def test_torchtitan_splits_by_the_names() -> None:
    net = torch_net.Net()
    split = pytest.importorskip(
        "torchtitan.distributed.pipeline_parallel",
        reason="torchtitan is not installed: see `kept` for its rules",
    )._split_module
    from torchtitan.config import ParallelismConfig

    settings = exported(usual("interleaved_1f1b"), "torchtitan").settings
    config = ParallelismConfig(**settings)
    for modules in config.module_fqns_per_model_part or ():
        left = [parameter.shape for parameter in split(net, modules).parameters()]
        assert sorted(left) == sorted(net.get_parameter(name).shape for name in kept(net, modules))


# Megatron


def layout_of(made: Plan) -> tuple[str, int]:
    words = shlex.split(exported(made, "megatron").flags)
    options = dict(zip(words[::2], words[1::2], strict=True))
    return options["--pipeline-model-parallel-layout"], int(options["--pipeline-model-parallel-size"])


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"ranks": 2}, "Ettt|tttL"),
        ({"ranks": 4}, "Et|tt|t|ttL"),
        ({"ranks": 2, "schedule": "interleaved_1f1b"}, "Et|tt|t|ttL"),
    ],
)
def test_the_layout_of_megatron(changes: Mapping[str, Any], layout: str) -> None:
    assert layout_of(planned(planner="equal", **changes)) == (layout, changes["ranks"])


def test_megatron_reads_the_layout() -> None:
    known = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        reason="megatron-core is not installed: see above for its letters",
    )
    made = planned(planner="equal", schedule="interleaved_1f1b")
    read = known.PipelineParallelLayerLayout(*layout_of(made))
    read.validate_layer_layout(num_layers=6, mtp_num_layers=0)
    for stage, modules in enumerate(stage_modules(made)):
        turn, rank = divmod(stage, 2)
        layers = sum(kind.name == "decoder" for kind in read.layout[rank][turn])
        assert layers == sum(name.startswith("layers.") for name in modules)


# What they lack


@pytest.mark.parametrize(
    ("engine", "changes", "word"),
    [
        ("torch", {"weights": "2bw"}, "2bw"),
        ("torch", {"schedule": "dualpipe"}, "direction"),
        ("torch", {"schedule": "forward_only"}, "cannot train"),
        ("torch", {"schedule": "seq1f1b"}, "slices"),
        ("megatron", {"schedule": "zb_v"}, "round the ranks"),
    ],
)
def test_a_plan_that_needs_more_is_refused(engine: str, changes: dict[str, Any], word: str) -> None:
    assert word in refused(PipeloomError, exported, planned(**changes), engine)


def test_orders_that_would_hang_and_offloading_are_refused_and_recomputation_left_out() -> None:
    made = usual()
    rows = (made.schedule_rows[0], made.schedule_rows[1].replace("1F0 1B0 1F1", "1F1 1B0 1F0"))
    assert "1B0" in refused(ScheduleError, exported, replace(made, schedule_rows=rows), "torch")
    offloading, again = ({"gelu": treatment} for treatment in ("offload", "recompute"))
    policy = MemoryPolicy(stages=(offloading,))
    assert "offload" in refused(PlanError, exported, replace(made, memory=policy), "torch")
    (note,) = exported(replace(made, memory=MemoryPolicy(stages=({}, again))), "torch", Path("o.csv")).notes
    assert "recomputation in stages 1" in note


def test_of_several_pipelines_one_is_exported() -> None:
    made = exported(planned(replicas=2), "torch")
    assert made.settings["stage_to_rank"] == [0, 1] and made.order.microbatches == 4
    assert any("2 pipelines side by side" in note for note in made.notes)


@pytest.mark.parametrize(
    ("how", "engine", "word"),
    [
        ({"tied": True}, "torch", "a.weight"),
        ({"skips": True}, "torch", "to stage 2"),
        ({}, "megatron", "one list of layers"),
    ],
)
def test_a_model_that_does_not_suit_is_refused(how: dict[str, bool], engine: str, word: str) -> None:
    job = torch_net.tower_job(partial(torch_net.Tower, **how))
    made = plan(job, microbatch_size=2, granularity="module", cluster="3 x a100-40")
    assert word in refused(PlanError, export_for, made, capture(job, 2).graph, engine)


# The command


def test_the_command_names_what_is_wrong(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "plan.json"
    usual().save(file)
    words = ("export-plan", file, "torch_net:job")
    left = run(*words, "--for", "torchtitan")
    assert left.exit_code == 0 and "--csv" in left.stderr
    assert json.loads(left.stdout)["pipeline_parallel_degree"] == 2
    assert "--pipeline-model-parallel-layout 'E" in good(*words, "--for", "megatron")
    assert "no order" in bad(2, *words, "--for", "megatron", "--csv", tmp_path / "o.csv")
    assert "MODEL was not given" in bad(2, *words[:2], "--for", "torch")  # the built-in GPT
    bad(2, *words)

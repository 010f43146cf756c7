"""A chain of blocks both in pipeloom and in torch.distributed.pipelining, to swap schedules between them."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from runs import capture_of, difference, plain, shared_captures
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules as theirs
from torch.nn import functional

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import cut
from pipeloom.lowering.passes import lower
from pipeloom.runtime.connect import connect
from pipeloom.schedules import registry
from pipeloom.schedules.formats import program_text, read_schedule, schedule_text

BLOCKS, WIDTH, CLASSES = 8, 6, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.cross_entropy(x, y)}


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=g, dtype=torch.float64)
    return {"x": x, "y": torch.randint(CLASSES, (rows,), generator=g)}


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)  # type: ignore[arg-type]


def job() -> Job:
    return Job(name="blocks", model=lambda: Blocks().double(), batch=batch, optimizer=sgd)


def ours_in_torch(names: list[str], microbatches: int, folder: Path) -> None:
    """Runs on each rank: our schedules, in both forms of the file, in torch's runtime.

    Rank 0 writes {"name form": largest relative difference of a gradient from one process}.
    """
    rank, ranks = _meet()
    data = batch(0, 2 * microbatches)
    expected = plain(job(), [data], microbatches)
    found = {}
    for name in names:
        stages, placement = registry.default_placement(name, ranks)
        made = registry.build(name, stages, placement, microbatches)
        file = folder / f"{name}.csv"
        for form in ("compute_only", "compute_comms"):
            if rank == 0 and form == "compute_only":
                file.write_text(schedule_text(made))
            elif rank == 0:
                file.write_text(program_text(lower(made, stages)))
            dist.barrier()
            gradients = _step_of_torch(made, file, form, data)
            found[f"{name} {form}"] = difference(_merged(gradients), expected.gradients)[0]
    _report(found, folder)


def torchs_in_ours(names: list[str], microbatches: int, folder: Path) -> None:
    """Runs on each rank: torch's schedules, as torch writes them in both forms, in our runtime."""
    rank, ranks = _meet()
    data = batch(0, 2 * microbatches)
    expected = plain(job(), [data], microbatches)
    found = {}
    for name in names:
        own = _placed(name, rank, ranks)
        count = sum(len(_placed(name, r, ranks)) for r in range(ranks))
        modules = _stages(count)
        stages = [PipelineStage(modules[s], s, count, torch.device("cpu")) for s in own]
        schedule = getattr(theirs, name)(stages, microbatches, loss_fn=functional.cross_entropy)
        for form in ("compute_only", "compute_comms"):
            file = folder / f"{name}.{form}.csv"
            if rank == 0:
                schedule._dump_csv(str(file), format=form)
            dist.barrier()
            gradients = _step_of_ours(read_schedule(file, name=name), data)
            found[f"{name} {form}"] = difference(_merged(gradients), expected.gradients)[0]
    _report(found, folder)


def _meet() -> tuple[int, int]:
    torch.set_num_threads(1)
    group = connect(torch.device("cpu"), timeout_s=300)
    return group.rank(), group.size()


def _placed(name: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank in torch's own placement of a schedule."""
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks]


def _stages(count: int) -> list[nn.Sequential]:
    """The model's blocks, dealt out evenly to so many stages."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Blocks().double()
    each = BLOCKS // count
    return [nn.Sequential(*model.blocks[s * each : (s + 1) * each]) for s in range(count)]


def _step_of_torch(made: Schedule, file: Path, form: str, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rank, modules = dist.get_rank(), _stages(made.stages)
    own = [s for s, home in enumerate(made.placement) if home == rank]
    stages = [PipelineStage(modules[s], s, made.stages, torch.device("cpu")) for s in own]
    # As a user of torch has it: the loss is a micro-batch's own mean, and torch scales the gradients.
    run = theirs._PipelineScheduleRuntime(stages, made.microbatches, loss_fn=functional.cross_entropy)
    run._load_csv(str(file), format=form)
    first, last = (made.placement[s] == rank for s in (0, -1))
    run.step(*([data["x"]] if first else []), **({"target": data["y"], "losses": []} if last else {}))
    each = BLOCKS // made.stages
    return {
        f"blocks.{s * each + int(n.partition('.')[0])}.{n.partition('.')[2]}": p.grad
        for s in own
        for n, p in modules[s].named_parameters()
        if p.grad is not None
    }


def _step_of_ours(made: Schedule, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own_job = job()
    graph = capture_of(own_job).graph
    each = BLOCKS // made.stages
    stage_of = {
        op.name: min(int(op.module.split(".")[1]) // each if op.module else BLOCKS, made.stages - 1)
        for op in graph.ops
        if not op.cheap
    }
    plan = Plan(
        graph=graph.fingerprint,
        planner="by hand",
        placement=made.placement,
        schedule=made.name,
        stages=tuple(StagePlan(ops=stage.ops) for stage in cut(graph, stage_of).stages),
        schedule_rows=tuple(str(made).splitlines()),
        microbatches=made.microbatches,
        microbatch_size=2,
    )
    with shared_captures(), Pipeline(own_job, plan, options=Options(keep_gradients=True)) as pipeline:
        pipeline.step(data)
        return dict(pipeline.weights.last_gradients)


def _merged(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, copy.copy(mine))
    return {name: tensor for part in everyone for name, tensor in part.items()}


def _report(found: dict[str, float], folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "differences.json").write_text(json.dumps(found))

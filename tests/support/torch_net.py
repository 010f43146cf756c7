"""A net of whole modules, and what each of four processes does with it on torch's own engine."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from batches import normal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from pipeloom import Job, load_plan, torch_stages
from pipeloom.ir.errors import ConfigError

WORDS, WIDTH, ROWS, MICROBATCHES = 11, 8, 2, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Words and positions are added between modules, of a size that is not known before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Checked(Net):
    """Decides by a size, which torch.fx cannot trace."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.places.num_embeddings:
            raise ValueError("too long")
        return super().forward(tokens)


class Tower(nn.Module):
    def __init__(self, *, tied: bool = False, skips: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.skips = skips
        if tied:
            self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        last = self.c(torch.tanh(self.b(first)))
        return last + first if self.skips else last


def tower_job(model: Callable[[], nn.Module]) -> Job:
    return Job(model=model, batch=normal(x=(4,)), loss=lambda output, batch: output.square().mean())


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    row = torch.randint(WORDS, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return {"tokens": row[:, :-1], "targets": row[:, 1:]}


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def job() -> Job:
    return Job(model=lambda: Net().double(), batch=batch, loss=lambda o, b: loss(o, b["targets"]))


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind().double()


WAYS = ("plain", "sharded", "tensor", "exported")


def differences(plan: Path, mesh: dist.DeviceMesh, way: str) -> dict[str, float]:
    """The largest relative difference of a gradient to that of one process, and of the loss where it is made.

    way: what the second dimension of the mesh is for. "sharded": each stage, and the batch; "tensor": the
    weights of each layer, by tensor parallelism; "plain": the same twice; "exported": as "sharded", traced by
    torch.export.
    """
    sharded, exported = way in ("sharded", "exported"), way == "exported"
    model, plain, whole = net(Checked if exported else Net), net(), batch(3, ROWS * MICROBATCHES * 2)
    expected = loss(plain(**whole), whole["targets"])
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    group, part = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    example = {"tokens": whole["tokens"][:ROWS]} if exported else None
    stages, schedule = torch_stages(
        load_plan(plan), model, mesh["pp"].get_local_rank(), example=example, loss=loss, group=group
    )
    tokens, targets = whole["tokens"], whole["targets"]
    if sharded:
        for stage in stages:
            fully_shard(stage.submod, mesh=mesh["dp"])
        tokens, targets = tokens[part::2], targets[part::2]
    for stage in stages if way == "tensor" else ():
        names = [name for name, _ in stage.submod.named_modules() if name.endswith((".up", ".down"))]
        how = {name: ColwiseParallel() if name.endswith("up") else RowwiseParallel() for name in names}
        parallelize_module(stage.submod, mesh["dp"], how)
    losses: list[Tensor] = []
    schedule.step(tokens=tokens, target=targets, losses=losses)
    worst = 0.0
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            own = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            difference = (own - gradients.pop(name)).abs().max() / plain.get_parameter(name).grad.abs().max()
            worst = max(worst, difference.item())
    found = {"gradients": worst, "missing": float(len(gradients))}
    if losses:
        mean = torch.stack(losses).mean().detach()
        if sharded:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            mean /= 2
        found["loss"] = (mean - expected).abs().item()
    return found


def refusal(plan: Path, mesh: dist.DeviceMesh) -> str:
    """What is said where a layer is sharded by itself."""
    rank = mesh["pp"].get_local_rank()
    stages, schedule = torch_stages(load_plan(plan), net(), rank, loss=loss, group=mesh["pp"].get_group())
    for stage in stages:
        for module in stage.submod.modules():
            if isinstance(module, Layer):
                fully_shard(module, mesh=mesh["dp"])
        fully_shard(stage.submod, mesh=mesh["dp"])
    whole = batch(3, ROWS * MICROBATCHES)
    try:
        schedule.step(tokens=whole["tokens"], target=whole["targets"])
    except ConfigError as error:
        return error.message
    return ""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {
        f"{plan.stem}, {way}": differences(plan, mesh, way)
        for plan in sorted(folder.glob("*.json"))
        for way in WAYS
    }
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps([found, refusal(folder / "zb_h1.json", mesh)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

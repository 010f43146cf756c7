"""One rank of test_checkpoint_ranks.py: `checkpoint_worker.py RANK FOLDER` prints one JSON object."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeloom.ir.errors import CheckpointError
from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.checkpoint.state import TrainState

RANKS = 3
SHAPES = {"embed": (6, 4), "a": (4, 4), "b": (4, 4), "c": (4, 4), "d": (4, 4)}
TWO = (("embed", "a", "b"), ("c", "d", "embed"))
"""Two stages; the tied embedding has a replica on each."""
THREE = (("embed", "a"), ("b", "c"), ("d", "embed"))


class Part:
    """A rank's parameters, their optimizer, and gradients that follow from value and step alone."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.parameters = {name: nn.Parameter(whole[name]) for name in names}
        self.buffers = {"mean": torch.full((2,), float(seed))}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1)

    @property
    def state(self) -> TrainState:
        return TrainState(
            parameters=self.parameters,
            buffers=self.buffers,
            optimizers=(self.optimizer,),
            aliases={"head": "embed"} if "embed" in self.parameters else {},
        )

    def train(self, steps: range) -> None:
        for step in steps:
            for parameter in self.parameters.values():
                parameter.grad = torch.sin(parameter.detach() * (step + 1))
            self.optimizer.step()


def message(call) -> str:
    try:
        call()
    except CheckpointError as error:
        return error.message
    return "no error"


def main(rank: int, folder: Path) -> dict[str, object]:
    world = dist.group.WORLD
    reference = Part(tuple(SHAPES), seed=1)
    reference.train(range(2))

    pair = dist.new_group([0, 1])
    if rank < 2:
        part = Part(TWO[rank], seed=1)
        part.train(range(2))
        checkpoint.save(folder / "two", part.state, step=2, extra={"from": rank}, group=pair)
    dist.barrier()

    part = Part(THREE[rank], seed=2)
    step, extra = checkpoint.load(folder / "two", part.state, group=world)
    part.train(range(2, 4))
    reference.train(range(2, 4))
    same = all(torch.equal(p, reference.parameters[name]) for name, p in part.parameters.items())
    checkpoint.save(folder / "three", part.state, step=4, extra={}, group=world)

    # One rank's trouble is everybody's error.
    wrong = Part(THREE[rank], seed=2)
    if rank == 1:
        wrong.parameters["b"] = nn.Parameter(torch.zeros(5, 4))
        wrong.optimizer = torch.optim.AdamW(wrong.parameters.values())
    mismatch = message(lambda: checkpoint.load(folder / "three", wrong.state, group=world))
    if rank == 2:
        part.optimizer.state[part.parameters["d"]]["history"] = []
    unsaved = message(lambda: checkpoint.save(folder / "three", part.state, step=5, extra={}, group=world))
    missing = message(lambda: checkpoint.load(folder / "none", wrong.state, group=world))
    other = folder / ("two" if rank == 0 else "three")
    right = Part(THREE[rank], seed=2)
    sight = message(lambda: checkpoint.load(other, right.state, group=world))
    if rank == 0:
        data = folder / "three" / "step-00000004" / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    dist.barrier()
    damage = message(lambda: checkpoint.load(folder / "three", right.state, group=world))
    return {
        "step": step,
        "extra": extra,
        "same": same,
        "buffer": part.buffers["mean"].tolist(),
        "mismatch": mismatch,
        "unsaved": unsaved,
        "missing": missing,
        "sight": sight,
        "damage": damage,
    }


if __name__ == "__main__":
    own_rank, own_folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{own_folder}/rendezvous", rank=own_rank, world_size=RANKS
    )
    print(json.dumps(main(own_rank, own_folder)))
    dist.destroy_process_group()
    gc.collect()  # cycles hold the groups, whose threads must end before the interpreter does

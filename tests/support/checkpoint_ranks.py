"""Checkpoints of several ranks: what the processes of `test_channel_of_processes.py` save and load."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeloom.ir.errors import CheckpointError
from pipeloom.runtime import checkpoint
from pipeloom.runtime.channel import Channel, dist_channel
from pipeloom.runtime.checkpoint import TrainState
from pipeloom.runtime.connect import watch_ranks

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


@contextmanager
def channel_on(group: dist.ProcessGroup) -> Iterator[Channel]:
    with watch_ranks(group) as watch:
        yield dist_channel(group, watch, device=torch.device("cpu"), timeout_s=1000.0)


def refused(word: str, call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        assert word in error.message, error
        return error.message
    raise AssertionError(f"nothing was said of {word}")


def checkpoints(folder: Path) -> None:
    """What two ranks save, three load and train on with; and the trouble of one rank is everybody's error."""
    rank, world = dist.get_rank(), dist.group.WORLD
    reference = Part(tuple(SHAPES), seed=1)
    reference.train(range(2))

    pair = dist.new_group([0, 1])
    if rank < 2:
        part = Part(TWO[rank], seed=1)
        part.train(range(2))
        with channel_on(pair) as channel:
            checkpoint.save(folder / "two", part.state, step=2, extra={"from": rank}, channel=channel)
    dist.barrier()

    with channel_on(world) as channel:
        _three_load(folder, reference, channel)


def _three_load(folder: Path, reference: Part, channel: Channel) -> None:
    rank = channel.rank
    part = Part(THREE[rank], seed=2)
    assert checkpoint.load(folder / "two", part.state, channel=channel) == (2, {"from": 0})
    assert part.buffers["mean"].tolist() == [1.0, 1.0]
    part.train(range(2, 4))
    reference.train(range(2, 4))
    assert all(torch.equal(p, reference.parameters[name]) for name, p in part.parameters.items())
    checkpoint.save(folder / "three", part.state, step=4, extra={}, channel=channel)

    wrong = Part(THREE[rank], seed=2)
    if rank == 1:
        wrong.parameters["b"] = nn.Parameter(torch.zeros(5, 4))
        wrong.optimizer = torch.optim.AdamW(wrong.parameters.values())
    if rank == 2:
        part.optimizer.state[part.parameters["d"]]["history"] = []
    for culprit, said in (
        (1, refused("b is [5, 4]", lambda: checkpoint.load(folder / "three", wrong.state, channel=channel))),
        (2, refused("'history' of d", lambda: _save(folder / "three", part, channel))),
    ):
        assert (f"(rank {culprit})" in said) == (rank != culprit)
    refused("none does not exist", lambda: checkpoint.load(folder / "none", wrong.state, channel=channel))
    right = Part(THREE[rank], seed=2)
    other = folder / ("two" if rank == 0 else "three")
    sight = "rank 0 finds step-00000002 and rank 1 finds step-00000004"
    refused(sight, lambda: checkpoint.load(other, right.state, channel=channel))
    if rank == 0:
        flip_a_bit(folder / "three" / "step-00000004" / "rank-1.safetensors")
    dist.barrier()
    refused("rank-1.safetensors", lambda: checkpoint.load(folder / "three", right.state, channel=channel))


def _save(folder: Path, part: Part, channel: Channel) -> None:
    checkpoint.save(folder, part.state, step=5, extra={}, channel=channel)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def assert_one_process_loads(folder: Path) -> None:
    """What the two ranks saved, where the tied parameter is written once, by the lowest rank."""
    whole = Part(tuple(SHAPES), seed=2)
    assert checkpoint.load(folder / "two", whole.state) == (2, {"from": 0})
    expected = Part(tuple(SHAPES), seed=1)
    expected.train(range(2))
    assert all(torch.equal(p, expected.parameters[name]) for name, p in whole.parameters.items())
    assert all(whole.optimizer.state[p]["step"] == 2 for p in whole.parameters.values())
    index = json.loads((folder / "two" / "step-00000002" / "index.json").read_text())
    assert index["aliases"] == {"head": "embed"}
    sizes = {name: size for name, (size, _) in index["files"].items()}
    assert sizes.keys() == {"rank-0.safetensors", "rank-1.safetensors"}
    # Rank 0 writes embed, a, b and the buffer; rank 1 only c and d.
    assert sizes["rank-0.safetensors"] > sizes["rank-1.safetensors"]

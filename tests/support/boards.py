"""Boards of ranks that are threads of this process."""

import math

import torch.distributed as dist

from pipeloom.runtime.board import Board


def local_boards(ranks: int) -> list[Board]:
    store = dist.HashStore()
    return [Board(store, rank, ranks, interval_s=0.02, lost_s=math.inf) for rank in range(ranks)]

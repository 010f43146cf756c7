"""Graph networks of torch_geometric. A row of a batch is a graph of a few nodes; the rows of a micro-batch
are one graph without edges between them, as the library's own loader makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch_geometric import nn as gnn

from pipeloom import Job

from . import CLASSES, Batch, job

NODES, EDGES, WIDTH = 5, 12, 8


def _graphs(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "nodes": torch.randn(rows, NODES, WIDTH, generator=made),
        "edges": torch.randint(0, NODES, (rows, 2, EDGES), generator=made),
        "y": torch.randint(0, CLASSES, (rows,), generator=made),
    }


class Graphs(nn.Module):
    """Two convolutions, normalisation, a pool over each graph, and a head."""

    def __init__(self, convolution: Callable[[], nn.Module], pool: Callable[..., Tensor], norm: bool) -> None:
        super().__init__()
        self.first, self.second = convolution(), convolution()
        self.norm = gnn.BatchNorm(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.pool = pool

    def forward(self, nodes: Tensor, edges: Tensor, y: Tensor) -> Any:
        rows = len(nodes)
        shift = torch.arange(rows, device=edges.device).view(rows, 1, 1) * NODES
        edge_index = (edges + shift).permute(1, 0, 2).reshape(2, -1)
        graph = torch.arange(rows, device=edges.device).repeat_interleave(NODES)
        h = self.norm(self.first(nodes.flatten(0, 1), edge_index)).relu()
        h = self.pool(self.second(h, edge_index).relu(), graph)
        return {"loss": fn.cross_entropy(self.head(h), y)}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _model(
    convolution: Callable[[], nn.Module],
    name: str,
    pool: Callable[..., Tensor] = gnn.global_mean_pool,
    norm: bool = True,
) -> Callable[[], Job]:
    return partial(job, partial(Graphs, convolution, pool, norm), _graphs, name=name)


MODELS: dict[str, Callable[[], Job]] = {
    "GCN": _model(lambda: gnn.GCNConv(WIDTH, WIDTH), "gcn"),
    "GAT": _model(lambda: gnn.GATConv(WIDTH, WIDTH // 2, heads=2), "gat"),
    "GATv2": _model(lambda: gnn.GATv2Conv(WIDTH, WIDTH // 2, heads=2), "gatv2"),
    "GraphSAGE": _model(lambda: gnn.SAGEConv(WIDTH, WIDTH), "sage", gnn.global_add_pool),
    "GIN": _model(lambda: gnn.GINConv(_mlp(), train_eps=True), "gin", gnn.global_add_pool),
    "graph transformer": _model(lambda: gnn.TransformerConv(WIDTH, WIDTH // 2, heads=2), "transformer"),
    "Chebyshev": _model(lambda: gnn.ChebConv(WIDTH, WIDTH, K=2), "cheb", norm=False),
    "gated": _model(lambda: gnn.GatedGraphConv(WIDTH, 2), "gated", gnn.global_max_pool),
}

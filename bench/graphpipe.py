"""GraphPipe (arXiv 2406.17145): stages as a DAG against stages as a chain, and models with branches.

    python bench/graphpipe.py models --keys "mmt 8"
    pipeloom plan bench/graphpipe.py:mmt --cluster "8 x v100-16" --ranks 8
    pipeloom plan bench/graphpipe.py:small_mmt --ranks 5

models   MMT, DLRM and CANDLE-Uno of published size on 4, 8, 16 and 32 V100s of 16 GB, by roofline:
         `graphpipe`, the best chain (`--no-branches`), `pipedream-graph` and `piper`; chains also as
         sequential pipelines, in which every stage waits for the one before it, too (the paper's baseline).
         Each with its best number of pipelines side by side and rows per micro-batch. Rows per step grow with
         the devices, as in the paper, whose numbers of rows are lost but for MMT on 8 (128 rows). A key
         begins no cell after --minutes.
case     The paper's case study on 8 V100s, one pipeline.

Everything is simulated. The paper measured on Summit: up to 1.6 times the throughput of the best chain,
parallel stages alone 1.12 to 1.40 times on 32 devices; case study depth 4 against 8, 1.2 times.

Models, with seeded random data, at published sizes and at sizes for two cores. The first three and the case
study are those of the paper's appendix A.2. What it leaves open, and what stands here instead:

mmt         Multi-Modal Transformer: 4 branches of 8 Transformer layers, sequences of 256, hidden 1024, 16
            heads, feed-forward 4096, joined at the end. Open: vocabularies, so that each branch reads
            vectors of the hidden size; the head, here the mean over positions and 1000 classes.
mmt_in_turn The same model, its towers run layer by layer in turn: a planner must not depend on the order.
dlrm        7 dense branches of 4 feed-forward layers of 4096; 7 tables of 1 million rows of 64, of which each
            looks up 100, laid side by side; joined; feed-forward layers of 4096. Open: how many there are at
            the end, here 4 and one to a single number; the width of dense inputs, here 4096; the loss, here
            binary cross-entropy.
candle      CANDLE-Uno: 7 branches of 4 feed-forward layers of 4096, joined. Open: what follows, here 4 layers
            of 4096 and one to a single number with a squared error; and the inputs, here as in FlexFlow's
            example: two doses, RNA sequences of 942, two drugs' descriptors of 5270 and fingerprints of 2048,
            and SGD of 0.01. There only 5 of the 7 have a branch.
case_study  2 branches of 4 layers, each an attention and two linear layers, joined. Open: sizes, as mmt's.

clip        Two towers and a contrastive loss over the micro-batch: ViT-B/32 of CLIP (Radford et al. 2021,
            arXiv 2103.00020): 12 layers of 768 over 49 patches and a class token, 12 of 512 over 77 tokens.

Layers are pre-norm Transformer layers without dropout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from machine import by_roofline, parser_of, print_table, run_parts
from model import Layer
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job, plan_request, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PlanError
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import sequential
from pipeloom.lowering.passes import lower
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.request import PlanOptions
from pipeloom.simulator.simulate import simulate

Batch = dict[str, Tensor]


class Dense(nn.Module):
    """One feed-forward layer: linear, ReLU."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


class Tower(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def dense_tower(inputs: int, width: int, layers: int) -> Tower:
    return Tower(Dense(inputs if depth == 0 else width, width) for depth in range(layers))


class MultiModal(nn.Module):
    """Towers of Transformer layers, joined at the end. in_turn: run layer by layer, not tower by tower."""

    def __init__(
        self,
        towers: int,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        *,
        classes: int,
        in_turn: bool = False,
        norm: bool = True,
    ) -> None:
        super().__init__()
        make = partial(Layer, width, heads, inner, norm=norm)
        self.towers = nn.ModuleList(Tower(make() for _ in range(layers)) for _ in range(towers))
        self.head = nn.Linear(towers * width, classes)
        self.in_turn = in_turn

    def forward(self, target: Tensor, **modalities: Tensor) -> dict[str, Tensor]:
        xs = list(modalities.values())
        if self.in_turn:
            for layers in zip(*(tower.layers for tower in self.towers), strict=True):
                xs = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        else:
            xs = [tower(x) for tower, x in zip(self.towers, xs, strict=True)]
        joined = torch.cat(xs, dim=-1).mean(1)
        return {"loss": functional.cross_entropy(self.head(joined), target)}


class Recommendation(nn.Module):
    """DLRM: dense towers and bags of embeddings, joined."""

    def __init__(
        self,
        dense: int,
        sparse: int,
        width: int,
        *,
        inputs: int,
        entries: int,
        dim: int,
        bag: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(dense_tower(inputs, width, layers) for _ in range(dense))
        self.tables = nn.ModuleList(nn.Embedding(entries, dim) for _ in range(sparse))
        self.top = dense_tower(dense * width + sparse * bag * dim, width, layers)
        self.last = nn.Linear(width, 1)

    def forward(self, target: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        dense = [tower(inputs[f"dense{i}"]) for i, tower in enumerate(self.towers)]
        sparse = [table(inputs[f"sparse{i}"]).flatten(1) for i, table in enumerate(self.tables)]
        score = self.last(self.top(torch.cat([*dense, *sparse], dim=1))).squeeze(1)
        return {"loss": functional.binary_cross_entropy_with_logits(score, target)}


class Uno(nn.Module):
    """CANDLE-Uno: a tower per input, joined."""

    def __init__(self, inputs: Mapping[str, int], width: int, layers: int) -> None:
        super().__init__()
        self.names = tuple(inputs)
        self.towers = nn.ModuleList(dense_tower(size, width, layers) for size in inputs.values())
        self.top = dense_tower(len(inputs) * width, width, layers)
        self.last = nn.Linear(width, 1)

    def forward(self, target: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        xs = [tower(inputs[name]) for name, tower in zip(self.names, self.towers, strict=True)]
        return {"loss": functional.mse_loss(self.last(self.top(torch.cat(xs, dim=1))).squeeze(1), target)}


class Contrastive(nn.Module):
    """CLIP: an image tower and a text tower, and each pair against all others of its micro-batch."""

    def __init__(
        self,
        image: tuple[int, int, int],
        text: tuple[int, int, int],
        *,
        layers: int,
        joint: int,
        patch: int,
        vocabulary: int,
    ) -> None:
        """image, text: positions, width and heads of each tower."""
        super().__init__()
        (patches, wide, image_heads), (length, narrow, text_heads) = image, text
        self.patches = nn.Conv2d(3, wide, patch, patch, bias=False)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, wide))
        self.image_places = nn.Parameter(0.02 * torch.randn(1, patches + 1, wide))
        self.words = nn.Embedding(vocabulary, narrow)
        self.text_places = nn.Parameter(0.02 * torch.randn(1, length, narrow))
        self.image = Tower(Layer(wide, image_heads, 4 * wide) for _ in range(layers))
        self.text = Tower(Layer(narrow, text_heads, 4 * narrow, causal=True) for _ in range(layers))
        self.image_norm, self.text_norm = nn.LayerNorm(wide), nn.LayerNorm(narrow)
        self.image_head = nn.Linear(wide, joint, bias=False)
        self.text_head = nn.Linear(narrow, joint, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.659))  # ln(1 / 0.07)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        seen = torch.cat([self.token.expand(image.shape[0], -1, -1), patches], dim=1) + self.image_places
        a = functional.normalize(self.image_head(self.image_norm(self.image(seen)[:, 0])), dim=-1)
        read = self.text(self.words(text) + self.text_places)
        b = functional.normalize(self.text_head(self.text_norm(read[:, -1])), dim=-1)
        logits = self.scale.exp() * a @ b.T
        pairs = torch.arange(image.shape[0])
        both = functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)
        return {"loss": both / 2}


def seeded(make: Callable[[torch.Generator, int], Batch]) -> Callable[[int, int], Batch]:
    """(seed, rows) -> a batch of random numbers, the same for the same seed."""
    return lambda seed, rows: make(torch.Generator().manual_seed(seed), rows)


def mmt(
    *,
    towers: int = 4,
    layers: int = 8,
    width: int = 1024,
    heads: int = 16,
    length: int = 256,
    classes: int = 1000,
    in_turn: bool = False,
    norm: bool = True,
    name: str = "mmt",
) -> Job:
    """The Multi-Modal Transformer; feed-forward layers are four times as wide as the model."""
    sizes = (towers, layers, width, heads, 4 * width)

    def batch(g: torch.Generator, rows: int) -> Batch:
        xs = {f"modality{i}": torch.randn(rows, length, width, generator=g) for i in range(towers)}
        return {"target": torch.randint(classes, (rows,), generator=g), **xs}

    def model() -> nn.Module:
        return MultiModal(*sizes, classes=classes, in_turn=in_turn, norm=norm)

    return Job(model=model, batch=seeded(batch), name=name)


mmt_in_turn = partial(mmt, in_turn=True, name="mmt-in-turn")
case_study = partial(mmt, towers=2, layers=4, norm=False, name="case-study")


def dlrm(
    *,
    branches: int = 7,
    width: int = 4096,
    inputs: int = 4096,
    entries: int = 1_000_000,
    dim: int = 64,
    bag: int = 100,
    layers: int = 4,
) -> Job:
    """Branches: so many dense ones and as many tables."""

    def batch(g: torch.Generator, rows: int) -> Batch:
        dense = {f"dense{i}": torch.randn(rows, inputs, generator=g) for i in range(branches)}
        sparse = {f"sparse{i}": torch.randint(entries, (rows, bag), generator=g) for i in range(branches)}
        return {"target": torch.randint(2, (rows,), generator=g).float(), **dense, **sparse}

    def model() -> nn.Module:
        sizes = {"inputs": inputs, "entries": entries, "dim": dim, "bag": bag, "layers": layers}
        return Recommendation(branches, branches, width, **sizes)

    return Job(model=model, batch=seeded(batch), name="dlrm")


UNO = (1, 942, 5270, 2048, 1, 5270, 2048)
"""A dose, RNA sequences; a drug's descriptors and fingerprints; the other drug's dose, and the same."""


def candle(*, width: int = 4096, inputs: Sequence[int] = UNO, layers: int = 4) -> Job:
    """CANDLE-Uno, one branch per input."""
    named = {f"input{i}": size for i, size in enumerate(inputs)}

    def batch(g: torch.Generator, rows: int) -> Batch:
        xs = {name: torch.randn(rows, size, generator=g) for name, size in named.items()}
        return {"target": torch.rand(rows, generator=g), **xs}

    return Job(
        model=lambda: Uno(named, width, layers),
        batch=seeded(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        name="candle",
    )


def clip(
    *,
    image: tuple[int, int] = (768, 12),
    text: tuple[int, int] = (512, 8),
    layers: int = 12,
    joint: int = 512,
    pixels: int = 224,
    patch: int = 32,
    length: int = 77,
    vocabulary: int = 49408,
) -> Job:
    """Two towers with a contrastive loss. image, text: width and heads."""
    patches = (pixels // patch) ** 2

    def batch(g: torch.Generator, rows: int) -> Batch:
        images = torch.randn(rows, 3, pixels, pixels, generator=g)
        return {"image": images, "text": torch.randint(vocabulary, (rows, length), generator=g)}

    def model() -> nn.Module:
        sizes = {"layers": layers, "joint": joint, "patch": patch, "vocabulary": vocabulary}
        return Contrastive((patches, *image), (length, *text), **sizes)

    return Job(model=model, batch=seeded(batch), name="clip")


_TINY = {"width": 16, "heads": 2, "length": 6, "classes": 5}
small_mmt = partial(mmt, layers=2, **_TINY)
small_mmt_in_turn = partial(mmt_in_turn, layers=2, **_TINY)
small_case_study = partial(case_study, **_TINY)
small_dlrm = partial(dlrm, branches=2, width=16, inputs=8, entries=20, dim=4, bag=3, layers=2)
small_candle = partial(candle, width=16, inputs=(1, 6, 8, 4), layers=2)
small_clip = partial(
    clip, image=(16, 2), text=(12, 2), layers=2, joint=8, pixels=8, patch=4, length=5, vocabulary=20
)

PUBLISHED: Mapping[str, Callable[[], Job]] = {
    "mmt": mmt,
    "mmt_in_turn": mmt_in_turn,
    "dlrm": dlrm,
    "candle": candle,
    "case_study": case_study,
    "clip": clip,
}
SMALL: Mapping[str, Callable[[], Job]] = {
    "mmt": small_mmt,
    "mmt_in_turn": small_mmt_in_turn,
    "dlrm": small_dlrm,
    "candle": small_candle,
    "case_study": small_case_study,
    "clip": small_clip,
}
"""The same with every branch, of a few layers that two cores run in milliseconds."""

# --- the DAG against chains -----------------------------------------------------------------------

DEVICES = (4, 8, 16, 32)
ROWS_PER_DEVICE = {"mmt": 16, "dlrm": 128, "candle": 512}
WIDTHS = (1, 2, 4)
SIZES = {"mmt": (1, 2, 4), "dlrm": (128, 256, 512), "candle": (256, 512, 1024), "case_study": (2, 4, 8)}
"""Rows of the micro-batches that are tried."""
SAMPLES = {"mmt": (2, 4), "dlrm": (8, 16), "candle": (16, 32), "case_study": (2, 4)}
"""Rows at which a model is captured; between and beyond these it is interpolated."""

KINDS = {
    "graphpipe": ("graphpipe", True),
    "chain": ("graphpipe", False),
    "pipedream-graph": ("pipedream-graph", False),
    "piper": ("piper", False),
}
"""Kind -> (planner, whether its stages may run side by side)."""


SEQUENTIAL = "chain, sequential"


def cluster_of(devices: int) -> Cluster:
    """V100s of 16 GB, 4 in each node: those that the paper used of Summit's."""
    return find_cluster(f"{devices // 4} nodes of 4 x v100-16" if devices > 4 else f"{devices} x v100-16")


def models_at(name: str) -> Callable[[int, Cluster], ProfiledModel]:
    """(rows, cluster) -> the model of published size."""
    first, second = (planning.capture(PUBLISHED[name](), rows).graph for rows in SAMPLES[name])

    def at(rows: int, cluster: Cluster) -> ProfiledModel:
        ends = zip((first, second), SAMPLES[name], strict=True)
        return interpolate_sample(*(by_roofline(graph, cluster, size) for graph, size in ends), rows)

    return at


def plan_of(kind: str, cluster: Cluster, rows: int, model: ProfiledModel, width: int = 1) -> Plan:
    """A plan for all devices, every residual kept. Raises: PlanError if it is refused, or does not fit."""
    planner, branches = KINDS[kind]
    request = plan_request.PlanRequest(
        cluster=cluster,
        options=PlanOptions(
            ranks=len(cluster.devices) // width,
            replicas=width,
            microbatches=width,
            planner=planner,
            global_batch=rows,
            branches=branches,
            treatments=(),
        ),
    )
    return request.plan(model, explained=False)


def sequential_s(plan: Plan, model: ProfiledModel, cluster: Cluster) -> float:
    """Seconds of the simulated step if every stage also waits for the one in front of it, and for the
    gradient of the one behind it."""
    in_a_row = sequential(plan.replicated(plan.stage_graph(model.graph)))
    costs = PlanCosts(model.graph, model.profiles, cluster).stages(plan)
    program = lower(plan.as_schedule, in_a_row, policy=plan.memory)
    return simulate(program, in_a_row, costs, cluster).step_s


def fastest(name: str, devices: int, rows: int, widths: Sequence[int], minutes: float) -> None:
    """Print the fastest of all cells for each kind, and how many times its step the DAG's is faster."""
    at, cluster, until = models_at(name), cluster_of(devices), time.monotonic() + 60 * minutes
    best: dict[str, dict[str, Any]] = {}
    for width, size in product(widths, SIZES[name]):
        if width > devices // 2 or width * size > rows or time.monotonic() > until:
            continue
        model = at(size, cluster)
        for kind in KINDS:
            try:
                plan = plan_of(kind, cluster, rows, model, width)
            except PlanError as error:
                print(f"{kind}, {width} pipelines, {size} rows: {error.message}")
                continue
            steps = {kind: plan.predicted_step_s}
            if kind == "chain":
                steps[SEQUENTIAL] = sequential_s(plan, model, cluster)
            depth = plan.notes.get("branches.depth", str(len(plan.stages)))
            for ran, step_s in steps.items():
                if ran not in best or step_s < best[ran]["step_s"]:
                    best[ran] = {
                        "kind": ran,
                        "pipelines": width,
                        "rows": size,
                        "depth": depth,
                        "step_s": step_s,
                    }
    dag_s = best["graphpipe"]["step_s"] if "graphpipe" in best else None
    table = [row | {"gain": row["step_s"] / dag_s if dag_s else None} for row in best.values()]
    print_table(table, f"{name} {devices}")


def models(only: Sequence[str], minutes: float) -> None:
    """Each model on each number of devices. only: such as "mmt 8"; all if there are none."""
    for name, devices in product(ROWS_PER_DEVICE, DEVICES):
        if not only or f"{name} {devices}" in only:
            fastest(name, devices, ROWS_PER_DEVICE[name] * devices, WIDTHS, minutes)


def main() -> int:
    run: dict[str, Callable[[], Any]] = {
        "models": lambda: models(given.keys, given.minutes),
        "case": lambda: fastest("case_study", 8, 128, (1,), given.minutes),
    }
    parser = parser_of(__doc__, run)
    parser.add_argument("--keys", nargs="+", default=(), help='of models, such as "mmt 8"')
    parser.add_argument("--minutes", type=float, default=9.0, help="after which a key begins no cell")
    given = parser.parse_args()
    return run_parts(given.parts, run)


if __name__ == "__main__":
    sys.exit(main())

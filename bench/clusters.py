"""Plans for simulated clusters against equal layers with interleaved 1F1B, Megatron-LM's way.

    python bench/clusters.py [steps planners paced unequal] [--models NAME ...] [--clusters "8 a100" ...]

steps     auto against the best of 1F1B and interleaved 1F1B with as many layers in each stage as in any other
          and any number of chunks that divides the layers; auto with whole words, too
planners  auto and every other planner, for 1F1B, each within --seconds; on the first of the clusters
paced     plans of CLIP and T5 on eight ranks that sleep as long as their stages take (`bench/pacing.py`)
unequal   a GPT on two A100 and two V100 in one pipeline: auto, and by brute force all orders of the devices
          with all schedules of the library by `exact`

A100 of 80 GB and H200 in nodes of eight. 8 devices are one pipeline, 64 are 4 of 16 stages, 512 are 16 of 32.
Float32, AdamW, 4 micro-batches per stage. Every model has 32 layers, or 48:

Gemma 2    transformers; width 2304, 256,000 words, 2,048 tokens
Llama      transformers; width 4096, 128,256 words, 2,048 tokens
experts    as DeepSeek's: 2 of 32 layers dense, in the others 64 experts of which a token sees 6, and 2 shared
           ones; latent keys; 102,400 words. Experts choose their tokens, so that shapes stay the same
hybrid     as Nemotron-H: 16 layers of Mamba 2 (in chunks of 128), 12 of two linear layers, 4 of attention;
           131,072 words
T5         transformers; 16 + 16 layers of width 1024, 512 tokens each
CLIP       `bench/graphpipe.py`, with 16 + 16 layers
seeing     a small image encoder (12 layers of width 768) before a language model (36 of 2048, 151,936 words)
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import permutations, product
from statistics import geometric_mean
from typing import Any

import torch
import transformers as hf
from auto import gpt
from graphpipe import clip
from machine import next_tokens, parser_of, print_table, run_parts, tokens
from model import Layer
from pacing import pace, paced_plan
from torch import Tensor, nn
from torch.nn import functional as fn

# isort: split
from joint_cases import SCHEDULES

from pipeloom import Job, Plan, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.plan_split_words import WHOLE_STEP
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import PLANNERS, searches
from pipeloom.planner.search.layer_groups import layers
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.split_words import split_words

Table = list[dict[str, Any]]

# --- models -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Layers that are added to their input, each behind a norm."""

    def __init__(self, width: int, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.norms = nn.ModuleList(parts), nn.ModuleList(nn.RMSNorm(width) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class LatentAttention(nn.Module):
    """Keys and values come from a latent vector that is narrower than the model."""

    def __init__(self, width: int, heads: int, latent: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.down, self.up = nn.Linear(width, latent, bias=False), nn.Linear(latent, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.up(self.down(x)).chunk(2, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.query(x), k, v))
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(fn.silu(gate) * up)


class Experts(nn.Module):
    """Each of the experts takes the tokens that it is most probable for, as many as all take."""

    def __init__(self, width: int, inner: int, *, experts: int, seen: int, shared: int) -> None:
        super().__init__()
        self.experts, self.seen = experts, seen
        self.router, self.shared = nn.Linear(width, experts, bias=False), Gated(width, shared * inner)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        taken = flat.shape[0] * self.seen // self.experts
        weights, places = self.router(flat).softmax(-1).T.topk(taken, dim=-1)
        gate, up = torch.bmm(flat[places], self.up).chunk(2, dim=-1)
        made = torch.bmm(fn.silu(gate) * up, self.down) * weights.unsqueeze(-1)
        routed = torch.zeros_like(flat).index_add(0, places.flatten(), made.flatten(0, 1))
        return self.shared(x) + routed.view_as(x)


class Mamba(nn.Module):
    """Mamba 2 as products over chunks (arXiv 2405.21060). Shapes: B batch, L chunks, T tokens of one, H
    heads, P width of a head, N of its state."""

    def __init__(self, width: int, *, head: int = 64, state: int = 128, chunk: int = 128) -> None:
        super().__init__()
        inner = 2 * width
        self.sizes, self.chunk, self.heads = (inner, inner + 2 * state, inner // head), chunk, inner // head
        self.state, self.into = state, nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(self.sizes[1], self.sizes[1], 4, groups=self.sizes[1], padding=3)
        self.rate, self.norm = nn.Parameter(torch.zeros(self.heads)), nn.RMSNorm(inner)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, mixed, step = self.into(x).split(self.sizes, dim=-1)
        mixed = fn.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        value, key, query = mixed.split((self.sizes[0], self.state, self.state), dim=-1)
        step_BLTH = fn.softplus(step).unflatten(1, (-1, self.chunk))
        value_BLTHP = value.unflatten(-1, (self.heads, -1)).unflatten(1, (-1, self.chunk))
        value_BLTHP = value_BLTHP * step_BLTH.unsqueeze(-1)
        key_BLTN, query_BLTN = (y.unflatten(1, (-1, self.chunk)) for y in (key, query))
        decay_BHLT = (step_BLTH * -self.rate.exp()).permute(0, 3, 1, 2).cumsum(-1)
        own = torch.einsum(
            "blin,bljn,bhlij,bljhp->blihp", query_BLTN, key_BLTN, since(decay_BHLT), value_BLTHP
        )
        left = (decay_BHLT[..., -1:] - decay_BHLT).exp()
        states = torch.einsum("bljn,bhlj,bljhp->blhpn", key_BLTN, left, value_BLTHP)
        carried = since(fn.pad(decay_BHLT[..., -1], (1, 0)).cumsum(-1))[:, :, :-1, 1:]
        before = torch.einsum("bhkl,blhpn->bkhpn", carried, states)
        earlier = torch.einsum("blin,blhpn,bhli->blihp", query_BLTN, before, decay_BHLT.exp())
        return self.out(self.norm((own + earlier).flatten(3).flatten(1, 2) * fn.silu(gate)))


def since(sums: Tensor) -> Tensor:
    """exp(sums_i - sums_j) for j up to i, else 0."""
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().tril()


class Language(nn.Module):
    """Layers between an embedding and a head. eyes: layers that see patches, whose output is read first."""

    def __init__(
        self,
        words: int,
        width: int,
        layers: Iterable[nn.Module],
        eyes: Iterable[nn.Module] = (),
        seen: int = 0,
    ) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(words, width), nn.ModuleList(layers)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.eyes = nn.ModuleList(eyes)
        if seen:
            self.patches = nn.Linear(3 * 14 * 14, seen)
            self.joins = nn.Sequential(nn.Linear(seen, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, tokens: Tensor, targets: Tensor, patches: Tensor | None = None) -> Tensor:
        x, ahead = self.words(tokens), 0
        if patches is not None:
            y, ahead = self.patches(patches), patches.shape[1]
            for layer in self.eyes:
                y = layer(y)
            x = torch.cat([self.joins(y), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x[:, ahead:]))
        return fn.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gemma() -> Job:
    sizes = {"hidden_size": 2304, "num_hidden_layers": 32, "vocab_size": 256_000}
    config = hf.Gemma2Config(**sizes, use_cache=False)
    return Job(model=lambda: hf.Gemma2ForCausalLM(config), batch=tokens(256_000, 2048), name="Gemma 2")


def llama() -> Job:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128_256}
    config = hf.LlamaConfig(**sizes, num_hidden_layers=32, num_key_value_heads=8, use_cache=False)
    return Job(model=lambda: hf.LlamaForCausalLM(config), batch=tokens(128_256, 2048))


def experts() -> Job:
    width = 2048

    def layer(index: int) -> nn.Module:
        many = Experts(width, 1408, experts=64, seen=6, shared=2)
        return Residual(width, LatentAttention(width, 16, 512), Gated(width, 10944) if index < 2 else many)

    return Job(
        model=lambda: Language(102_400, width, map(layer, range(32))), batch=next_tokens(102_400, 2048)
    )


def hybrid() -> Job:
    width = 4096

    def layer(index: int) -> nn.Module:
        if index % 8 == 7:
            return Residual(width, LatentAttention(width, 32, 1024))
        if index % 2:
            return Residual(width, nn.Sequential(nn.Linear(width, 21504), nn.ReLU(), nn.Linear(21504, width)))
        return Residual(width, Mamba(width))

    return Job(
        model=lambda: Language(131_072, width, map(layer, range(32))), batch=next_tokens(131_072, 2048)
    )


def t5() -> Job:
    sizes = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 16, "num_decoder_layers": 16}
    config = hf.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    return Job(model=lambda: hf.T5ForConditionalGeneration(config), batch=tokens(32_128, 512))


def seeing() -> Job:
    written = next_tokens(151_936, 768)

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        return written(seed, rows) | {"patches": torch.zeros(rows, 256, 588)}

    def model() -> nn.Module:
        eyes = (Layer(768, 12, 3072) for _ in range(12))
        own = (Residual(2048, LatentAttention(2048, 16, 512), Gated(2048, 8192)) for _ in range(36))
        return Language(151_936, 2048, own, eyes, 768)

    return Job(model=model, batch=batch)


MODELS: dict[str, tuple[Callable[[], Job], int]] = {
    "Gemma 2": (gemma, 1),
    "Llama": (llama, 1),
    "experts": (experts, 1),
    "hybrid": (hybrid, 1),
    "T5": (t5, 4),
    "CLIP": (partial(clip, layers=16), 32),
    "seeing": (seeing, 2),
}
"""A model, and rows of a micro-batch."""


@cache
def captured(name: str) -> Captured:
    make, rows = MODELS[name]
    begin = time.process_time()
    model = planning.capture(make(), rows)
    took = time.process_time() - begin
    print(f"{name}: {len(model.graph.ops)} ops, captured in {took:.0f} processor s", flush=True)
    return model


# --- plans --------------------------------------------------------------------------------------------

DEPTHS = {8: 8, 64: 16, 512: 32}
"""Devices -> stages of a pipeline."""

KINDS = {"a100": "a100-80", "h200": "h200"}
CLUSTERS = tuple(f"{count} {kind}" for count, kind in product(DEPTHS, KINDS))


def devices(cluster: str) -> tuple[int, str]:
    """How many there are, and how `find_cluster` calls them."""
    count, kind = cluster.split()
    return int(count), f"{int(count) // 8} nodes of 8 x {KINDS[kind]}"


@cache
def planned(model: str, cluster: str, **how: Any) -> Plan:
    (make, rows), (count, named) = MODELS[model], devices(cluster)
    return planning.plan(
        make(),
        ranks=DEPTHS[count],
        replicas=count // DEPTHS[count],
        microbatches=4 * count,
        microbatch_size=rows,
        cluster=named,
        captured=captured(model),
        **how,
    )


def megatron(model: str, cluster: str) -> Plan:
    """Equal layers, and the fastest number of chunks that divides them."""
    depth = DEPTHS[devices(cluster)[0]]
    found = {piece.layer for piece in layers(captured(model).graph.ops)} - {None, ""}
    every, rest = divmod(len(found), depth)
    chunks = [v for v in range(2, every + 1) if not rest and every % v == 0]
    ways = [{"schedule": "1f1b"}, *({"schedule": "interleaved_1f1b", "chunks": v} for v in chunks)]
    plans = [planned(model, cluster, planner="equal", split_words="off", **way) for way in ways]
    return min(plans, key=lambda plan: plan.predicted_step_s)


FORKED = multiprocessing.get_context("fork")


def step_within(seconds: int, plan: Callable[[], Plan]) -> float | str:
    """The step of a plan; "late", or the class of its error. In a process of its own, which is ended when the
    time is up: what a signal raises is lost in a callback."""

    def answer() -> None:
        try:
            sender.send(plan().predicted_step_s)
        except PipeloomError as error:
            sender.send(type(error).__name__)

    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=answer)
    process.start()
    found: float | str = receiver.recv() if receiver.poll(seconds) else "late"
    process.kill()
    process.join()
    return found


def steps(cases: Iterable[tuple[str, str]], seconds: int) -> Table:
    rows: Table = []
    for model, cluster in cases:
        fixed = megatron(model, cluster)
        begin = time.process_time()
        plan = planned(model, cluster, time_limit=seconds)
        took = time.process_time() - begin
        whole_s = float(plan.notes.get(WHOLE_STEP, plan.predicted_step_s))
        rows.append(
            {
                "model": model,
                "devices": cluster,
                "Megatron's way s": fixed.predicted_step_s,
                "its schedule": fixed.schedule,
                "whole words s": whole_s,
                "auto s": plan.predicted_step_s,
                "parts": max(plan.split_words.values(), default=1),
                "schedule": plan.schedule,
                "times": fixed.predicted_step_s / plan.predicted_step_s,
                "whole times": fixed.predicted_step_s / whole_s,
                "processor s": took,
            }
        )
        print_table(rows[-1:])
    own = [
        {"here, simulated": name, "mean": geometric_mean(gains), "best": max(gains)}
        for name, key in (("auto over Megatron's way", "times"), ("with whole words", "whole times"))
        if (gains := [row[key] for row in rows])
    ]
    print_table(own)
    return rows


def by_planners(cases: Iterable[tuple[str, str]], seconds: int, auto_s: int) -> Table:
    """Steps of every planner that plans for one schedule, for 1F1B; and auto's, with whole words too."""
    rows: Table = []
    for model, cluster in cases:
        auto = planned(model, cluster, split_words="off", time_limit=auto_s)  # captures here, for all
        row: dict[str, Any] = {"model": model, "devices": cluster, "auto": auto.predicted_step_s}
        for name in PLANNERS:
            if not searches(name):
                plan = partial(planned, model, cluster, planner=name, schedule="1f1b", split_words="off")
                row[name] = step_within(seconds, plan)
        rows.append(row)
        print_table([row])
    return rows


# --- on ranks that sleep ------------------------------------------------------------------------------

PACED = ("CLIP", "T5")
PACED_STEP_S = 12.0
"""To which a step is stretched, as a busy machine wakes sleepers some milliseconds late."""


def paced(seconds: int) -> Table:
    plans = []
    for name in PACED:
        plan = planned(name, "8 a100", time_limit=seconds)
        (make, rows), cluster = MODELS[name], find_cluster(devices("8 a100")[1])
        split = split_words(captured(name), plan.split_words)
        model = planning.captured_model(make(), rows, cluster, captured=split)
        costs = PlanCosts(model.graph, model.profiles, cluster).stages(plan)
        edges = sorted(plan.stage_graph(model.graph).between)
        plans.append(paced_plan(name, plan, edges, costs, PACED_STEP_S / plan.predicted_step_s))
    return pace("plans", rounds=3, ranks=8, plans=plans)


# --- unequal devices ----------------------------------------------------------------------------------

UNEQUAL = "2 x a100-40 + 2 x v100-16"


def unequal(seconds: int) -> Table:
    cluster, job = find_cluster(UNEQUAL), gpt()
    plan = partial(
        planning.plan, job, ranks=4, microbatches=16, microbatch_size=8, captured=planning.capture(job, 8)
    )
    begin = time.process_time()
    own = plan(cluster=cluster)
    took = time.process_time() - begin
    rows: Table = [{"devices": "auto", "schedule": own.schedule, "step ms": 1e3 * own.predicted_step_s}]
    rows[0] |= {"plans": 1, "auto over it": 1.0, "processor s": took}
    for order in orders(cluster):
        found, begin = list[tuple[float, str]](), time.monotonic()
        for schedule in SCHEDULES:
            step_s = step_within(seconds, partial(plan, cluster=order, planner="exact", schedule=schedule))
            if not isinstance(step_s, str):
                found.append((step_s, schedule))
        step_s, schedule = min(found)
        kinds = " ".join(device.name.split("-")[0] for device in order.devices)
        row = {"devices": kinds, "schedule": schedule, "step ms": 1e3 * step_s, "plans": len(found)}
        row |= {"auto over it": own.predicted_step_s / step_s}
        rows.append(row | {"s": time.monotonic() - begin})
        print_table(rows[-1:])
    return rows


def orders(cluster: Cluster) -> list[Cluster]:
    """The same devices in each order that is another one."""
    rows = dict.fromkeys(permutations(device.name for device in cluster.devices))
    found = []
    for names in rows:
        left = list(cluster.devices)
        devices = tuple(left.pop(next(i for i, d in enumerate(left) if d.name == name)) for name in names)
        found.append(replace(cluster, devices=devices))
    return found


def main() -> int:
    run: dict[str, Callable[[], Table]] = {
        "steps": lambda: steps(product(given.models, given.clusters), given.time_limit),
        "planners": lambda: by_planners(each_on_first, given.seconds, given.time_limit),
        "paced": lambda: paced(given.time_limit),
        "unequal": lambda: unequal(given.seconds),
    }
    parser = parser_of(__doc__, run)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=["8 a100", "64 h200"])
    parser.add_argument("--time-limit", type=int, default=20, help="of a search by auto, in seconds")
    parser.add_argument("--seconds", type=int, default=10, help="of any other planner")
    given = parser.parse_args()
    each_on_first = product(given.models, given.clusters[:1])
    return run_parts(given.parts, run)


if __name__ == "__main__":
    sys.exit(main())

"""Small models of many kinds, each with a batch function, as the tests of numbers use them.

All are without dropout, so that they can be compared with plain PyTorch; `dropout` families are made by
`families(dropout=0.1)`. Batches come from generators of their own and never touch the global one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers as hf
from batches import Batch, normal
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 96
LENGTH = 12


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_batch(seed: int, size: int, *, length: int = LENGTH) -> Batch:
    ids = torch.randint(1, VOCABULARY, (size, length), generator=_generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_token_batch(seed: int, size: int) -> Batch:
    """Rows of different length: padding has attention 0 and label -100."""
    batch = token_batch(seed, size)
    lengths = torch.randint(3, LENGTH + 1, (size, 1), generator=_generator(seed + 1000))
    real = torch.arange(LENGTH) < lengths
    batch["attention_mask"] = real.long()
    batch["labels"] = torch.where(real, batch["labels"], -100)
    return batch


def shifted_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """How many labels a causal language model's loss averages over."""
    return (batch["labels"][:, 1:] != -100).sum()


def image_batch(seed: int, size: int) -> Batch:
    g = _generator(seed)
    return {"x": torch.randn(size, 3, 8, 8, generator=g), "y": torch.randint(0, 5, (size,), generator=g)}


vector_batch = normal(x=(8,), y=(8,))


class GPT(nn.Module):
    """Our own: position embedding, attention by sdpa, tied output."""

    def __init__(self, width: int = 24, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return {"loss": fn.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        a = fn.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.norms[1](x))


class ConvNet(nn.Module):
    """Residual, with BatchNorm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()

        def conv(channels: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)]

        self.stem = nn.Sequential(*conv(3), nn.ReLU(True))
        self.blocks = nn.ModuleList(nn.Sequential(*conv(8), nn.ReLU(True), *conv(8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = fn.relu_(block(h) + h)
        return fn.cross_entropy(self.head(h.mean((2, 3))), y)


class TwoEncoders(nn.Module):
    """Two branches that meet: its stages form a DAG."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(8, 12), nn.Sigmoid(), nn.Linear(12, 8), nn.LayerNorm(8))
        self.join = nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.join(self.left(x), self.right(y)).square().mean()


class Skips(nn.Module):
    """Values that are read many stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = [x]
        for index, layer in enumerate(self.layers):
            seen.append(torch.tanh(layer(seen[-1])) + seen[index // 2])
        return fn.mse_loss(seen[-1] + seen[1], y)


class Frozen(nn.Module):
    """The first part does not train; a frozen layer stands in the middle, and one parameter is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
        self.first = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(self.features(x)).relu()
        return fn.mse_loss(self.last(self.fixed(h).tanh()), y)


class NoGradBranch(nn.Module):
    """Integer and boolean values cross, a target is made without gradients, a sub-module returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.teacher = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def part(self, h: Tensor) -> tuple[Tensor, None, Tensor]:
        with torch.no_grad():
            keep = self.teacher(h) > 0
        return self.body(h), None, keep

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
        with torch.no_grad():
            bins = (self.teacher(x).abs() * 3).long().clamp(0, 9)[:, :4]
        h = self.table(bins).mean(1)
        h, nothing, keep = self.part(h)
        assert nothing is None
        target = self.teacher(h).detach()
        h = torch.where(keep, self.head(h), h.exp())
        return {"loss": (h - y).square().mean() + (h - target).abs().mean(), "extra": nothing}


class TiedThrice(nn.Module):
    """One weight used at three places under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.between[0](self.a(x).tanh())
        h = self.between[1](self.b(h).tanh())
        return fn.mse_loss(self.c(h), y)


class Counting(nn.Module):
    """Buffers that change: running statistics, a counter, a moving average of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        self.seen += len(x)
        self.average.lerp_(h.detach().mean(0), 0.1)
        return fn.mse_loss(self.second(h.relu()) * self.scale, y)


_SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}


def gpt2(dropout: float = 0.0) -> nn.Module:
    more: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    more |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_SMALL, **more, n_positions=64, use_cache=False))


def bert(dropout: float = 0.0) -> nn.Module:
    config = hf.BertConfig(**_SMALL, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return hf.BertForMaskedLM(config)


def llama(dropout: float = 0.0) -> nn.Module:
    config = hf.LlamaConfig(**_SMALL, num_key_value_heads=2, use_cache=False, attention_dropout=dropout)
    return hf.LlamaForCausalLM(config)


def t5(dropout: float = 0.0) -> nn.Module:
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": VOCABULARY}
    config = hf.T5Config(**sizes, use_cache=False, decoder_start_token_id=0, dropout_rate=dropout)
    return hf.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_SMALL, **more))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "gpt2": (gpt2, token_batch),
    "bert": (bert, token_batch),
    "llama": (llama, token_batch),
    "t5": (t5, token_batch),
    "mixtral": (mixtral, token_batch),
    "convnet": (ConvNet, image_batch),
}
"""The six families named in the requirements."""

OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "gpt": (GPT, token_batch),
    "two_encoders": (TwoEncoders, vector_batch),
    "skips": (Skips, vector_batch),
    "frozen": (Frozen, vector_batch),
    "no_grad_branch": (NoGradBranch, vector_batch),
    "tied_thrice": (TiedThrice, vector_batch),
    "counting": (Counting, vector_batch),
}

DROPOUT = {
    name: (partial(make, dropout=0.2), token_batch)
    for name, make in {"gpt": GPT, "gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5}.items()
}
"""The same with dropout, where the family has any."""

NAMES = (*FAMILIES, *OWN)

_MADE: dict[tuple[str, bool], Job] = {}


def job(name: str, *, double: bool = False) -> Job:
    """The job of a model, the same object each time; double: in float64."""
    key = (name, double)
    if key not in _MADE:
        model, batch = (FAMILIES | OWN)[name]
        plain = Job(model=model, batch=batch, optimizer=sgd, name=name)
        _MADE[key] = in_double(plain) if double else plain
    return _MADE[key]


def with_dropout(name: str) -> Job:
    model, batch = DROPOUT[name]
    return Job(model=model, batch=batch, optimizer=sgd, name=f"{name}_dropout")


def in_double(single: Job) -> Job:
    def batch(seed: int, size: int) -> Batch:
        made = single.batch(seed, size)
        return {n: t.double() if t.is_floating_point() else t for n, t in made.items()}

    return replace(single, model=lambda: single.model().double(), batch=batch)

"""Plain modules, each with code of a kind that tracing, or cutting, may get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipeloom import Job

from . import CLASSES, Batch, cross_entropy, job, square, tokens

WIDTH = 8


def _vectors(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=made),
        "y": torch.randint(0, CLASSES, (rows,), generator=made),
    }


def _series(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, WIDTH, generator=made),
        "y": torch.randint(0, CLASSES, (rows,), generator=made),
    }


def _block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


class Stack(nn.Module):
    """Three blocks and a head. Subclasses say what is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
        return h

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.run(x))


class HookOnParameter(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1].weight.register_hook(lambda grad: grad * 0.5)


class HookOnTensor(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        if self.training:
            h.register_hook(lambda grad: grad * 0.5)
        return self.blocks[2](self.blocks[1](h))


class HookOnModule(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


class Teacher(Stack):
    """A moving average of the first block, changed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.blocks[0]).requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.blocks[0].parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        target = self.teacher(h)
        return super().run(h) + target


class StepCounter(Stack):
    """A Python number that grows with every forward, and is used."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        return super().run(h) / self.steps


class MeanInPlace(Stack):
    """A buffer that is replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Decides(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        h = self.blocks[1](h) if h.sum() > 0 else -h
        return self.blocks[2](h)


class UsesNumpy(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        scale = np.abs(h.detach().numpy()).mean()
        return h * float(scale)


class LayerDrop(Stack):
    """Blocks are left out by chance, of which there is none here."""

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 1e-12:
                continue
            h = h + block(h)
        return h


class ExitsEarly(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
            if h.std() > 1.2:
                break
        return h


class Skips(Stack):
    def run(self, h: Tensor) -> Tensor:
        seen = [h]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        return torch.stack(seen).sum(0)


class Doubling(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.tanh()


class OwnGradient(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = Doubling.apply(block(h))
        return h


class Checkpointed(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return h


class CheckpointedReentrant(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        for block in list(self.blocks)[1:]:
            h = h + checkpoint(block, h, use_reentrant=True)
        return h


class ChangesInPlace(Stack):
    def run(self, h: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            more = block(h)
            h = h + 0
            h += more
            h[:, index].mul_(0.5)
        return h


class Penalty(Stack):
    """A gradient penalty: autograd inside of the forward."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logits = self.head(self.run(x))
            (grad,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return {"loss": fn.cross_entropy(logits, y) + grad.square().mean()}


class Fourier(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = torch.fft.irfft(torch.fft.rfft(block(h)) * 1.5, n=WIDTH)
        return h


class WithoutDeclaring(Stack):
    """Tensors kept in a plain list, changed by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.past = [torch.zeros(WIDTH)]

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h) + self.past[0]
        if self.training:
            self.past[0] = h.detach().mean(0)
        return h


class MakesParameters(Stack):
    """Puts a tensor in the place of a weight, as weight normalisation by hand does."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(CLASSES, WIDTH))
        del self.head.weight

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.head.weight = fn.normalize(self.direction, dim=-1)
        return self.head(self.run(x))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.cells(x)[0][:, -1])


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.encoder(x).mean(1))


class Bags(nn.Module):
    """Sparse gradients of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(48, WIDTH, mode="mean", sparse=True)
        self.body = _block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.head(self.body(self.bag(input_ids)))


def _parametrised(how: Callable[..., nn.Module]) -> nn.Module:
    model = Stack()
    for block in model.blocks:
        how(block[1])
    return model


def _scripted() -> nn.Module:
    model = Stack()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    return model


def _plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def _read_in_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss = fn.cross_entropy(outputs, batch["y"])
    return loss * (1.0 / max(loss.item(), 0.1))


def _model(
    model: Callable[[], nn.Module], batch: Callable[[int, int], Batch] = _vectors, **more: Any
) -> Callable[[], Job]:
    more.setdefault("loss", cross_entropy)
    return partial(job, model, batch, name=getattr(model, "__name__", "model"), **more)


MODELS: dict[str, Callable[[], Job]] = {
    "hook on a parameter": _model(HookOnParameter),
    "hook on a tensor": _model(HookOnTensor),
    "full backward hook": _model(HookOnModule),
    "moving-average teacher": _model(Teacher),
    "step counter": _model(StepCounter),
    "replaced buffer": _model(MeanInPlace),
    "decision on data": _model(Decides),
    "NumPy": _model(UsesNumpy),
    "number read in the loss": _model(Stack, loss=_read_in_loss),
    "LayerDrop": _model(LayerDrop),
    "early exit": _model(ExitsEarly),
    "all layers joined": _model(Skips),
    "gradient of its own": _model(OwnGradient),
    "checkpointing": _model(Checkpointed),
    "reentrant checkpointing": _model(CheckpointedReentrant),
    "changes in place": _model(ChangesInPlace),
    "gradient penalty": _model(Penalty, loss=None),
    "Fourier transform": _model(Fourier),
    "tensors in a list": _model(WithoutDeclaring),
    "weight put in place": _model(MakesParameters),
    "LSTM": _model(partial(Recurrent, nn.LSTM), _series),
    "bidirectional GRU": _model(partial(Recurrent, nn.GRU, bidirectional=True), _series),
    "nn.TransformerEncoder": _model(Encoded, _series),
    "sparse embedding": partial(
        Job, model=Bags, batch=tokens(), loss=square, optimizer=_plain_sgd, name="Bags"
    ),
    "weight norm": _model(partial(_parametrised, parametrizations.weight_norm)),
    "spectral norm": _model(partial(_parametrised, parametrizations.spectral_norm)),
    "orthogonal": _model(partial(_parametrised, parametrizations.orthogonal)),
    "TorchScript part": _model(_scripted),
}

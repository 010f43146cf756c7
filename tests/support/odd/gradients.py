"""Models with hooks, checkpoints and gradients of their own. Each kind gives the numbers of plain PyTorch or
is refused by name, with its line and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import nets
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import ANYWHERE, WIDTH, Between, Block, Case, Stack


def tripled(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * 3 for grad in grads)


class HookAfterAccumulating(Stack):
    def prepare(self) -> None:
        def tripled_in_place(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(3)

        self.blocks[1].norm.weight.register_post_accumulate_grad_hook(tripled_in_place)


def hook_on_a_finished_model() -> nn.Module:
    model = Stack()
    model.head.weight.register_hook(lambda grad: grad * 3)
    return model


def hook_by_a_constructor_that_reads_data() -> nn.Module:
    model = Stack()
    if float(model.head.weight.sum()) < 1e9:  # cannot run on fake tensors
        model.head.weight.register_hook(lambda grad: grad * 3)
    return model


class ForwardHooks(Stack):
    def prepare(self) -> None:
        self.blocks[1].register_forward_hook(lambda module, args, result: result * 2)
        self.blocks[1].norm.register_forward_hook(lambda module, args, result: result + 1)
        self.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class FullBackwardHook(Stack):
    def prepare(self) -> None:
        self.blocks[1].register_full_backward_hook(lambda module, inner, outer: tripled(inner))


class FullBackwardPreHook(Stack):
    def prepare(self) -> None:
        self.blocks[1].register_full_backward_pre_hook(lambda module, outer: tripled(outer))


class OldBackwardHook(Stack):
    def prepare(self) -> None:
        self.blocks[1].net[0].register_backward_hook(lambda module, inner, outer: tripled(inner))


class HookOnTensorInside(Stack):
    class block(Block):
        def forward(self, h: Tensor) -> Tensor:
            h = super().forward(h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad * 3)
            return h


class SavedTensorsHooks(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return super().run(h)


class HookOnTensor(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.blocks[2](self.blocks[1](h))


class HookOnNode(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda inner, outer: tripled(inner))
        return self.blocks[2](self.blocks[1](h))


class Signed(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -grad * x.sign()


class OwnGradient(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = Signed.apply(block(h))
        return h


class OwnGradientBetween(OwnGradient, Between):
    pass


class HalvesInPlace(Stack):
    """Autograd passes the gradient on as if nothing had been halved."""

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        h.detach().mul_(0.5)
        h = self.blocks[1](h * 1)
        h.data.mul_(0.5)
        return self.blocks[2](h * 1)


class DetachesInPlace(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        beside = h * 1
        beside.detach_()
        return self.blocks[2](self.blocks[1](h) + beside)


class HalvesInside(Stack):
    class block(Block):
        def forward(self, h: Tensor) -> Tensor:
            h = super().forward(h)
            h.detach()[0].mul_(0.5)
            return h * 1


class ClampsInPlace(Stack):
    """Functions that change what they are given without a name that says so."""

    clamp = nn.ReLU(inplace=True)

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        self.clamp(h.detach())
        return self.blocks[2](self.blocks[1](h * 1))


class ClampsInto(ClampsInPlace):
    @staticmethod
    def clamp(h: Tensor) -> None:
        torch.clamp(h, min=0, out=h)


class ClampsWithoutGradient(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        with torch.no_grad():
            F.leaky_relu(h, 0.1, True)
        return self.blocks[2](self.blocks[1](h * 1))


class ClampsAPartWithoutGradient(Stack):
    """The view that is changed is made where no gradient is."""

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        with torch.no_grad():
            h[:, :6].clamp_(max=0.3)
        return self.blocks[2](self.blocks[1](h * 1))


class WritesWithoutGradient(Stack):
    """Into what was made outside, by way of an index and of a view, and as a whole where a view is read."""

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        mask, scale = torch.ones_like(h), torch.ones_like(h)
        part, seen = mask[:, 2:5], scale[0]
        with torch.no_grad():
            mask[:, 6:] = h[:, 6:].square()
            part.add_(h[:, 2:5])
            scale.mul_(h)
        return self.blocks[2](self.blocks[1](h * mask + seen))


class InfersApart(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.blocks[0](h)
        return self.blocks[2](self.blocks[1](h) + target.clone())


class FreezesForAWhile(Stack):
    """As the generator's loss does with a discriminator."""

    def run(self, h: Tensor) -> Tensor:
        self.blocks[1].requires_grad_(False)
        h = self.blocks[1](self.blocks[0](h))
        self.blocks[1].requires_grad_(True)
        return self.blocks[2](h)


class FreezesInside(Stack):
    class block(Block):
        def forward(self, h: Tensor) -> Tensor:
            self.net.requires_grad_(False)
            h = super().forward(h)
            self.net.requires_grad_(True)
            return super().forward(h)


class Penalty(Stack):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logits = self.head(self.run(self.inlet(x)))
            (grad,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return {"loss": F.cross_entropy(logits, y) + grad.square().mean()}


class FuncGrad(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x - torch.func.grad(lambda t: self.net(t).square().sum())(x)


class Checkpointed(Stack):
    reentrant = False

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h


class CheckpointedBetween(Checkpointed, Between):
    pass


class CheckpointedOldWay(Checkpointed, Between):
    reentrant = True


class CheckpointedInside(Stack):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Between.block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)


class CheckpointAround(Between):
    """What is checkpointed is cut: an nn.Sequential, and a function that calls two modules."""

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))

    def run(self, h: Tensor) -> Tensor:
        h = checkpoint(self.blocks[0], h, use_reentrant=True)
        return checkpoint(lambda h: self.blocks[2](self.blocks[1](h)), h, use_reentrant=True)


class CheckpointAroundInputs(CheckpointAround):
    """The checkpoint's inputs need no gradient, so PyTorch gives none to what is inside."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(checkpoint(self.blocks[0], x, use_reentrant=True), y)


class CheckpointedNorms(Checkpointed):
    """PyTorch runs what is checkpointed twice, and so moves its running statistics twice."""

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


class CheckpointedNormsInside(Stack):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CheckpointedNorms.block()

        def forward(self, h: Tensor) -> Tensor:
            return checkpoint(self.inner, h, use_reentrant=True)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(nets.VOCABULARY, WIDTH, sparse=True)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, nets.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.tokens(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SparseProducts(Stack):
    """As layers of a graph network have them: edges are sparse, and their weights are learned."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.tensor([[0, 2, 5], [3, 1, 1]]))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            graph = torch.sparse_coo_tensor(self.edges, self.weight, (WIDTH, WIDTH), check_invariants=False)
            return super().forward(x + torch.sparse.mm(graph, x.T).T)


class SparseBetween(Stack):
    def run(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(WIDTH, dtype=h.dtype).to_sparse(), super().run(h).T).T


class SparseBuffer(Stack):
    def prepare(self) -> None:
        self.register_buffer("graph", torch.eye(WIDTH).to_sparse())

    def run(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, super().run(h).T).T


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys = torch.tanh(self.first(x))
        values = torch.tanh(self.second(keys))
        return values.gather(1, keys.argsort(1)).square().mean()


DROPPED = "the hook was dropped without a word"
LOST = "a reentrant checkpoint around several modules lost the gradients of all of them, without a word"
OWN, INTO = "torch.autograd.Function", "into the forward of a module"

CASES = [
    *(
        Case(model, DROPPED, expect=rf"refused: {owner}\.weight, by {name} \(", hint=OWN)
        for model, owner, name in (
            (HookAfterAccumulating, r"blocks\.1\.norm", "register_post_accumulate_grad_hook"),
            (hook_on_a_finished_model, "head", "register_hook"),
            (hook_by_a_constructor_that_reads_data, "head", "register_hook"),
        )
    ),
    Case(ForwardHooks, "hooks ran twice at each boundary"),
    Case(FullBackwardHook, "an error of torch", between="full_backward_hook"),
    Case(FullBackwardPreHook, "an error of torch", between="full_backward_pre_hook"),
    Case(OldBackwardHook, "an error of torch", between="backward_hook"),
    Case(HookOnTensorInside, "a hook on a tensor was lost in export", between="a hook on a tensor"),
    Case(SavedTensorsHooks, DROPPED, between="saved_tensors_hooks"),
    Case(HookOnTensor, "it ran on each rank", expect="refused: calls register_hook on a tensor", hint=INTO),
    Case(HookOnNode, DROPPED, expect="refused: calls grad_fn on a tensor between modules", hint=INTO),
    Case(OwnGradient, "the gradient of the user's own function was lost in export", between="Signed"),
    Case(OwnGradientBetween, "an autograd function between modules", between="data", slow=True),
    *(
        Case(model, "its gradient was lost in export", between=reason)
        for model, reason in (
            (HalvesInPlace, r"detach\(\)"),
            (DetachesInPlace, "detaches a tensor"),
            (HalvesInside, r"detach\(\)"),
            (ClampsInPlace, r"detach\(\)"),
            (ClampsInto, r"detach\(\)"),
            (ClampsWithoutGradient, r"no_grad\(\)"),
            (ClampsAPartWithoutGradient, r"no_grad\(\)"),
            (FreezesForAWhile, "requires a gradient"),
            (FreezesInside, "requires a gradient"),
        )
    ),
    Case(WritesWithoutGradient, "what was written had a gradient in export"),
    Case(InfersApart, "its gradient is stopped in export, too"),
    Case(Penalty, "autograd inside of the forward", name="gradient penalty", expect="refused: autograd.grad"),
    Case(FuncGrad, "told to run it in plain PyTorch", expect="refused: torch.func", hint="autograd.grad"),
    Case(Checkpointed, "checkpoints that export can capture", slow=True),
    Case(CheckpointedBetween, "checkpoints around modules", between="data"),
    Case(CheckpointedOldWay, "a reentrant checkpoint", between="CheckpointFunction", split=False),
    Case(CheckpointedInside, "checkpoints inside modules", between="data", slow=True),
    Case(CheckpointAround, LOST, between="CheckpointFunction", cuts=(2, 4), split=False),
    Case(CheckpointAroundInputs, LOST, between="CheckpointFunction", cuts=(4, 2), split=False, slow=True),
    *(
        Case(
            model,
            "a checkpoint around running statistics lost a part of their updates, without a word",
            expect=rf"refused: {model.__name__} updates running statistics inside a checkpoint",
            hint="--treatments recompute",
        )
        for model in (CheckpointedNorms, CheckpointedNormsInside)
    ),
    Case(
        SparseEmbedding,
        "it was exported, and tracing its backward ended in a traceback",
        between=r"has sparse gradients, in aten\.embedding\.default",
        batch=nets.token_batch,
        cuts=(2, 3),
    ),
    Case(SparseProducts, "sparse tensors have no storage", between="computes with a sparse tensor"),
    Case(
        SparseBetween,
        "and ended in errors of torch",
        expect="refused: sparse tensor between",
        hint="one module",
    ),
    Case(SparseBuffer, "and ended in errors of torch", expect="refused: graph .* is sparse", hint="indices"),
    Case(Sorted, "a value has a gradient, its readers give none: KeyError", cuts=ANYWHERE, slow=True),
    Case(
        nets.NoGradBranch,
        "a tied parameter without gradient got one of zeros: weight decay shrank it; and a stage that only "
        "detaches what it reads never sent the gradient that its source waited for",
        batch=nets.vector_batch,
        optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5),
        cuts=(3, 6, 12),
        slow=True,
    ),
]

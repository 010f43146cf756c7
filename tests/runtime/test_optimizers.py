"""What optimizers are said to keep and to need for a step, against what they do with real tensors."""

import inspect
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from optimizers import BOTH, CLASSES, REFUSED, TRAINS, Make, MuonAndAdamW, maker
from torch import nn

from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import UpdateBytes, step_bytes
from pipeloom.runtime.optimizers import default_optimizer, optimizers_of, stand_in, update_bytes
from pipeloom.runtime.weights import Weights
from pipeloom.tracer.random import seeded
from pipeloom.tracer.tensors import LiveBytes, tensors_of

SHAPES = {"a": (96, 40), "b": (40, 24), "c": (24,), "d": (96, 40), "e": (2, 3, 4)}


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    return {n: s for n, s in SHAPES.items() if name != "Muon" or len(s) == 2}


def counted(make: Make | None, name: str = "", accelerated: bool = False) -> dict[str, UpdateBytes]:
    params = {n: stand_in(s, torch.float32) for n, s in shapes_of(name).items()}
    return update_bytes(make, params, accelerated)


def measured(make: Make, name: str) -> tuple[int, int]:
    """Bytes of state, and the most scratch of ten steps, on the CPU."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes_of(name).values()]
    optimizer = make(params)
    most = 0
    for step in range(10):
        for p in params:
            p.grad = torch.randn_like(p)
        with LiveBytes() as live:
            optimizer.step()
        if step:  # the first one makes the state
            most = max(most, live.peak_bytes)
    states = [[*o.state.values()] for o in optimizers_of(optimizer)]
    return sum(t.nbytes for t in tensors_of(states)), most


def flags(name: str) -> list[dict[str, bool]]:
    known = inspect.signature(CLASSES[name]).parameters if name in CLASSES else {}
    return [{"foreach": True}, {"foreach": False}] if "foreach" in known else [{}]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "settings"), [(n, s) for n in (*TRAINS, "Muon") for s in flags(n)])
def test_counted_is_what_an_optimizer_keeps_and_at_least_what_it_needs(name, settings) -> None:
    make = maker(name, **settings)
    updates = counted(make, name)
    state, scratch = measured(make, name)
    assert sum(update.state for update in updates.values()) == state
    assert scratch <= step_bytes(updates.values()) <= 2 * scratch + 64
    assert any(update.together for update in updates.values()) == settings.get("foreach", False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in REFUSED])
def test_accelerators_update_all_parameters_at_once_unless_they_are_told_otherwise(name: str) -> None:
    as_default, at_once, apart = (
        counted(maker(name, **settings), accelerated=True)
        for settings in ({}, {"foreach": True}, {"foreach": False})
    )
    assert as_default == at_once == counted(maker(name, foreach=True))
    assert apart == counted(maker(name, foreach=False))
    if "fused" in inspect.signature(CLASSES[name]).parameters:
        assert step_bytes(counted(maker(name, fused=True), accelerated=True).values()) == 0


def test_the_default_optimizer_is_fused_on_accelerators() -> None:
    assert step_bytes(counted(None, accelerated=True).values()) == 0 < step_bytes(counted(None).values())
    made = [default_optimizer(kind)([stand_in((2,), torch.float32)]) for kind in (True, False)]
    assert [optimizer.defaults["fused"] for optimizer in made] == [True, None]


@pytest.mark.parametrize("name", [name for name in TRAINS if name != BOTH])
def test_a_parameter_without_dimensions_is_counted(name: str) -> None:
    (update,) = update_bytes(maker(name), {"scale": stand_in((), torch.float32)}, False).values()
    param = nn.Parameter(torch.ones(()))
    weights = Weights({"scale": param}, {}, maker(name))
    weights.grads.add("scale", torch.ones(()))
    weights.step()
    assert weights.sizes["optimizer"] == update.state


@pytest.mark.parametrize("name", (*TRAINS, "Muon"))
def test_a_rank_that_trains_nothing_steps_and_holds_nothing(name: str) -> None:
    """Its optimizer has the groups of one process, without parameters."""
    everywhere = {n: stand_in(s, torch.float32) for n, s in shapes_of(name).items()}
    weights = Weights({}, {}, maker(name), everywhere=everywhere)
    weights.step()
    assert weights.sizes["optimizer"] == weights.step_adds_bytes == 0
    groups = [group for optimizer in weights.optimizers for group in optimizer.param_groups]
    assert groups and not any(group["params"] for group in groups)


Params = Iterable[nn.Parameter]


class Bare(torch.optim.Optimizer):
    """Without settings."""

    own = property(lambda self: self.param_groups[0]["params"])

    def __init__(self, params: Params) -> None:
        super().__init__(params, {})


class Plain(torch.optim.SGD):
    own = Bare.own

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=1.0)


class Pair(Bare):
    """Keeps two tensors of each parameter in one list."""

    def step(self) -> None:
        for p in (p for p in self.own if p.grad is not None):
            self.state[p].setdefault("pair", [torch.zeros_like(p), torch.zeros_like(p)])


class NeedsData(Bare):
    """Its step cannot be made without data."""

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for p in self.own if p.grad is not None):
            p -= torch.tensor(p.grad.tolist()) * 0.1
            self.state[p]["mean"] = torch.zeros_like(p)


@pytest.mark.parametrize(
    ("make", "each"), [(maker("Adam"), 2 * 3 * 4 + 4), (Pair, 2 * 3 * 4), (NeedsData, 3 * 4)]
)
def test_a_step_asks_for_the_state_that_it_will_make_and_only_once(make: Make, each: int) -> None:
    """A parameter without gradient has no state, and was asked for at every step; so was state in lists."""
    params = {name: nn.Parameter(torch.zeros(3)) for name in ("used", "unused")}
    weights = Weights(params, {}, make)
    for step in range(2):
        weights.grads.add("used", torch.ones(3))
        assert weights.step_adds_bytes == weights.step_bytes + (each if step == 0 else 0)
        weights.step()
        assert weights.sizes["optimizer"] == each


class Holds:
    """Steps some optimizers, which need not be for distinct parameters."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Counts(Holds):
    """Checkpoints do not have its count, which a rehearsal moved."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.taken = 0

    def step(self) -> None:
        self.taken += 1
        super().step()


class Slow(torch.optim.Optimizer):
    """Steps another optimizer, and keeps a copy of each parameter besides."""

    def __init__(self, params: Params) -> None:
        self.fast = Plain(params)
        super().__init__(self.fast.param_groups, {})

    def step(self) -> None:
        self.fast.step()
        for p in self.fast.own:
            self.state[p]["slow"] = p.detach().clone()


class SlowList(Plain):
    """Keeps a list of copies of its parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.slow = [p.detach().clone() for p in self.own]


class Lists(Plain):
    """Keeps its groups under other names, too."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.all, self.groups = self.own, [*self.param_groups]


class ClipsAll(Plain):
    """Its step divides by the norm of all gradients."""

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.own, 1.0)
        super().step()


def clips_in_a_hook(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    adam = torch.optim.Adam(params, eps=1e-2)
    adam.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 1.0) and None)
    return adam


def clips_in_its_step(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    sgd = torch.optim.SGD(params, lr=0.5)
    plain = sgd.step
    sgd.step = lambda: (nn.utils.clip_grad_norm_(params, 0.1), plain())  # type: ignore[assignment, method-assign]
    return sgd


class ClipsInFloat32(ClipsAll):
    """Its average takes no gradients in float64."""

    def step(self) -> None:
        for p in self.own:
            torch.zeros_like(p, dtype=torch.float32).lerp_(p.grad, 0.5)
        super().step()


def hooked(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    for param in params:
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return torch.optim.SGD(params, lr=0.5)


class Noisy(Plain):
    """Draws for each parameter, whichever others there are."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for p in self.own:
            p += 0.1 * torch.randn_like(p)


ONE_OF_TWO = {"a": (2, 2), "b": (3,)}


def weights_of(make: Make, *own: str) -> Weights:
    """On a rank that has these two parameters or one of them."""
    everywhere = {name: stand_in(shape, torch.float32) for name, shape in ONE_OF_TWO.items()}
    return Weights({n: nn.Parameter(torch.ones(ONE_OF_TWO[n])) for n in own}, {}, make, everywhere=everywhere)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (ClipsAll, "other ranks"),
        (lambda params: Holds(ClipsAll(params)), "other ranks"),
        (clips_in_a_hook, "other ranks"),
        (clips_in_its_step, "other ranks"),
        (ClipsInFloat32, "other ranks"),
        (SlowList, "slow"),
    ],
)
def test_an_update_that_depends_on_what_other_ranks_have_is_refused(make: Make, word: str) -> None:
    """Each rank clipped by the norm of its own gradients, without a word."""
    with pytest.raises(PlanError, match=word):
        weights_of(make, "b")
    if make is not SlowList:
        weights_of(make, "a", "b")


@pytest.mark.parametrize("make", [Noisy, MuonAndAdamW, Lists])
def test_an_update_of_a_parameter_by_itself_is_not(make: Make) -> None:
    optimizer = weights_of(make, "b").optimizer
    assert not isinstance(optimizer, Lists) or len(optimizer.all) == 1


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (Slow, "of its own"),
        (hooked, "hook on"),
        (SlowList, "slow"),
        (lambda params: Holds(SlowList(params)), "SlowList"),
        (lambda params: Holds(), "Holds"),
        (lambda params: Holds(*(torch.optim.SGD(params, lr=1.0) for _ in range(2))), "both"),
        (lambda params: Counts(torch.optim.SGD(params, lr=1.0)), "taken"),
        (lambda params: torch.optim.SGD(params, lr=-1.0), "learning rate"),
        (lambda params: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0), "given"),
    ],
)
def test_what_is_no_optimizer_is_refused(make: Make, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        counted(make)


def test_it_leaves_the_random_numbers_of_other_threads_alone() -> None:
    """Ranks may be threads, and one begins with its weights while another counts its optimizer's bytes."""
    params = {"a": stand_in((2,), torch.float32)}
    counting = threading.Thread(target=update_bytes, args=(None, params, False))
    with seeded(0, "weights"):
        counting.start()
        counting.join(timeout=0.3)
        assert counting.is_alive()
    counting.join()

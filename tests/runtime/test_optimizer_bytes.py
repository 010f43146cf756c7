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
from pipeloom.runtime.optimizer_bytes import default_optimizer, optimizers_of, stand_in, update_bytes
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
def test_counted_is_what_an_optimizer_keeps_and_at_least_what_it_needs(
    name: str, settings: dict[str, bool]
) -> None:
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


def test_the_default_optimizer_has_no_scratch_on_accelerators() -> None:
    assert step_bytes(counted(None, accelerated=True).values()) == 0
    largest = 96 * 40 * 4
    assert step_bytes(counted(None).values()) == 3 * largest
    made = [default_optimizer(kind)([stand_in((2,), torch.float32)]) for kind in (True, False)]
    assert [optimizer.defaults["fused"] for optimizer in made] == [True, None]


def test_two_optimizers_in_one_each_count_their_own() -> None:
    both = counted(MuonAndAdamW)
    assert both["a"] == counted(maker("Muon"), "Muon")["a"]
    assert both["c"] == counted(maker("AdamW"))["c"]


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


class Pair(torch.optim.Optimizer):
    """Keeps two tensors of each parameter in one list."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("pair", [torch.zeros_like(p), torch.zeros_like(p)])


@pytest.mark.parametrize(("make", "each"), [(maker("Adam"), 2 * 3 * 4 + 4), (Pair, 2 * 3 * 4)])
def test_a_step_asks_for_the_state_that_it_will_make_and_only_once(make: Make, each: int) -> None:
    """A parameter without gradient has no state, and was asked for at every step; so was state in lists."""
    params = {name: nn.Parameter(torch.zeros(3)) for name in ("used", "unused")}
    weights = Weights(params, {}, make)
    for step in range(2):
        weights.grads.add("used", torch.ones(3))
        assert weights.step_adds_bytes == weights.step_bytes + (each if step == 0 else 0)
        weights.step()
        assert weights.sizes["optimizer"] == each


class NeedsData(torch.optim.Optimizer):
    """Its step cannot be made without data."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p -= torch.tensor(p.grad.tolist()) * 0.1
            self.state[p]["mean"] = torch.zeros_like(p)


def test_one_that_needs_data_steps_small_parameters() -> None:
    assert {n: u.state for n, u in counted(NeedsData).items()} == {
        n: 4 * torch.Size(s).numel() for n, s in SHAPES.items()
    }


def test_groups_with_equal_settings_are_stepped_once() -> None:
    steps = []

    class Counts(torch.optim.Adam):
        def step(self) -> None:  # type: ignore[override]
            steps.append(1)
            super().step()

    def grouped(counts: int) -> Make:
        betas = [(0.9, 0.99), (0.5, 0.99)]
        return lambda params: Counts(
            [{"params": [p], "betas": betas[i % counts]} for i, p in enumerate(params)]
        )

    params = {str(i): stand_in((3,), torch.float32) for i in range(20)}
    for counts in (1, 2):
        steps.clear()
        assert len(set(update_bytes(grouped(counts), params, False).values())) == 1
        assert len(steps) == 3 * counts  # one makes the state, and two are looked at


class Holds:
    """Steps some optimizers, which need not be for distinct parameters."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Slow(torch.optim.Optimizer):
    """Steps another optimizer, and keeps a copy of each parameter besides."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.fast = torch.optim.SGD(params, lr=1.0)
        super().__init__(self.fast.param_groups, {})

    def step(self) -> None:  # type: ignore[override]
        self.fast.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()


class SlowList(torch.optim.SGD):
    """Keeps a list of copies of its parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]


class Together(torch.optim.SGD):
    """Counts its steps for all parameters together."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"] = self.state.get("all", 0) + 1


class Lists(torch.optim.SGD):
    """Keeps its groups under other names, too."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)
        self.all, self.groups = self.param_groups[0]["params"], [*self.param_groups]


def test_lists_of_groups_may_have_other_names() -> None:
    everywhere = {name: stand_in((2,), torch.float32) for name in ("a", "b")}
    own = nn.Parameter(torch.zeros(2))
    weights = Weights({"b": own}, {}, Lists, everywhere=everywhere)
    assert isinstance(weights.optimizer, Lists) and weights.optimizer.all == [own]
    assert weights.step_bytes == 0


class NeedsDataSlow(Slow):
    """Steps one that needs data, so that small parameters are stepped."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params)
        self.fast: Any = NeedsData(self.fast.param_groups[0]["params"])


class NeedsDataWhenMade(torch.optim.SGD):
    """Its learning rate is the size of the parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        super().__init__(params, lr=sum(p.abs().sum().item() for p in params))


def test_data_of_parameters_in_an_attribute_is_refused_where_the_optimizer_is_made() -> None:
    """A rank has some parameters only, so a list of all of them does not go with its groups."""
    everywhere = {name: stand_in((2,), torch.float32) for name in ("a", "b")}
    with pytest.raises(PlanError, match="slow"):
        Weights({"b": nn.Parameter(torch.zeros(2))}, {}, SlowList, everywhere=everywhere)


class ClipsAll(torch.optim.SGD):
    """Its step divides by the norm of all gradients."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)

    def step(self) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


def clips_in_a_hook(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    adam = torch.optim.Adam(params, eps=1e-2)
    adam.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 1.0) and None)
    return adam


class FindsItsRate(torch.optim.Optimizer):
    """As Prodigy does, from products with all gradients."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"rate": 1e-3, "gain": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        first, sums = self.param_groups[0], 0.0
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p] or self.state[p] | {"start": p.clone(), "sum": torch.zeros_like(p)}
            self.state[p] = state
            first["gain"] += first["rate"] * float((p.grad * (state["start"] - p)).sum())
            sums += float(state["sum"].add_(p.grad, alpha=first["rate"]).abs().sum())
            p.sub_(p.grad.sign(), alpha=first["rate"])
        first["rate"] = max(first["rate"], first["gain"] / max(sums, 1e-9))


class Noisy(torch.optim.SGD):
    """Draws for each parameter, whichever others there are."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p += 0.1 * torch.randn_like(p)


@pytest.mark.parametrize(
    "make", [ClipsAll, lambda params: Holds(ClipsAll(params)), clips_in_a_hook, FindsItsRate]
)
def test_an_update_that_depends_on_what_other_ranks_have_is_refused(make: Make) -> None:
    """Each rank clipped by the norm of its own gradients, without a word."""
    shapes = {"a": (2, 2), "b": (3,)}
    everywhere = {name: stand_in(shape, torch.float32) for name, shape in shapes.items()}
    params = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    with pytest.raises(PlanError, match="other ranks"):
        Weights({"b": params["b"]}, {}, make, everywhere=everywhere)
    Weights(params, {}, make, everywhere=everywhere)


@pytest.mark.parametrize("make", [Noisy, MuonAndAdamW])
def test_an_update_of_a_parameter_by_itself_is_not(make: Make) -> None:
    everywhere = {name: stand_in(shape, torch.float32) for name, shape in {"a": (2, 2), "b": (3,)}.items()}
    Weights({"b": nn.Parameter(torch.ones(3))}, {}, make, everywhere=everywhere)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (Slow, "of its own"),
        (NeedsDataSlow, "of its own"),
        (SlowList, "slow"),
        (Together, "'all'"),
        (lambda params: Holds(SlowList(params)), "SlowList"),
        (NeedsDataWhenMade, "meta"),
        (lambda params: Holds(), "Holds"),
        (lambda params: Holds(*(torch.optim.SGD(params, lr=1.0) for _ in range(2))), "both"),
        (lambda params: torch.optim.SGD(params, lr=-1.0), "learning rate"),
    ],
)
def test_what_is_no_optimizer_is_refused(make: Make, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        counted(make)


def test_the_parameters_that_are_refused_are_named() -> None:
    with pytest.raises(PlanError, match="2D") as caught:
        counted(maker("Muon"))
    assert "c [24]" in caught.value.message and "1 more" in caught.value.message


def test_optimizers_are_found_wherever_they_are_held() -> None:
    params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    sgd, adam = torch.optim.SGD(params[:1], lr=1.0), torch.optim.Adam(params[1:])
    assert optimizers_of(Holds(sgd, {"rest": [adam]})) == (sgd, adam)
    assert optimizers_of(sgd) == (sgd,)
    assert BOTH in TRAINS


def test_it_leaves_the_random_numbers_of_other_threads_alone() -> None:
    """Ranks may be threads, and one begins with its weights while another counts its optimizer's bytes."""
    params = {"a": stand_in((2,), torch.float32)}
    counting = threading.Thread(target=update_bytes, args=(None, params, False))
    with seeded(0, "weights"):
        counting.start()
        counting.join(timeout=0.3)
        assert counting.is_alive()
    counting.join()

"""Random numbers that do not depend on the cut.

Each random call is preceded by a seed made from the micro-batch's seed and the call's name in the captured
graph. Whatever stage, rank or order it runs in, it draws the same numbers; so does a run in one process.
The generators then go back to where they were: what a rank computes must not change what the user draws on
it, or ranks that draw their batches alike would end up with different ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from .tensors import arguments_of, tensors_of

P = ParamSpec("P")
R = TypeVar("R")

TRACING_LOCK = threading.RLock()


def one_thread_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let only one thread at a time run any of the functions so marked."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with TRACING_LOCK:
            return function(*args, **kwargs)

    return locked


_PROBABILITIES = ("dropout_p", "p", "dropout")
"""Names of arguments that, being zero, keep a call from drawing random numbers."""


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch of one step.

    >>> microbatch_seed(0, 3, 1) != microbatch_seed(0, 1, 3)
    True
    """
    return crc32(f"{seed}/{step}/{microbatch}".encode())


@contextmanager
def seeded(seed: int, call: str) -> Iterator[None]:
    """What the default generators draw in the block depends on the seed and the call's name only; afterwards
    they are where they were.

    Ranks that are threads of one process share the generators: they take turns.
    """
    with TRACING_LOCK:
        generators = [torch.default_generator]
        accelerator = torch.accelerator.current_accelerator()
        module = torch.get_device_module(accelerator) if accelerator else None
        if module is not None and module.is_initialized():
            generators.append(module.default_generators[module.current_device()])
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(crc32(call.encode(), seed))
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def call_seeded(seed: int, call: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one random call. See `seed_draws`."""
    with seeded(seed, call):
        return function(*args, **kwargs)


def seed_draws(graph: fx.Graph, keys: Mapping[fx.Node, str]) -> bool:
    """Make the random calls of a graph go through `call_seeded`, with a new last placeholder for the seed.

    keys: for each random node a name that does not depend on the cut.
    Returns: whether there were any; without, the graph is left as it was.
    """
    random = [node for node in graph.nodes if draws(node)]
    if random:
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            seed = graph.placeholder("seed")
        for node in random:
            node.args = (seed, keys[node], node.target, *node.args)
            node.target = call_seeded
    return bool(random)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers.

    Attention is tagged as random though it only is with dropout.
    """
    return call_draws(node.target, node.args, node.kwargs)


def call_draws(call: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments draws random numbers."""
    if not isinstance(call, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in call.tags:
        return False
    given = arguments_of(call, args, kwargs)
    p = next((given[name] for name in _PROBABILITIES if name in given), None)
    return isinstance(p, Tensor) or bool(p != 0.0)


# Python's and NumPy's global random numbers, which torch's seeds do not reach.
#
# A forward that draws from them, as for leaving out layers at random, must draw the same on every stage.


def seed_python(seed: int, place: str) -> None:
    """Make what is drawn next depend on the seed and the place only."""
    value = crc32(place.encode(), seed)
    random.seed(value)
    np.random.seed(value)


def python_state() -> tuple[object, ...]:
    """What changes with every draw."""
    kind, keys, position, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, *rest


@contextmanager
def python_random_kept() -> Iterator[None]:
    """The generators are afterwards where they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def constructor_draws() -> Iterator[None]:
    """A constructor that draws from them draws the same on every rank, and each time."""
    with python_random_kept():
        seed_python(0, "constructor")
        yield


class OtherDraws(Exception):
    """A run does not draw what the recorded one drew."""


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what the CPU's generator draws, in order. draws: (what was drawn, state before it)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not call_draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        state = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        self.draws.append((_described(func, result), state))
        return result


class DrawReplay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a run draw the same, in the same order.

    Raises: OtherDraws, where it draws another number next, or by `require_all` if some are left.

    >>> with DrawRecorder() as recorder:
    ...     first = torch.rand(3)
    >>> with DrawReplay(recorder.draws) as replay:
    ...     torch.equal(torch.rand(3), first)
    True
    >>> replay.require_all()
    """

    def __init__(self, draws: list[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not call_draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if self._next == len(self._draws):
            raise OtherDraws(f"the module draws {func} as number {self._next + 1}, its graph does not")
        expected, state = self._draws[self._next]
        torch.default_generator.set_state(state)
        result = func(*args, **(kwargs or {}))
        if _described(func, result) != expected:
            raise OtherDraws(f"the module draws other numbers in {func}, as number {self._next + 1}")
        self._next += 1
        return result

    def require_all(self) -> None:
        if self._next < len(self._draws):
            raise OtherDraws(
                f"the module draws {self._next} times, its captured graph {len(self._draws)} times"
            )


def _described(func: Any, result: Any) -> str:
    """What was drawn: the mask of a dropout, whichever call makes it, or else the numbers."""
    drawn = tensors_of(result)[-1]
    if "dropout" in str(func) or "bernoulli" in str(func):
        drawn = drawn != 0
    numbers = drawn.detach().reshape(-1).contiguous()  # one dimension at least, to be looked at as bytes
    return f"{list(drawn.shape)} {crc32(numbers.view(torch.uint8).numpy().tobytes())}"

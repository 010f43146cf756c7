"""Random numbers that do not depend on the cut.

Each random call is preceded by a seed made from the micro-batch's seed and the call's name in the captured
graph. Whatever stage, rank or order it runs in, it draws the same numbers; so does a run in one process.
The generators then go back to where they were: what a rank computes must not change what the user draws on
it, or ranks that draw their batches alike would end up with different ones.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from .tracing_lock import TRACING_LOCK

_PROBABILITIES = ("dropout_p", "p", "dropout")
"""Names of arguments that, being zero, keep a call from drawing random numbers."""


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch of one step.

    >>> microbatch_seed(0, 3, 1) != microbatch_seed(0, 1, 3)
    True
    """
    return zlib.crc32(f"{seed}/{step}/{microbatch}".encode())


_before: list[list[tuple[torch.Generator, Tensor]]] = []
"""States of the default generators, one entry per `seed_random` that has not ended."""


def seed_random(seed: int, call: str) -> None:
    """Seed the default generators for one random call, and keep them until `end_random`.

    Ranks that are threads of one process share the generators: they take turns.
    """
    TRACING_LOCK.acquire()
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    _before.append([(generator, generator.get_state()) for generator in generators])
    for generator in generators:
        generator.manual_seed(zlib.crc32(call.encode(), seed))


def end_random() -> None:
    """The random call is done."""
    for generator, state in _before.pop():
        generator.set_state(state)
    TRACING_LOCK.release()


@contextmanager
def seeded(seed: int, call: str) -> Iterator[None]:
    """Random numbers in the block depend on the seed and the call's name only."""
    seed_random(seed, call)
    try:
        yield
    finally:
        end_random()


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
    for position, argument in enumerate(call._schema.arguments):
        if argument.name in _PROBABILITIES:
            probability = kwargs.get(argument.name, argument.default_value)
            if position < len(args):
                probability = args[position]
            return bool(probability != 0.0)
    return True


# Python's and NumPy's global random numbers, which torch's seeds do not reach.
#
# A forward that draws from them, as for leaving out layers at random, must draw the same on every stage.


def seed_python(seed: int, place: str) -> None:
    """Make what is drawn next depend on the seed and the place only."""
    value = zlib.crc32(place.encode(), seed)
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

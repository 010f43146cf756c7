"""A run of the user's forward in which every unit and every function of the glue can be intercepted."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..guards import inside_checkpoint
from ..job import Job
from ..job_calls import call_model, scalar_loss
from ..random import python_random_kept, seed_python
from ..tensors import tensors_of
from .skeleton import ModuleUnit, Skeleton
from .torch_functions import RANDOM, function_name

START = ""
"""The stretch of glue before the first unit; other stretches are named by the unit call they follow."""


def call_name(fqn: str, number: int) -> str:
    """Name of a unit's call, the first one being number 0.

    >>> call_name("blocks.0", 0), call_name("blocks.0", 1)
    ('blocks.0', 'blocks.0#1')
    """
    return f"{fqn}#{number}" if number else fqn or "model"


class InterceptedForward(TorchFunctionMode):
    """One run. Subclasses say what happens at units and at functions.

    stretch, index: where the run is: the last unit call, and how many functions have made or changed tensors
        since.
    random: names of functions that draw random numbers; each call is seeded by its place.
    python_random: seed Python's own generators too, at every unit and stretch.
    inside: whether a unit runs now, or something else in which nothing is intercepted.
    """

    def __init__(
        self, skeleton: Skeleton, seed: int, *, random: frozenset[str] = RANDOM, python_random: bool = True
    ) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.seed = seed
        self.random = random
        self.python_random = python_random
        self.stretch = START
        self.index = 0
        self.counts: Counter[str] = Counter()
        self.inside = False

    @abstractmethod
    def call(self, unit: ModuleUnit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called for the time `number`, from 0. Nothing is intercepted meanwhile."""

    @abstractmethod
    def function(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Glue calls a function of torch, a method or a property of a tensor."""

    def loss(self, job: Job, batch: Mapping[str, Tensor]) -> Tensor:
        """Run model and loss. Parameters have been put into the skeleton."""
        self.skeleton.intercept = self.enter
        try:
            kept = python_random_kept() if self.python_random else nullcontext()
            with kept, self, autograd_functions_seen_by(self.autograd_function):
                self.seed_python(START)
                outputs = call_model(job, self.skeleton.model, batch)
                return self.after(job, outputs, batch)
        finally:
            self.skeleton.intercept = None

    def autograd_function(self, apply: Any, name: str, args: tuple[Any, ...]) -> Any:
        """The user's autograd function is called: like any other, but for checkpoints with units inside."""
        with inside_checkpoint() if is_checkpoint(name) else nullcontext():
            if self.inside:
                return apply(*args)
            if is_checkpoint(name):
                return self.checkpoint(apply, args)
            with self._passing():
                return self.function(apply, name, args, {})

    def checkpoint(self, apply: Any, args: tuple[Any, ...]) -> Any:
        """Reentrant checkpointing, which runs what it is given without a graph. One unit runs so; of several,
        the values between them would have no gradient: those run as if they were not checkpointed."""
        run, _, *arguments = args
        if self._unit_of(run) is not None:
            return apply(*args)
        with self._passing():
            trains = any(tensor.requires_grad for tensor in tensors_of(arguments))
        with nullcontext() if trains else torch.no_grad():  # as the checkpoint, which else warns of it
            return run(*arguments)

    def _unit_of(self, run: Any) -> ModuleUnit | None:
        while isinstance(run, partial):
            run = run.func
        module = getattr(run, "__self__", run)
        return next((unit for unit in self.skeleton.units.values() if unit.module is module), None)

    def seed_python(self, place: str) -> None:
        if self.python_random:
            seed_python(self.seed, place)

    def after(self, job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return scalar_loss(job, outputs, batch)

    def enter(self, unit: ModuleUnit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's forward was called; inside another unit it just runs."""
        if self.inside:
            return unit.original_forward(*args, **kwargs)
        number = self.counts[unit.fqn]
        self.counts[unit.fqn] += 1
        name = call_name(unit.fqn, number)
        with self._passing():
            self.seed_python(f"{name}:")
            result = self.call(unit, number, args, kwargs)
            self.seed_python(name)
        self.stretch, self.index = name, 0
        return result

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Nothing is intercepted in the block."""
        self.inside = True
        try:
            top = overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
            if top is self:
                with overrides._pop_mode_temporarily():
                    yield
            else:  # the user's own mode lies above: calls come through here, and pass
                yield
        finally:
            self.inside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        return self.function(func, function_name(func), args, kwargs or {})


# Calls of the user's `torch.autograd.Function`s, which torch function modes do not see.

Seen = Callable[[Any, str, tuple[Any, ...]], Any]
"""(apply of a class, name, arguments) -> result"""


@contextmanager
def autograd_functions_seen_by(seen: Seen) -> Iterator[None]:
    """In the block `Function.apply` calls `seen` in this thread. Only one thread at a time may be in it."""
    original: Any = vars(torch.autograd.Function)["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, cls)
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        return seen(run, f"{cls.__name__}.apply", args)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def is_checkpoint(name: str) -> bool:
    """Whether this is reentrant activation checkpointing, which calls units inside."""
    return name == f"{CheckpointFunction.__name__}.apply"

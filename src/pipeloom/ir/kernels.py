"""Kernels: loops over columns, compiled where there is enough to do.

A kernel is an ordinary Python function over numpy arrays and numbers. Called with small arrays it runs as it
is, so that small schedules never wait for a compiler; with large ones, or once it has run for long, it runs
compiled by numba. The machine code is kept beside the source, or in the user's cache folder, or for this
process only where neither can be written. Where there is none yet, it is made only for what would take longer
without.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from time import thread_time
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast
from zlib import crc32

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

COMPILED_FROM = 8_000
"""Elements of the largest array from which a kernel runs compiled: loading numba takes as long as that."""

LOADING_S = 1.0
"""Seconds that loading takes, about. A kernel that has run as it is for as long may as well be loaded."""

LOADED_FROM = 200
"""As `COMPILED_FROM`, for a kernel of which either is true: it was loaded, or ran for that long."""

MADE_FROM = 50
"""How many times as large arrays must be where there is no machine code yet: making it takes seconds."""

S_PER_BYTE = 1e-3
"""Seconds that compiling takes, about, per byte of Python's code. A kernel that has run as it is for as long
as compiling it takes is compiled all the same: the total is then at most twice the least."""


class Kernel(Generic[P, R]):
    """A function that runs compiled for large arrays, and with it the kernels that it calls.

    >>> @kernel
    ... def total(values):
    ...     found = 0
    ...     for value in values:
    ...         found += value
    ...     return found
    >>> int(total(np.arange(5)))
    10
    """

    def __init__(
        self, function: Callable[P, R], *, in_place: bool = False, apart: bool = False, within: bool = False
    ) -> None:
        self.plain = function
        self._in_place, self._apart, self._within = in_place, apart, within
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._spent_s = 0.0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._within and self._runs_compiled(_largest(args)):
            return self.compiled(*args, **kwargs)
        begin = thread_time()
        result = self.interpreted(*args, **kwargs)
        self._spent_s += thread_time() - begin
        return result

    def _runs_compiled(self, largest: int) -> bool:
        """Whether it does with arrays of that size."""
        if "compiled" in self.__dict__:
            return largest >= LOADED_FROM
        if largest < (COMPILED_FROM if self._spent_s < LOADING_S else min(LOADED_FROM, COMPILED_FROM)):
            return False
        return self.at_hand or largest >= MADE_FROM * COMPILED_FROM or self._spent_s > self._making_s

    @cached_property
    def at_hand(self) -> bool:
        """Whether machine code of it was kept by an earlier process."""
        made: Any = self._to_compile
        return self.kept and any(Path(made.stats.cache_path).glob(f"*.{made.py_func.__qualname__}-*.nbi"))

    @property
    def kept(self) -> bool:
        """Whether its machine code is kept for later processes: there is a folder for it."""
        made: Any = self._to_compile
        return made.stats.cache_path is not None

    @cached_property
    def _making_s(self) -> float:
        """Seconds that compiling it takes, roughly: it and each kernel that stands apart, once."""
        return S_PER_BYTE * (self._inlined_bytes + sum(found._inlined_bytes for found in self._others))

    @cached_property
    def _inlined_bytes(self) -> int:
        """Of Python's code, with that of each kernel wherever it is inlined."""
        function: Any = self.plain
        named = (i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL")
        inlined = (found for name in named if (found := self._inner.get(name)) and not found._apart)
        return len(function.__code__.co_code) + sum(found._inlined_bytes for found in inlined)

    @cached_property
    def _others(self) -> set[Kernel[..., Any]]:
        """Those apart that it calls, and that these call."""
        called = self._inner.values()
        return {found for found in called if found._apart}.union(*(found._others for found in called))

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """The machine code, made or loaded on first use."""
        return self._to_compile

    @cached_property
    def _to_compile(self) -> Callable[P, R]:
        import numba

        function = self._linked(lambda inner: inner.inlined)
        function.__qualname__ += f"_{self._version}"
        options: dict[str, Any] = {"nogil": True, "_nrt": not self._in_place, "no_cfunc_wrapper": True}
        options["no_cpython_wrapper"] = self._within
        try:
            made = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for the cache can be written
            made = numba.njit(**options)(function)
        return cast(Callable[P, R], made)

    @cached_property
    def interpreted(self) -> Callable[P, R]:
        """The function as it is, with what it calls: it takes lists as well as arrays."""
        return cast(Callable[P, R], self._linked(lambda inner: inner.interpreted))

    @cached_property
    def inlined(self) -> Callable[P, R]:
        """To be compiled into another kernel: a call would count references to all arrays passed to it.
        One that stands `apart` is called."""
        import numba

        if self._apart:
            return self.compiled

        return cast(Callable[P, R], numba.njit(inline="always")(self._linked(lambda inner: inner.inlined)))

    @cached_property
    def _inner(self) -> dict[str, Kernel[..., Any]]:
        """The kernels that it calls, by the names under which it knows them."""
        function: Any = self.plain
        used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        return {name: found for name, found in used.items() if isinstance(found, Kernel)}

    def _linked(self, form: Callable[[Kernel[..., Any]], Any]) -> Any:
        """A copy of the function with a form of each kernel that it names in place of the kernel."""
        function: Any = self.plain
        inner = {name: form(found) for name, found in self._inner.items()}
        copy = FunctionType(function.__code__, {**function.__globals__, **inner}, function.__name__)
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__defaults__ = function.__defaults__
        return copy

    @property
    def _version(self) -> str:
        """Of the source files. numba names cache files by it, and so never reads one of another version: it
        would run old code, or load types from where they no longer are."""
        files = sorted(file for file in self._files() if file.is_file())
        return f"{crc32(b''.join(file.read_bytes() for file in files)):08x}"

    def _files(self) -> set[Path]:
        return {Path(self.plain.__code__.co_filename)}.union(*(k._files() for k in self._inner.values()))


def _largest(args: Iterable[object]) -> int:
    sizes = (a.size if isinstance(a, np.ndarray) else _largest(a) for a in args if isinstance(a, _HOLDS))
    return max(sizes, default=0)


_HOLDS = (np.ndarray, tuple)


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel of a function. It may use only numbers, arrays, tuples of them, and loops."""
    return Kernel(function)


def apart(function: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel of a long function that others call in several places, or that takes long in itself.

    It is compiled once, and not into each of those places. It makes no array: see `in_place`.
    """
    return Kernel(function, in_place=True, apart=True)


def within(function: Callable[P, R]) -> Kernel[P, R]:
    """The same where only kernels call it: what Python would call it by takes long to compile."""
    return Kernel(function, in_place=True, apart=True, within=True)


def in_place(function: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel of a function that makes no array, but writes into those that it is given.

    Compiled code then counts no references to arrays: in a loop over many of them that takes most of the
    time.
    """
    return Kernel(function, in_place=True)

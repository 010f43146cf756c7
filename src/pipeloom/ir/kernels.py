"""Kernels: loops over columns, compiled by numba in a process that has much to go over.

A kernel is an ordinary Python function over numbers, numpy arrays and tuples of them. A process runs it as
it is until it has gone over `COMPILED_FROM` elements, so that small schedules never import numba; from then
on it runs compiled. Once another kernel has imported numba, machine code that was made before is loaded from
`LOADED_FROM` elements on. It is cached beside the source, or in the user's cache folder, or for this process
only where neither can be written. docs/decisions.md says why (9).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from inspect import getsourcefile
from pathlib import Path
from re import findall
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar
from zlib import crc32

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

COMPILED_FROM = 20_000
"""Elements from which a kernel runs compiled: importing numba takes about as long as going over so many."""

LOADED_FROM = 1_000
"""Elements that take about as long as loading the machine code of one kernel."""


class Kernel(Generic[P, R]):
    """A function that may run compiled, and with it the kernels that it calls.

    >>> @kernel
    ... def total(values):
    ...     result = 0
    ...     for value in values:
    ...         result += value
    ...     return result
    >>> int(total(np.arange(5)))
    10
    """

    _compiled_from: ClassVar[int] = COMPILED_FROM
    _numba_is_loaded: ClassVar[bool] = False

    def __init__(self, function: Callable[P, R], *, inlined: bool = False) -> None:
        self._function: Any = function
        self._inlined = inlined
        self._elements = 0
        self.__doc__, self.__wrapped__ = function.__doc__, function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        compiled = self._elements >= self._compiled_from
        return (self.compiled if compiled else self.form(_largest(args)))(*args, **kwargs)

    def form(self, elements: int) -> Callable[P, R]:
        """The form to call for so many elements more. A call counts those of its largest argument; who calls
        a kernel that goes over it many times says how many there are."""
        self._elements += elements
        if self._elements >= self._compiled_from:
            return self.compiled
        loads = self._numba_is_loaded and self._elements >= LOADED_FROM and self._is_kept
        return self.compiled if loads else self.interpreted

    @cached_property
    def _is_kept(self) -> bool:
        """Whether machine code of this version lies in the cache, for arguments of some types."""
        name = f"*.{self.compiled.__qualname__}-*.py{sys.version_info.major}{sys.version_info.minor}.nbi"
        return self.cache_path is not None and any(Path(self.cache_path).glob(name))

    @property
    def cache_path(self) -> str | None:
        """Where machine code is kept; None if it is for this process only."""
        stats = getattr(self.compiled, "stats", None)
        return None if stats is None else stats.cache_path

    @cached_property
    def interpreted(self) -> Callable[P, R]:
        """The function as it is, with what it calls: it takes lists as well as arrays."""
        return self._linked("interpreted")  # type: ignore[no-any-return]

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """Machine code, made or loaded on the first call with arguments of these types."""
        function = self._linked("_called")
        try:
            function.__qualname__ += f"_{self._version:08x}"
            return self._jit(function, cache=True)  # type: ignore[no-any-return]
        except (OSError, RuntimeError):  # no source file, or no folder for the cache that can be written
            return self._jit(function)  # type: ignore[no-any-return]

    @cached_property
    def _called(self) -> Any:
        """What other kernels call. Python does not: code that unpacks its arguments takes long to compile."""
        inline = "always" if self._inlined else "never"
        return self._jit(self._linked("_called"), no_cpython_wrapper=True, inline=inline)

    def _jit(self, function: Any, **options: bool | str) -> Any:
        """Compile on first use. Without `_nrt=False` each call counts references to all arrays in the tuples
        that it passes: then the simulator's event loop takes 14.8 s instead of 0.12 s (256 ranks, 2048
        micro-batches)."""
        import numba

        Kernel._numba_is_loaded = True
        njit: Any = numba.njit  # its stub knows neither the names of wrappers nor `_nrt`
        return njit(nogil=True, no_cfunc_wrapper=True, _nrt=False, **options)(function)

    @cached_property
    def _globals(self) -> dict[str, Any]:
        """What the function knows by the names in its code and in its annotations."""
        known, types = self._function.__globals__, map(str, self._function.__annotations__.values())
        names = (*self._function.__code__.co_names, *findall(r"\w+", " ".join(types)))
        return {name: known[name] for name in names if name in known}

    def calling(self, **functions: Callable[..., Any]) -> Callable[P, R]:
        """The function as it is, not compiled, with other functions in place of kernels that it calls by
        these names: where a user's Python decides what a kernel does else.

        >>> @kernel
        ... def price(size):
        ...     return size
        >>> @kernel
        ... def bill(size):
        ...     return 2 * price(size)
        >>> bill(3), bill.calling(price=lambda size: size + 1)(3)
        (6, 8)
        """
        assert all(isinstance(self._globals.get(name), Kernel) for name in functions)
        return self._linked("interpreted", functions)  # type: ignore[no-any-return]

    def _linked(self, form: str, others: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """A copy of the function with that form of each kernel that it calls in place of the kernel, or with
        another function of that name."""
        old = self._function
        kernels = {n: getattr(k, form) for n, k in self._globals.items() if isinstance(k, Kernel)} | {
            **others
        }
        new = FunctionType(old.__code__, {**old.__globals__, **kernels}, old.__name__, old.__defaults__)
        new.__qualname__, new.__module__ = old.__qualname__, old.__module__
        return new

    @cached_property
    def _version(self) -> int:
        """Of all that goes into the machine code: the files of the function, of the kernels that it calls and
        of their arguments' types, and constants. It is part of the name by which numba caches the code, as
        numba itself looks at the first file only, and then would run old code."""
        version = crc32(Path(self._function.__code__.co_filename).read_bytes())
        for name, value in self._globals.items():
            if isinstance(value, Kernel):
                version = crc32(b"%d" % value._version, version)
            elif isinstance(value, type) and (file := getsourcefile(value)):
                version = crc32(Path(file).read_bytes(), version)
            elif isinstance(value, int | float | str | tuple):
                version = crc32(f"{name}={value}".encode(), version)
        return version


def _largest(arguments: Iterable[object]) -> int:
    """Elements of the largest array among arguments, and in tuples."""
    sizes = (a.size if isinstance(a, np.ndarray) else _largest(a) for a in arguments if isinstance(a, _HOLDS))
    return max(sizes, default=0)


_HOLDS = (np.ndarray, tuple)


def compile_at_once() -> None:
    """From now on all kernels of this process run compiled, however little they go over."""
    Kernel._compiled_from = 0


def code_is_kept() -> bool:
    """Whether machine code is kept for other processes: whether there is a folder for it."""
    return kernel(_largest).cache_path is not None  # any function of the package would do


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel of a function that writes into the arrays that it is given, and makes none."""
    return Kernel(function)


def inlined(function: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel whose compiled code stands where others call it: of few lines, in a hot loop, where it
    takes less time than passing tuples of arrays. What calls it takes longer to compile."""
    return Kernel(function, inlined=True)

"""The user's own files: how one is imported, and which line of them something comes from, for messages that
ask for a change there."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from .errors import ConfigError, PipeloomError

T = TypeVar("T")


def _named(folder: Path) -> tuple[str, ...]:
    """How Python names files in a folder, and where it really is: an environment may lie behind a link."""
    return tuple({f"{folder}{os.sep}", f"{folder.resolve()}{os.sep}"})


_TORCH = find_spec("torch")
assert _TORCH is not None and _TORCH.origin is not None, "pipeloom requires torch"
_NOT_USERS = (*_named(Path(__file__).parents[1]), *_named(Path(_TORCH.origin).parent))
"""Folders of pipeloom and of torch."""

_LIBRARY = _named(Path(sysconfig.get_path("stdlib")))
_INSTALLED = tuple(f"/{name}/" for name in ("site-packages", "dist-packages"))


@lru_cache(maxsize=1024)
def is_user_file(name: str) -> bool:
    """Whether code of this file is neither ours nor torch's nor Python's own.

    >>> import torch
    >>> [is_user_file(name) for name in (torch.__file__, f"{torch.__path__[0]}vision/ops.py", "model.py")]
    [False, True, True]
    """
    if name.startswith("<") or name.startswith(_NOT_USERS):
        return False
    return not name.startswith(_LIBRARY) or any(part in name for part in _INSTALLED)


def load_user_file(path: Path, *, hint: str) -> ModuleType:
    """Import a file, once, under its own name in `sys.modules`, so that classes in it can be pickled.

    Raises: ConfigError if there is none, or for an exception in it; see `own_errors_told`.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=hint)
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no Python file: its name does not end in .py", hint=hint)
    path = path.resolve()
    # A file called json.py must not hide the real one.
    names = (path.stem, f"pipeloom_file_{path.stem}")
    for name in names:
        if getattr(sys.modules.get(name), "__file__", None) == str(path):
            return sys.modules[name]
    spec = spec_from_file_location(names[path.stem in sys.modules], path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        with own_errors_told(f"{path.name} cannot be imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


@contextmanager
def own_errors_told(what: str) -> Iterator[None]:
    """An exception inside the user's code becomes a ConfigError that ends with the user's lines it came
    through; its traceback, mostly ours, stays as the cause. One without such lines is a fault of ours."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception as error:  # the user's code raises every kind of exception
        kind = type(error).__name__
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            place = f"{shown_file(error.filename)}, line {error.lineno}"
            raise ConfigError(f"{place}: {kind}: {error.msg}") from error
        if not (lines := lines_of(error)):
            raise
        text = str(error).strip() or "no message"
        raise ConfigError(f"{what}: {kind}: {text}{at(', '.join(lines))}") from error


def call_own(name: str, function: Callable[..., T], *given: object, hint: str) -> T:
    """What a function of the user's returns, which messages call by that name.

    Raises: ConfigError if it takes other arguments, and for an exception in it; see `own_errors_told`.
    """
    try:
        with own_errors_told(f"{name} fails"):
            return function(*given)
    except TypeError as error:  # no line of the user's was reached
        how_many = {0: "without arguments", 1: "with one argument"}
        what = how_many.get(len(given), f"with {len(given)} arguments")
        where = at(definition_of(function))
        raise ConfigError(f"{name} cannot be called {what}: {error}{where}", hint=hint) from error


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of the user's code that is being run, as "model.py:12"; "" if there is none.

    frame: where to begin; the caller by default.
    """
    frame = frame or sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_of(frame)


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code through which an error came; "" if there is none."""
    return next(reversed(_way_of(error)), "")


def lines_of(error: BaseException) -> list[str]:
    """The lines of the user's code through which an error came, each once, the innermost last. Of lines in
    installed packages only that one is told."""
    way = _way_of(error)
    own = [place for place in way if not any(part in place for part in _INSTALLED)]
    return list(dict.fromkeys([*own, *way[-1:]]))


def _way_of(error: BaseException) -> list[str]:
    steps = walk_tb(error.__traceback__)
    files = ((frame.f_code.co_filename, line) for frame, line in steps)
    return [f"{shown_file(file)}:{line}" for file, line in files if is_user_file(file)]


def line_of(frame: FrameType) -> str:
    return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def definition_of(function: Callable[..., Any] | type) -> str:
    """Where a function or the forward of a class is defined, as "model.py:12"; "" if Python cannot say.

    >>> definition_of(len), "user_code.py:" in definition_of(user_line)
    ('', True)
    """
    code = _code_of(function)
    return "" if code is None else f"{shown_file(code.co_filename)}:{code.co_firstlineno}"


def own_definition(function: Callable[..., Any] | type) -> str:
    """The same, and "" too if it is not in the user's code.

    >>> import torch
    >>> own_definition(torch.nn.Linear), own_definition(user_line)
    ('', '')
    """
    code = _code_of(function)
    return definition_of(function) if code is not None and is_user_file(code.co_filename) else ""


def _code_of(function: Callable[..., Any] | type) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "forward", function) if isinstance(function, type) else function
    return getattr(getattr(function, "__func__", function), "__code__", None)


def at(place: str) -> str:
    """A place as it stands behind what is there, or nothing where none is known.

    >>> "it counts" + at("model.py:12"), "it counts" + at("")
    ('it counts (model.py:12)', 'it counts')
    """
    return f" ({place})" if place else ""


def shown_file(name: str) -> str:
    """A file as a user would name it: relative to the working folder if it is below."""
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name

"""What is public is explained where it stands: arguments, errors, sources, and an example that runs."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pipeloom
from pipeloom.ir import errors

UNITS = re.compile(r"_(s|bytes|flops|per_s|per_byte)$")
"""Ends of names that say what is counted: such a name needs no more words."""

RAISED = re.compile(r"Raises:(.*?)(?:\n\s*\n|\n\s*(?:Returns|Yields|Source):|\Z)", re.DOTALL)


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Public methods and properties that a class or one of its bases here defines, by "Class.method"."""
    found: dict[str, Callable[..., Any]] = {}
    for base in (c for c in cls.__mro__ if c.__module__.startswith(cls.__module__.partition(".")[0])):
        for name, member in vars(base).items():
            for part in ("fget", "func", "__func__"):  # of a property, a cached one, a class method
                member = getattr(member, part, member)
            if not name.startswith("_") and inspect.isfunction(member):
                found.setdefault(f"{cls.__name__}.{name}", member)
    return found


def public() -> dict[str, Any]:
    things: dict[str, Any] = {}
    for name in pipeloom.__all__:
        thing = getattr(pipeloom, name)
        if callable(thing):
            things[name] = thing
            things |= methods(thing) if inspect.isclass(thing) else {}
    return things


PUBLIC = public()


def own_docstring(thing: Any) -> str:
    """What somebody wrote about it: nothing inherited, and not the signature that `dataclass` puts there."""
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    made = dataclasses.is_dataclass(thing) and doc and doc.startswith(f"{thing.__name__}(")
    return "" if made or not doc else inspect.cleandoc(doc)


def unexplained(thing: Any, doc: str) -> Iterator[str]:
    """Arguments that a docstring neither has as "argument: ...", alone or among others, nor as `argument`."""
    for name in inspect.signature(thing).parameters:
        explained = re.search(rf"(?<![\w.]){name}(?:,\s+\w+)*:\s|`{name}`", doc)
        if name not in ("self", "cls") and not UNITS.search(name) and not explained:
            yield f"does not explain {name}"


def raised_directly(thing: Any) -> Iterator[str]:
    """Names of the errors that its own body raises, of a class those of the bodies that make one."""
    if inspect.isclass(thing):
        bodies = [vars(thing)[name] for name in ("__init__", "__post_init__") if name in vars(thing)]
        bodies = [body for body in bodies if body.__code__.co_filename.endswith(".py")]  # no dataclass's own
    else:
        bodies = [thing]
    for body in bodies:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(body)))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield ast.unparse(node.exc.func).rpartition(".")[2]


def error_class(name: str) -> type[BaseException] | None:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if inspect.isclass(found) and issubclass(found, BaseException) else None


def wrong_about_errors(thing: Any, doc: str) -> Iterator[str]:
    said = RAISED.search(doc)
    names = re.findall(r"\b[A-Z]\w*(?:Error|Interrupt)\b", said[1]) if said else []
    classes = {each: error_class(each) for each in names}
    yield from (f"says that it raises {each}, which there is not" for each in names if not classes[each])
    for each in set(raised_directly(thing)):
        kind = error_class(each)
        if kind and not any(known and issubclass(kind, known) for known in classes.values()):
            yield f"raises {each} and does not say so"


def wrong_examples(name: str, doc: str) -> Iterator[str]:
    examples = doctest.DocTestParser().get_examples(doc)
    if not examples and "." not in name:
        yield "has no example (>>> ...)"
    if any(doctest.SKIP in example.options for example in examples):
        yield "has an example that is skipped"


def problems(name: str, thing: Any) -> list[str]:
    """What is missing from a docstring, or wrong in it. name: "function", "Class" or "Class.method"."""
    doc = own_docstring(thing)
    if not doc:
        return ["has no docstring of its own"]
    return [*unexplained(thing, doc), *wrong_about_errors(thing, doc), *wrong_examples(name, doc)]


def test_what_is_public_is_explained() -> None:
    assert {"Pipeline.step", "Plan.save", "Link.transfer_s", "plan", "Pipeline"} <= PUBLIC.keys()
    found = {name: said for name, thing in PUBLIC.items() if (said := problems(name, thing))}
    assert not found, found

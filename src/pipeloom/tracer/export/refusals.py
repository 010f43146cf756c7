"""What torch.export would lose without a word, refused while it traces.

Each function here gives what is to stand in the place of something of torch: (owner, name, replacement).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph

from ...ir.errors import CaptureError
from ..user_code import at, is_user_file, user_line

HINT = "cut by module names instead: give lists of FQNs, one list per stage"

Replacements = list[tuple[Any, str, Any]]
Refuse = Callable[[str], NoReturn]


@contextmanager
def what_export_loses_refused(name: str) -> Iterator[None]:
    """Raise CaptureError where the forward defines gradients itself, stops them inside autocast, hooks
    tensors, or puts another tensor in the place of a buffer."""

    def refuse(what: str) -> NoReturn:
        where = at(user_line())
        raise CaptureError(
            f"the forward of {name} uses {what}{where}, which torch.export would lose", hint=HINT
        )

    with ExitStack() as stack:
        for owner, key, value in (*_gradients(refuse), *_autocast(refuse), *_hooks(refuse), *_state(refuse)):
            if key in vars(owner):
                stack.callback(setattr, owner, key, vars(owner)[key])
            else:
                stack.callback(delattr, owner, key)  # what it inherits shows again
            setattr(owner, key, value)
        yield


def _refused(refuse: Refuse, what: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: refuse(what)


def _gradients(refuse: Refuse) -> Replacements:
    apply = vars(torch.autograd.Function)["apply"].__func__

    def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library."):
            return apply(cls, *args, **kwargs)  # an operator with a registered gradient stays whole
        refuse(f"the gradient of {cls.__name__}")

    return [
        (torch.autograd.Function, "apply", classmethod(checked_apply)),
        (torch.autograd, "grad", _refused(refuse, "autograd.grad")),
        (torch.autograd, "backward", _refused(refuse, "autograd.backward")),
    ]


def _autocast(refuse: Refuse) -> Replacements:
    """Gradients stopped inside autocast."""
    set_grad: Callable[..., None] = torch.set_grad_enabled.__init__
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    depth = 0

    def checked_set_grad(self: torch.set_grad_enabled, mode: bool) -> None:
        if depth and not mode and torch.is_grad_enabled():
            refuse("no_grad inside autocast")
        set_grad(self, mode)

    def counted_enter(self: torch.autocast) -> Any:
        nonlocal depth
        depth += 1
        return enter(self)  # type: ignore[no-untyped-call]

    def counted_leave(self: torch.autocast, *error: Any) -> Any:
        nonlocal depth
        depth -= 1
        return leave(self, *error)

    return [
        (torch.set_grad_enabled, "__init__", checked_set_grad),
        (torch.autocast, "__enter__", counted_enter),
        (torch.autocast, "__exit__", counted_leave),
    ]


def _hooks(refuse: Refuse) -> Replacements:
    pack = graph.saved_tensors_hooks.__enter__

    def checked_grad_fn(self: Tensor) -> Any:
        """Hooks are put on it. torch itself only looks at it, but for `register_multi_grad_hook`."""
        caller = sys._getframe(1).f_code.co_filename
        if is_user_file(caller) or caller == graph.__file__:
            refuse("grad_fn")
        return vars(torch._C.TensorBase)["grad_fn"].__get__(self)

    def checked_packing(self: graph.saved_tensors_hooks) -> None:
        if is_user_file(sys._getframe(1).f_code.co_filename) and not isinstance(self, graph.save_on_cpu):
            refuse("saved_tensors_hooks")
        pack(self)

    return [
        (Tensor, "register_hook", _refused(refuse, "a hook on a tensor")),
        (Tensor, "register_post_accumulate_grad_hook", _refused(refuse, "a hook on a tensor")),
        (Tensor, "grad_fn", property(checked_grad_fn)),
        (graph.saved_tensors_hooks, "__enter__", checked_packing),
    ]


def _state(refuse: Refuse) -> Replacements:
    set_attribute = nn.Module.__setattr__

    def checked_setattr(self: nn.Module, name: str, value: Any) -> None:
        """`self.count = self.count + 1`: export forgets it, other than `self.count += 1`."""
        current = self.__dict__.get("_buffers", {}).get(name, self.__dict__.get(name))
        if isinstance(current, Tensor) and isinstance(value, Tensor) and value is not current:
            refuse(f"a new tensor as {name}, instead of changing the one that is there,")
        set_attribute(self, name, value)

    return [(nn.Module, "__setattr__", checked_setattr)]

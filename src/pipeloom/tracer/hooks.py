"""Hooks that the constructor of a model, or whoever made it, has left on it: found in torch's own tables.

Forward hooks of modules are traced like the forward itself. What is called with gradients is not seen by
tracing: on parameters it is refused; on modules it runs with the module (see `fallback.skeleton`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..ir.errors import CaptureError
from .user_code import at, definition_of

_ON_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_ON_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_ON_ALL_MODULES = {
    "_global_backward_hooks": "register_module_full_backward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
}


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A hook that is called with gradients.

    owner: FQN of the parameter or module ("" for the model itself).  registered_by: the function of torch.
    where: file and line of the hook, if it is a Python function.
    """

    owner: str
    registered_by: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.registered_by}{at(self.where)}"


def parameter_hooks(model: nn.Module) -> tuple[Hook, ...]:
    """Hooks on parameters and buffers.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.weight.register_hook(lambda grad: grad * 2)
    >>> [(hook.owner, hook.registered_by) for hook in parameter_hooks(layer)]
    [('weight', 'register_hook')]
    """
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return tuple(
        Hook(owner=name, registered_by=by, where=definition_of(function))
        for name, tensor in named
        for table, by in _ON_PARAMETERS.items()
        for function in _functions(tensor, table)
    )


def backward_hooks(model: nn.Module) -> tuple[Hook, ...]:
    """Hooks on modules that are called with gradients, those for all modules of the process first."""
    return tuple(
        Hook(owner=path, registered_by=by, where=definition_of(function))
        for path, holder, tables in (
            ("", torch_module, _ON_ALL_MODULES),
            *((path, inner, _ON_MODULES) for path, inner in model.named_modules()),
        )
        for table, by in tables.items()
        for function in _functions(holder, table)
    )


def refuse_parameter_hooks(hooks: tuple[Hook, ...], name: str) -> None:
    """Raises: CaptureError if there is any."""
    if hooks:
        raise CaptureError(
            f"{name} has a hook on its parameter {hooks[0].owner}, by {hooks[0]}: a rank sees only parts of "
            "a parameter's gradient, so the hook would not be called as in one process",
            hint="let a torch.autograd.Function in the forward change the gradient, as in "
            "F.linear(x, Scaled.apply(self.weight)), or do it in the optimizer that Job.optimizer returns",
        )


def _functions(holder: Any, table: str) -> Iterator[Callable[..., Any]]:
    yield from (getattr(holder, table, None) or {}).values()

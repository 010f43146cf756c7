"""A module -> a functional ATen program, by torch.export; and a refusal of what export would silently change.

torch.export traces the forward only. A gradient that the user's code defines itself (a custom
`autograd.Function`, a hook) is lost without a word, so it is looked for while tracing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import OutputKind

from ..ir.errors import CaptureError

_NO_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_HINT = "cut by module names instead: give lists of FQNs, one list per stage"


def export(module: nn.Module, batch: dict[str, Tensor], name: str) -> ExportedProgram:
    """Trace `module(batch)` on fake tensors.

    Raises: CaptureError if that fails, or would lose a gradient that the user's code defines.
    """
    try:
        with warnings.catch_warnings(), _own_gradients_refused(name):
            # PyTorch 2.13 warns about its own use of LeafSpec, in every copy that export makes
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            program = torch.export.export(module, (batch,), strict=False)
            _detach_no_grad_regions(program.graph_module)
            functional: ExportedProgram = program.run_decompositions(_decompositions())
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises every kind of exception; the reason is passed on
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise CaptureError(
            f"torch.export cannot capture {name}: {type(error).__name__}: {reason}", hint=_HINT
        ) from error
    for spec in functional.graph_signature.output_specs:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            target = str(spec.target).removeprefix("model.")
            raise CaptureError(f"the forward of {name} changes its parameter {target}", hint=_HINT)
    return functional


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """What must not stay whole: calls without a derivative, and calls that change what they are given."""
    instance_norm = torch.ops.aten.instance_norm.default
    return {
        torch.ops.aten.copy.default: _copy,
        instance_norm: default_decompositions()[instance_norm],
    }


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What is in `target` after `target.copy_(source)`."""
    return source.to(target.dtype).expand_as(target).clone(memory_format=torch.contiguous_format)


@contextmanager
def _own_gradients_refused(name: str) -> Iterator[None]:
    apply = vars(torch.autograd.Function)["apply"].__func__

    def refused(what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            whose = ""
            if isinstance(args[0], type):
                if args[0].__module__.startswith("torch._library."):
                    return apply(*args, **kwargs)  # an operator with a registered gradient stays whole
                whose = f" {args[0].__name__}"
            raise CaptureError(
                f"the forward of {name} uses {what}{whose}, whose gradient torch.export would lose",
                hint=_HINT,
            )

        return refuse

    places: list[tuple[Any, str, Any]] = [
        (torch.autograd.Function, "apply", classmethod(refused("the autograd function"))),
        (Tensor, "register_hook", refused("a hook on a tensor")),
        (torch.autograd, "grad", refused("autograd.grad")),
        (torch.autograd, "backward", refused("autograd.backward")),
    ]
    before = [(owner, key, vars(owner)[key]) for owner, key, _ in places]
    for owner, key, value in places:
        setattr(owner, key, value)
    try:
        yield
    finally:
        for owner, key, value in before:
            setattr(owner, key, value)


def _detach_no_grad_regions(module: fx.GraphModule) -> None:
    """Detach the results of `torch.no_grad` regions, because decomposing inlines the regions."""
    regions = [
        (outer, node)
        for outer in module.modules() if isinstance(outer, fx.GraphModule)
        for node in outer.graph.nodes if node.target is _NO_GRAD_REGION and node.args[0] is False
    ]  # fmt: skip
    for outer, node in regions:
        body = getattr(outer, node.args[1].target)
        output = body.graph.output_node()
        with body.graph.inserting_before(output):
            output.args = (fx.map_arg(output.args[0], _detached),)
        body.recompile()


def _detached(node: fx.Node) -> fx.Node:
    made = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made

"""A module -> a functional ATen program, by torch.export; and a refusal of what export would silently change.

torch.export traces the forward only. A gradient that the user's code defines itself (a custom
`autograd.Function`, a hook) is lost without a word, and so is a tensor that the forward puts in the place of
a buffer. Both are looked for while tracing.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from traceback import clear_frames
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph
from torch.export import ExportedProgram, _trace, default_decompositions
from torch.export.graph_signature import OutputKind
from torch.overrides import TorchFunctionMode

from ..ir.errors import CaptureError
from ..ir.user_code import at, is_user_file, raised_at, user_line
from .autocast import Autocast, autocast_region
from .guards import AttributeWatch, attributes_kept, by_max_norm, caches_kept, refuse_transforms, settled
from .job_calls import refuse_state_of_loss
from .modules.torch_functions import READS, function_name, sized_by_data
from .random import python_random_kept, python_state
from .tensors import arguments_of, storage_ids, tensors_of

HINT = "cut by module names instead: give lists of FQNs, one list per stage"

Replacements = list[tuple[Any, str, Any]]
Refuse = Callable[[str], NoReturn]


@contextmanager
def what_export_loses_refused(name: str) -> Iterator[None]:
    """Raise CaptureError where the forward defines gradients itself, stops them inside autocast, hooks
    tensors, or puts another tensor in the place of a buffer."""

    def refuse(what: str) -> NoReturn:
        where = at(user_line())
        refuse_state_of_loss(name, where)
        raise CaptureError(
            f"the forward of {name} uses {what}{where}, which torch.export would lose", hint=HINT
        )

    with ExitStack() as stack:
        for owner, key, value in (*_gradients(refuse), *_autocast(refuse), *_hooks(refuse), *_state(refuse)):
            stack.enter_context(patch.object(owner, key, value))
        yield


def _refused(refuse: Refuse, what: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: refuse(what)


def _gradients(refuse: Refuse) -> Replacements:
    apply = vars(torch.autograd.Function)["apply"].__func__

    def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library."):
            return apply(cls, *args, **kwargs)  # an operator with a registered gradient stays whole
        refuse(f"the gradient of {cls.__name__}")

    def enter_without_gradients(self: torch.inference_mode) -> None:
        context: Any = torch.set_grad_enabled(not self.mode)
        self._inference_mode_context = context
        context.__enter__()

    return [
        (torch.inference_mode, "__enter__", enter_without_gradients),  # which export does not see
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
    """`self.count = self.count + 1`: export forgets it, other than `self.count += 1`."""
    set_attribute, register = nn.Module.__setattr__, nn.Module.register_buffer
    put: set[tuple[int, str]] = set()  # names that this forward itself brings up

    def check(module: nn.Module, name: str, value: Any) -> None:
        held = ChainMap(module.__dict__.get("_buffers", {}), module.__dict__)
        current, place = held.get(name), (id(module), name)
        if name not in held:
            put.add(place)
        new = isinstance(value, Tensor) and value is not current
        if new and isinstance(current, Tensor) and place not in put:
            refuse(f"a new tensor as {name}, instead of changing the one that is there,")

    def checked_setattr(self: nn.Module, name: str, value: Any) -> None:
        check(self, name, value)
        set_attribute(self, name, value)

    def checked_register(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        check(self, name, tensor)
        register(self, name, tensor, persistent)

    return [(nn.Module, "__setattr__", checked_setattr), (nn.Module, "register_buffer", checked_register)]


READ_AT, FOREIGN_AT = "pipeloom_read_at", "pipeloom_foreign_at"
"""Keys among the `meta` of a traced graph module: of lines that read data, and of those that compute with
parameters which are not the model's."""


_IN_PLACE = frozenset(
    """
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    __setitem__
    """.split()
)


class CallsWatched(TorchFunctionMode):
    """Notes in `lines` each line of the user's code that reads data, once; and in `foreign` each of the
    forward that computes with a real parameter: those of the model are fake. Refuses `.data = ...`, and
    parameters that are frozen for a part of the forward.

    training: refuse changes in place, under `torch.no_grad()` or by way of `detach`, of what a gradient flows
        through. Autograd then does not know of the change, and passes the gradient on; a functional graph
        would stop it.
    """

    def __init__(self, name: str, *, training: bool) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}
        self.foreign: dict[str, None] = {}
        self._name, self._training = name, training
        self._detached: dict[int, Tensor] = {}
        self.in_forward = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if (name in READS or sized_by_data(name, args)) and (line := user_line()):
            self.lines[line] = None
        if (
            self.in_forward
            and torch.is_grad_enabled()
            and any(type(a) is nn.Parameter and a.requires_grad for a in args)
        ):
            self.foreign[user_line()] = None
        if name == "__set__.data" and storage_ids(args[:1]) != storage_ids(args[1:]):
            raise CaptureError(
                f"the forward of {self._name} sets the data of a tensor{at(user_line())}: torch.export would "
                "lose it",
                hint=HINT,
            )
        changed = tensors_of(_changed_by(func, name, args, kwargs or {}))
        if self.in_forward and any(not isinstance(tensor, FakeTensor) for tensor in changed):
            where = at(user_line())
            refuse_state_of_loss(self._name, where)
            raise CaptureError(
                f"the forward of {self._name} changes a tensor that is not in its modules{where}: "
                "torch.export would lose it",
                hint=HINT,
            )
        if self._training:
            self._refuse_lost_gradients(func, name, args, kwargs or {})
            if name in ("detach", "__get__.data"):
                learning = filter(_learns, tensors_of(args or kwargs))
                self._detached |= {i: t for t in learning for i in storage_ids([t])}
        return func(*args, **(kwargs or {}))

    def _refuse_lost_gradients(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        how = ""
        if name in ("requires_grad_", "__set__.requires_grad"):
            requires = next(iter((*args[1:], *kwargs.values())), True)
            if self.in_forward and isinstance(args[0], nn.Parameter) and args[0].requires_grad != requires:
                how = "sets whether a parameter requires a gradient"
        elif name == "detach_" and _learns(args[0]):
            how = "detaches a tensor in place"
        else:
            for tensor in tensors_of(_changed_by(func, name, args, kwargs)):
                learns = _learns(tensor) or (tensor._base is not None and _learns(tensor._base))
                if not torch.is_grad_enabled() and learns:
                    how = "changes a tensor in place under torch.no_grad()"
                elif not tensor.requires_grad and not self._detached.keys().isdisjoint(storage_ids([tensor])):
                    how = "changes a tensor in place by way of detach()"
        if how:
            raise CaptureError(
                f"the forward of {self._name} {how}{at(user_line())}: torch.export gets its gradient wrong",
                hint=HINT,
            )


def _changed_by(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call changes in place."""
    code = getattr(func, "__code__", None)  # builtins have none
    if code is not None and "inplace" in code.co_varnames:  # F.relu(x, inplace=True)
        given = dict(zip(code.co_varnames, args, strict=False)) | kwargs
        return given.get(code.co_varnames[0]) if given.get("inplace") else None
    if name in _IN_PLACE or (name[:1] != "_" and name[-1:] == "_" and name != "detach_"):
        return args[:1]
    return kwargs.get("out")


def _learns(tensor: Tensor) -> bool:
    """Whether a gradient flows through a tensor. Of a parameter that is changed, see `export_program`."""
    return tensor.requires_grad and not tensor.is_leaf


def export_watched(
    module: nn.Module, batch: dict[str, Tensor], name: str, autocast: Autocast | None = None
) -> ExportedProgram:
    """`export_program`, of a module whose `model` hands nothing from one call of its forward to the next.

    Raises: CaptureError as `export_program` does, and for attributes or random numbers that it would freeze.
    """
    model = module.get_submodule("model")

    def run(first: ExportedProgram | None) -> tuple[ExportedProgram, AttributeWatch]:
        watch = AttributeWatch(model)
        handle = module.register_forward_hook(lambda *_: watch.look())
        with watch.watching():
            program = export_program(module, batch, name, autocast)
        handle.remove()
        return program, watch

    with python_random_kept():
        before = python_state()
        with attributes_kept(model):
            program = settled(run, _computes_the_same)
        if python_state() != before:
            raise CaptureError(
                f"the forward of {name} draws random numbers that export would freeze", hint=HINT
            )
    return program


def _computes_the_same(first: ExportedProgram, second: ExportedProgram) -> bool:
    constants = first.constants.keys() == second.constants.keys() and all(
        constant is second.constants[name]
        or (
            isinstance(constant, Tensor)
            and not isinstance(constant, FakeTensor)
            and torch.equal(constant, second.constants[name])
        )
        for name, constant in first.constants.items()
    )
    return constants and str(first.graph) == str(second.graph)


_NO_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def export_program(
    module: nn.Module, batch: dict[str, Tensor], name: str, autocast: Autocast | None = None
) -> ExportedProgram:
    """Trace `module(batch)` on fake tensors.

    autocast: mixed precision, or None. The program contains the casts, so it runs without autocast; parts
        where the forward switches it off stay as they are.
    Raises: CaptureError if that fails, or would lose a gradient that the user's code defines.
    """
    model = module.get_submodule("model")
    calls = CallsWatched(name, training=model.training)
    hooks = [
        module.register_forward_pre_hook(lambda *_: setattr(calls, "in_forward", True)),
        module.register_forward_hook(lambda *_: setattr(calls, "in_forward", False)),
    ]
    try:
        with warnings.catch_warnings(), without_export_output():
            # PyTorch 2.13 warns about its own use of LeafSpec, in every copy that export makes
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            # The guards judge what a forward assigns; a GRU only assigns its own weights anew.
            warnings.filterwarnings("ignore", message="The tensor attribute.*assigned during export")
            with autocast_region(autocast):
                with what_export_loses_refused(name), calls, caches_kept(module):
                    program = torch.export.export(module, (batch,), strict=False)
                _detach_no_grad_regions(program.graph_module)
                functional: ExportedProgram = program.run_decompositions(_decompositions())
    except CaptureError as error:
        clear_frames(error.__traceback__)  # see below
        raise
    except Exception as error:  # torch.export raises every kind of exception; the reason is passed on
        # What broke off inside a checkpoint has left its hooks on saved tensors in place until the generator
        # that set them goes: it hangs on the frames of the traceback.
        where = at(raised_at(error))
        clear_frames(error.__traceback__)
        refuse_transforms(error, name)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise CaptureError(
            f"torch.export cannot capture {name}: {type(error).__name__}: {reason}{where}", hint=HINT
        ) from error
    for hook in hooks:
        hook.remove()
    _refuse_dropout_between_layers(functional.graph, name)
    functional.graph_module.meta |= {READ_AT: tuple(calls.lines), FOREIGN_AT: tuple(calls.foreign)}
    for spec in functional.graph_signature.output_specs:
        target = str(spec.target).removeprefix("model.")
        if spec.kind is OutputKind.PARAMETER_MUTATION and model.get_parameter(target).requires_grad:
            what = f"its parameter {target}{by_max_norm(model, target)}"
            raise CaptureError(f"the forward of {name} changes {what}", hint=HINT)
    return functional


_RECURRENT = [
    call
    for packet in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for call in (getattr(torch.ops.aten, packet).input, getattr(torch.ops.aten, packet).data)
]


def _refuse_dropout_between_layers(graph: fx.Graph, name: str) -> None:
    """PyTorch's decomposition of recurrent layers, by which stages are traced, leaves it out (2.11 to 2.13:
    it compares `num_layers < i - 1`)."""
    for node in graph.nodes:
        if node.target in _RECURRENT:
            given = arguments_of(node.target, node.args, node.kwargs)
            if given["dropout"] and given["train"] and given["num_layers"] > 1:
                raise CaptureError(
                    f"{name} has dropout between the layers of a recurrent module, which tracing would lose",
                    hint=HINT,
                )


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """What must not stay whole: calls without a derivative, and calls that change what they are given. Made
    once: torch lists every operation there is for it, which takes a tenth of a capture."""
    instance_norm = torch.ops.aten.instance_norm.default
    assignments = (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
    return {
        torch.ops.aten.copy.default: _copy,
        instance_norm: default_decompositions()[instance_norm],
        **{assign: partial(_assigned_as_real, assign) for assign in assignments},
    }


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What is in `target` after `target.copy_(source)`."""
    return source.to(target.dtype).expand_as(target).clone(memory_format=torch.contiguous_format)


def _assigned_as_real(assign: Any, whole: Tensor, part: Tensor, dim: int = 0, *where: Any) -> Any:
    """Assignments to parts of complex tensors have no derivative."""
    if not whole.is_complex():
        return NotImplemented
    parts = (torch.view_as_real(tensor.resolve_conj()) for tensor in (whole, part))
    return torch.view_as_complex(assign(*parts, dim % whole.dim(), *where))


def _detach_no_grad_regions(module: fx.GraphModule) -> None:
    """Detach the results of `torch.no_grad` regions, and what is written there into tensors from outside,
    because decomposing inlines the regions."""
    regions = [
        (outer, node)
        for outer in module.modules()
        if isinstance(outer, fx.GraphModule)
        for node in outer.graph.nodes
        if node.target is _NO_GRAD_REGION and node.args[0] is False
    ]
    for outer, node in regions:
        body = getattr(outer, node.args[1].target)
        for inner in [*body.graph.nodes]:
            if (schema := getattr(inner.target, "_schema", None)) is not None and schema.is_mutable:
                with body.graph.inserting_before(inner):
                    inner.args = tuple(
                        given if of.alias_info is not None else fx.map_arg(given, _detach_if_real)
                        for given, of in zip(inner.args, schema.arguments, strict=False)
                    )
        output = body.graph.output_node()
        with body.graph.inserting_before(output):
            output.args = (fx.map_arg(output.args[0], _detach),)
        body.recompile()


def _detach(node: fx.Node) -> fx.Node:
    detached = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _detach_if_real(node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    real = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return _detach(node) if real else node


_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def without_export_output() -> Iterator[None]:
    """What torch.export prints where it fails, a graph, is not shown, nor are warnings of shape logic:
    its error is reported in one sentence instead."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(_trace, "print", lambda *_, **__: None, create=True))
        for name in _LOGGERS:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield

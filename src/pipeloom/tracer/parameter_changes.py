"""Parameters that a forward changes, as the average of a teacher or a norm that is kept small.

A parameter that nothing trains is a buffer in all but name: a graph has it as one, and hands it from one
micro-batch to the next. Any other may be changed only where one rank has it and no earlier micro-batch's
backward needs what it was: several micro-batches are under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.errors import CaptureError
from .tensors import tensors_of
from .user_code import at, user_line

HINT = (
    "change what is trained in the step of the optimizer that Job.optimizer returns; what is not, and has "
    "requires_grad=False, may be changed in place under torch.no_grad(), without .data"
)


@contextmanager
def as_buffers(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """In the block the model's parameters of these names are buffers, under all their names.

    >>> layer = nn.Linear(2, 2)
    >>> with as_buffers(layer, ["bias"]):
    ...     [name for name, _ in layer.named_buffers()], [name for name, _ in layer.named_parameters()]
    (['bias'], ['weight'])
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(named[name]) for name in names}
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()] if chosen else []
    for module, parameters, _ in before:
        for key, tensor in parameters.items():
            if id(tensor) in chosen:
                module._buffers[key] = module._parameters.pop(key)
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            for store, former in ((module._parameters, parameters), (module._buffers, buffers)):
                store.clear()
                store.update(former)  # type: ignore[arg-type]


def refuse_new_tensor(name: str) -> NoReturn:
    """Raises: CaptureError for a parameter in whose place the forward puts another tensor."""
    raise CaptureError(
        f"the forward puts another tensor in the place of the parameter {name}{at(user_line())}", hint=HINT
    )


class ParameterWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the ATen calls of a recorded forward.

    storages: those of parameters now in use -> FQN.  between: whether code between modules runs now.

    changed: FQN -> line that changed it first.  changed_between: those that code between modules changed.
    saved: parameters that a backward needs.
    """

    def __init__(self, storages: Callable[[], Mapping[int, str]], between: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages, self._between = storages, between
        self.changed: dict[str, str] = {}
        self.changed_between: set[str] = set()
        self.saved: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, lambda tensor: tensor), self:
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved |= set(self._names([tensor]))
        return tensor

    def _names(self, tensors: list[Tensor]) -> Iterator[str]:
        storages = self._storages()
        for tensor in tensors:
            if (name := storages.get(tensor.untyped_storage()._cdata)) is not None:
                yield name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            written = [
                given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write
            ]
            for name in self._names(tensors_of(written)):
                self.note(name)
        return func(*args, **kwargs)

    def note(self, name: str) -> None:
        """The line that runs changes a parameter."""
        self.changed.setdefault(name, user_line())
        if self._between():
            self.changed_between.add(name)

    def refuse(self, readers: Mapping[str, int]) -> None:
        """Raises: CaptureError for a change that would not be the same as in one process.

        readers: FQN -> how many ops read the parameter.
        """
        for name, line in self.changed.items():
            if name in self.changed_between:
                why = "between modules, where several ranks run the same code"
            elif name in self.saved:
                why = "while the backward of an earlier micro-batch still needs what it was"
            elif readers.get(name, 0) > 1:
                why = "and other modules read it, which may run on another rank"
            else:
                continue
            raise CaptureError(f"the forward changes the parameter {name}{at(line)}, {why}", hint=HINT)

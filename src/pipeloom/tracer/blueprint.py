"""Build a model without memory, then make only the parameters that a rank owns.

The constructor runs once on fake tensors while every ATen call is recorded. Replaying the record in order
with real tensors gives the values of `torch.manual_seed(seed); model()` bit for bit. Calls that only
matter to tensors nobody asked for are left out; if they draw random numbers they run on a scratch tensor
that is dropped at once, so the generator moves on as if they had run. Peak memory is what was asked for
plus the largest single parameter and its initialiser's scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .constructor_record import ConstructorRecord, ConstructorRecorder, ConstructorReplay, FakeDeepCopy
from .hooks import Hook, parameter_hooks
from .tracing_lock import one_thread_at_a_time


@dataclass(eq=False)
class Blueprint:
    """A model on fake tensors, with what is needed to make any part of it real.

    attribute_tensors: tensors that the model holds and that are neither parameters nor buffers, by name.
    why_whole: set when the constructor reads tensor values and so cannot run on fake ones: then each
        materialisation builds the whole model.
    changed_parameters: names of parameters that nothing trains and the forward changes: buffers to a graph.
    hooks: on parameters, as the constructor left them.
    """

    build: Callable[[], nn.Module]
    model: nn.Module
    record: ConstructorRecord = field(default_factory=ConstructorRecord)
    attribute_tensors: dict[str, Tensor] = field(default_factory=dict)
    why_whole: str = ""
    hooks: tuple[Hook, ...] = ()
    changed_parameters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Keep what the constructor made: a forward may put other tensors in the place of buffers."""
        self.initial = _named_tensors(self.model)

    @one_thread_at_a_time
    def materialise(self, seed: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters and buffers as `torch.manual_seed(seed); build()` makes them.

        names: FQNs, or names in `attribute_tensors`. Tied names give the same tensor.
        The generator's state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.why_whole:
                real = _named_tensors(self.build())
                return {name: real[name].detach() for name in names}
            named: Mapping[str, Tensor] = _named_tensors(self.model) | self.initial | self.attribute_tensors
            return ConstructorReplay(self.record, {name: named[name] for name in names}).run()


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return params | dict(model.named_buffers(remove_duplicate=False))


def make_blueprint(build: Callable[[], nn.Module], fake: FakeTensorMode) -> Blueprint:
    """Run a constructor on fake tensors of `fake`, recording it.

    A constructor that reads values of tensors (`.item()`, `.tolist()`) is run for real instead, and its
    result turned into fake tensors.
    """
    recorder = ConstructorRecorder(fake)
    try:
        with torch.random.fork_rng(devices=[]), fake, recorder, recorder.whole_initialisers(), FakeDeepCopy():
            model = build()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        with torch.random.fork_rng(devices=[]):
            model = build()
        hooks = parameter_hooks(model)  # imitations have none
        why = f"{type(error).__name__}: {error}"
        return Blueprint(build, _imitate(model, fake), why_whole=why, hooks=hooks)
    hooks = parameter_hooks(model)
    if any(not isinstance(p, FakeTensor) for p in [*model.parameters(), *model.buffers()]):
        why = "it returns tensors made elsewhere"
        return Blueprint(build, _imitate(model, fake), why_whole=why, hooks=hooks)
    return Blueprint(build, model, recorder.record, hooks=hooks)


def _imitate(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Replace every parameter and buffer by a fake one, keeping ties."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    if id(tensor) not in seen:
                        seen[id(tensor)] = (tensor, fake.from_tensor(tensor))
                    store[name] = seen[id(tensor)][1]  # type: ignore[assignment]
    return model

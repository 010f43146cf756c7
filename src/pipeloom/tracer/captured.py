"""Captured: what capturing a model gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, fx

from ..ir.graph import OpGraph
from .autocast import Autocast
from .blueprint import Blueprint
from .random import one_thread_at_a_time

if TYPE_CHECKING:
    from .modules.cut import ModuleCut


@dataclass(eq=False)
class Captured:
    """A captured model: the description (`graph`) and what can be run (`module`).

    module: functional ATen graph; an Op's name is the name of its node, and `getitem` nodes belong to
        the op that they unpack. One placeholder per parameter, buffer, constant and batch input.
    targets: placeholder name -> FQN of its parameter or buffer (constants are buffers that are not
        persistent), or name of its batch input.
    updates: node name -> FQN of the buffer whose next state it is.
    outputs: of the model, where they are wanted: name -> name of its node.
    constants: FQN -> tensor, for constants that the model's forward makes.
    cut: how to run the model module by module, if `graph.fallback` says why it could not be exported; then
        `module` is empty.
    evaluation: the same micro-batches in evaluation mode, if that was captured already.
    traced: what tracing made of its stages, for `stage_functions` to trace each once.
    split_words: weights that are cut by words, see `split_words.py`: FQN -> number of parts.
    put_back_attributes: gives the model the Python values in its attributes again that its constructor left.
    """

    graph: OpGraph
    module: fx.GraphModule
    targets: Mapping[str, str]
    updates: Mapping[str, str]
    blueprint: Blueprint
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Autocast | None = None
    cut: ModuleCut | None = None
    evaluation: Captured | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)
    traced: dict[Hashable, object] = field(default_factory=dict)
    split_words: Mapping[str, int] = field(default_factory=dict)
    put_back_attributes: Callable[[], None] = lambda: None

    @one_thread_at_a_time
    def start_over(self) -> None:
        """Forget what tracing made, and what earlier runs have left in the model. Pipelines that share a
        capture must run one after another."""
        self.traced.clear()
        self.put_back_attributes()

    @contextmanager
    def ranks_apart(self, placement: Sequence[int]) -> Iterator[None]:
        """In the block each rank's stages have attributes of their own, see `Skeleton`."""
        if self.cut is not None:
            self.cut.skeleton.ranks = placement
            self.cut.skeleton.left = defaultdict(lambda: self.put_back_attributes)
        try:
            yield
        finally:
            if self.cut is not None:
                self.cut.skeleton.ranks, self.cut.skeleton.left = (), {}

    @property
    def draws_python_random(self) -> bool:
        """Whether the forward draws from Python's or NumPy's global generators."""
        return self.cut is not None and self.cut.recording.python_random

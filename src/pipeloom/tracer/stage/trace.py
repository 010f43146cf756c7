"""The pure functions of one stage of a captured graph; `tracer.stage.functions` says what each does.

No autograd graph is alive between calls. Results never share storage with inputs, residuals or parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from traceback import walk_tb
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...ir.errors import PipeloomError, PlanError
from ...ir.memory_policy import Residual, Treatment
from ...ir.stages import StageGraph
from ..captured import Captured
from ..modules.cut import module_stage_functions
from ..random import one_thread_at_a_time, seed_draws
from ..tensors import DimOrder, ensure_unshared, storage_ids, tensors_of
from .compiled import SOURCE, BoxedFunction, compile_graph, peak_bytes
from .functions import Sink, Slot, SlotKind, StageFunctions, Tensors
from .joint import StageModule, extract, orders_of, simplify, trace_joint
from .residuals import require_possible
from .split import Part, Splitter, draw_keys

KEEP_ALL: Mapping[str, Treatment] = MappingProxyType({})


class CompiledPart(NamedTuple):
    """ops: of lines of its source, see `compile_graph`."""

    part: Part
    run: BoxedFunction
    peak_bytes: int
    ops: Mapping[int, str] = MappingProxyType({})

    def op_of(self, error: BaseException) -> str:
        """Where an error came from, as " at aten.embedding.default"; "" if that is not known."""
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == SOURCE]
        return "".join(f" at {self.ops[line]}" for line in lines if line in self.ops)


@dataclass(eq=False, kw_only=True)
class GraphFunctions(StageFunctions):
    """A stage of a captured graph.

    kept_buffers: updated buffers whose previous state the backward reads.
    orders: of the values that it sends and of next states of buffers, see `tracer.tensors`.
    constants: tensors of the captured forward, by the names under which its ops read them.
    """

    leaves_the_same = True

    kept_buffers: frozenset[str]
    functions: Mapping[str, CompiledPart]
    constants: Mapping[str, Tensor]
    orders: Mapping[str, DimOrder]

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        return {name: function.peak_bytes for name, function in self.functions.items()}

    def forward(
        self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
    ) -> tuple[dict[str, Tensor], Tensors]:
        given = _as_slots("input", inputs) | {Slot("seed", "seed"): seed}
        results = self._run("forward", state, given)
        outputs = _of_kind(results, "output")
        if not self.differentiable:
            taken = storage_ids((*state.values(), *inputs.values()))
            outputs = {
                name: ensure_unshared(t, self.orders.get(name, ()), taken) for name, t in outputs.items()
            }
        residuals: Tensors = {slot: t for slot, t in results.items() if slot.kind == "residual"}
        residuals |= {Slot("input", name): inputs[name] for name in self.kept_inputs}
        residuals |= {Slot("old_buffer", name): state[name] for name in self.kept_buffers}
        return outputs, residuals

    def recompute(self, state: Mapping[str, Tensor], residuals: Tensors) -> Tensors:
        return self._run("recompute", state, dict(residuals))

    def backward(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor], sink: Sink
    ) -> dict[str, Tensor]:
        residuals |= _as_slots("grad", grads)
        return _of_kind(self._run("backward", state, residuals, sink), "input_grad")

    def backward_input(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensors]:
        residuals |= _as_slots("grad", grads)
        carried = {s: residuals[s] for s in self.functions["weight_grad"].part.inputs if s in residuals}
        results = self._run("input_grad", state, residuals)
        carried |= {slot: t for slot, t in results.items() if slot.kind == "carried"}
        return _of_kind(results, "input_grad"), carried

    def backward_weight(self, state: Mapping[str, Tensor], carried: Tensors, sink: Sink) -> None:
        self._run("weight_grad", state, carried, sink)

    def evaluate(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs, _ = self.forward(state, inputs, seed=0)
        return {name: t for name, t in outputs.items() if not name.startswith("buffer:")}

    def _run(
        self, name: str, state: Mapping[str, Tensor], tensors: Tensors, sink: Sink | None = None
    ) -> Tensors:
        """Empties `tensors`."""
        function, constants = self.functions[name], self.constants
        tensors[Slot("sink", "gradients")] = sink
        box = [
            (constants[slot.name] if slot.name in constants else state[slot.name])
            if slot.kind == "state"
            else tensors[slot]
            for slot in function.part.inputs
        ]
        tensors.clear()
        try:
            made = function.run(box)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError) as error:  # what a kernel raises for numbers that it does not take
            where = function.op_of(error)
            raise PipeloomError(
                f"the {name} of stage {self.index} fails{where}: {type(error).__name__}: {error}",
                hint="call the model with this batch in plain PyTorch, which names the line: an index may be "
                "out of range, or a dtype another than a weight's",
            ) from error
        results = dict(zip(function.part.outputs, made, strict=True))
        if sink is not None:  # compiled parts return what eager ones add on the way
            for weight, grad in _of_kind(results, "weight_grad").items():
                sink.add(weight, grad)
        return results


def _carried_bytes(weight_grad: Part) -> int:
    placeholders = zip(weight_grad.graph.find_nodes(op="placeholder"), weight_grad.inputs, strict=True)
    return sum(
        t.untyped_storage().nbytes()
        for node, slot in placeholders
        if slot.kind in ("residual", "carried")
        for t in tensors_of(node.meta["val"])
    )


def _as_slots(kind: SlotKind, tensors: Mapping[str, Tensor]) -> Tensors:
    return {Slot(kind, name): tensor for name, tensor in tensors.items()}


def _of_kind(results: Tensors, kind: SlotKind) -> dict[str, Tensor]:
    return {slot.name: t for slot, t in results.items() if slot.kind == kind}


@one_thread_at_a_time
def stage_functions(
    captured: Captured,
    stages: StageGraph,
    index: int,
    *,
    device: str = "cpu",
    compiled: bool = False,
    treatments: Mapping[str, Treatment] = KEEP_ALL,
    ahead: bool = False,
) -> StageFunctions:
    """Build the functions of one stage.

    device: where it will run ("cpu", "cuda:1").  compiled: pass the functions through torch.compile
        (Inductor); parts that draw random numbers stay eager, so that they draw the same ones.
    treatments: residual -> what becomes of it.  ahead: whether what it drops is made again by `recompute`,
        not inside its backward.
    Raises: PlanError if the stage has no such residual, or cannot recompute it.
    """
    if captured.cut is not None:
        _refuse_treatments(index, treatments)
        return module_stage_functions(
            captured.cut, captured.graph, stages, index, device=device, compiled=compiled
        )
    module = extract(captured, stages, index, device)
    values = captured.graph.value
    sent = tuple(o for o in module.outputs if ":" not in o and o != captured.graph.loss)
    by_kind: dict[str, list[str]] = {"batch": [], "value": [], "param": [], "buffer": []}
    for name, kind in zip(module.names, module.kinds, strict=True):
        by_kind[kind].append(name)
    trained = any(values[o].needs_grad for o in module.outputs if ":" not in o)
    parts: dict[str, Part] = {"forward": _forward_only(module)}
    attributes: object = module.module
    residuals: Mapping[str, Residual] = {}
    if trained:
        splitter, attributes = _splitter(module, captured, device, compiled)
        residuals = splitter.residuals()
    require_possible(index, treatments, residuals)
    dropped = _names_treated(treatments, "recompute")
    if trained:
        parts = splitter.parts(dropped, ahead=ahead)
    functions = {
        name: _compile_part(part, attributes, compiled, freed=_freed_inputs(name, parts))
        for name, part in parts.items()
    }
    needed = [slot for name in ("backward", "recompute") if name in parts for slot in parts[name].inputs]
    return GraphFunctions(
        index=index,
        differentiable=trained,
        carried_bytes=_carried_bytes(parts["weight_grad"]) if trained else 0,
        params=stages.params[index],
        buffers=stages.buffers[index],
        batch=tuple(by_kind["batch"]),
        received=tuple(by_kind["value"]),
        sent=sent,
        loss=captured.graph.loss if captured.graph.loss in module.outputs else None,
        residual_bytes={n: r.bytes for n, r in residuals.items() if ahead or n not in dropped},
        offloaded=_names_treated(treatments, "offload"),
        recomputed=dropped if ahead else frozenset(),
        kept_inputs=frozenset(s.name for s in needed if s.kind == "input"),
        kept_buffers=frozenset(s.name for s in needed if s.kind == "old_buffer"),
        functions=functions,
        constants={n: t.to(device) for n, t in captured.constants.items() if n in module.names},
        orders=orders_of(module, captured),
    )


@one_thread_at_a_time
def stage_residuals(
    captured: Captured, stages: StageGraph, index: int, *, device: str = "cpu"
) -> dict[str, Residual]:
    """What a stage's forward leaves for its backward, and how each could be made again. A stage that was cut
    between modules tells nothing: its residuals are autograd's."""
    module = None if captured.cut is not None else extract(captured, stages, index, device)
    values = captured.graph.value
    if module is None or not any(o in values and values[o].needs_grad for o in module.outputs):
        return {}
    return _splitter(module, captured, device, compiled=False)[0].residuals()


def _names_treated(treatments: Mapping[str, Treatment], treatment: Treatment) -> frozenset[str]:
    return frozenset(name for name, chosen in treatments.items() if chosen == treatment)


def _refuse_treatments(index: int, treatments: Mapping[str, Treatment]) -> None:
    for name, treatment in treatments.items():
        if treatment != "keep":
            raise PlanError(
                f"the plan is to {treatment} residual {name} of stage {index}, but this model is cut between "
                "its modules, where autograd itself keeps the residuals",
                hint="plan without recomputing and offloading, or make the model traceable by torch.export",
            )


def _splitter(
    module: StageModule, captured: Captured, device: str, compiled: bool
) -> tuple[Splitter, object]:
    """Traced once for a captured model, which is nearly all that building a stage's functions takes: a
    splitter is only read."""
    nodes = tuple(node.name for node in module.module.graph.nodes)
    key = (nodes, module.names, module.outputs, module.learning, device, compiled)
    splitter = captured.traced.get(key)  # once: another rank may forget all of them at any time
    if splitter is None:
        joint = simplify(trace_joint(module, captured, device))
        kinds = zip(module.names, module.kinds, strict=True)
        state = frozenset(name for name, kind in kinds if kind in ("param", "buffer"))
        updated = frozenset(o.removeprefix("buffer:") for o in module.outputs if o.startswith("buffer:"))
        splitter = captured.traced[key] = Splitter(joint, state, updated, not compiled)
    assert isinstance(splitter, Splitter)
    return splitter, splitter.joint.attributes


def _forward_only(module: StageModule) -> Part:
    """The forward of a stage through which no gradient flows: its graph as it is."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.module.graph, {}))
    inputs = [
        Slot("state" if kind in ("param", "buffer") else "input", name)
        for name, kind in zip(module.names, module.kinds, strict=True)
    ]
    if seed_draws(graph, draw_keys(graph.nodes)):
        inputs.append(Slot("seed", "seed"))
    return Part(graph, tuple(inputs), tuple(Slot("output", o) for o in module.outputs))


def _freed_inputs(name: str, parts: Mapping[str, Part]) -> frozenset[Slot]:
    """The residuals that a part's run frees, each at its last use: not those that others read afterwards."""
    if name == "recompute":
        return frozenset()
    left = parts["weight_grad"].inputs if name == "input_grad" else ()
    return frozenset(s for s in parts[name].inputs if s.kind in ("residual", "carried")).difference(left)


def _compile_part(part: Part, attributes: object, compiled: bool, *, freed: frozenset[Slot]) -> CompiledPart:
    """freed: inputs that the caller gives up; what torch.compile makes keeps them to its end."""
    fast = compiled and not any(slot.kind == "seed" for slot in part.inputs)
    owned = {
        node.name: slot in freed and not fast
        for node, slot in zip(part.graph.find_nodes(op="placeholder"), part.inputs, strict=True)
    }
    most = peak_bytes(part.graph, owned)
    if fast:
        run = torch.compile(fx.GraphModule(attributes, part.graph), dynamic=False)  # type: ignore[arg-type]
        return CompiledPart(part, lambda box: tuple(run(*box)), most)
    boxed, ops = compile_graph(part.graph, attributes)
    return CompiledPart(part, boxed, most, ops)

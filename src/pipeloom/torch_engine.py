"""The stages and the order of a plan on the engine of torch.distributed.pipelining.

The forward of the model is traced down to whole modules, and no further:

    tokens ─▶ embed ─▶ x + p ─▶ layers.0 ─▶ layers.1 ─▶ norm ─▶ head
    └────────── stage 0 ──────────────┘   └──────── stage 1 ───────┘

A stage calls the modules themselves, under their names in the model, so that `fully_shard` and
`parallelize_module` work in it. What the code between modules computes goes with the module in front of it;
what depends on no module, such as positions, is computed in each stage that reads it.

Of a model that torch.fx cannot trace, such as Hugging Face's, it calls what torch.export made of the modules.
They have the same names and parameters, but no class of their own: `parallelize_module` knows none of them.

`_PipelineScheduleRuntime`, the only engine there that runs any order, is private: torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.export import unflatten

from .ir.errors import CaptureError, ConfigError, PlanError
from .ir.plan import Plan
from .other_engines import ENGINES, engine_order, stage_modules
from .tracer.export import without_export_output

TITLE = ENGINES["torch"]

MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
"""Functions of torch that make tensors of sizes, which fx does not record by itself."""


def torch_stages(
    plan: Plan,
    model: nn.Module,
    rank: int,
    *,
    example: Mapping[str, Tensor] | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    scale_grads: bool = True,
) -> tuple[list[PipelineStage], _PipelineScheduleRuntime]:
    """The stages of a rank, and the schedule that runs the plan's order on torch's own engine.

    plan: of whole modules, see `--granularity module`.  model: its parameters are used, not copied.
    rank: in the group of the pipeline.  group: the default one unless given.
    example: a micro-batch, by the names of the forward's arguments, for a model that torch.fx cannot trace:
        it is traced by torch.export instead. Micro-batches must then have these shapes, and the output is a
        tensor or a tuple of them.
    loss: (output of the model, target) -> scalar tensor, for the last stage; None for forwards only.
    device: where the rank's modules already are.
    scale_grads: divide sums of gradients by the number of micro-batches, for a loss that is a mean.
    Returns: the stages, in the order of the forward, whose `submod` may be sharded before the first step; and
        the schedule, whose `step(**inputs, target=..., losses=[...])` all ranks call.
    Raises: PlanError if the plan's stages are not of whole modules of this model, do not form a chain, share
        a trained parameter, or need what torch's engine lacks; CaptureError if the forward cannot be traced;
        ConfigError for a rank that is not this process's.

    >>> import copy, tempfile
    >>> import pipeloom
    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> job = pipeloom.Job(
    ...     model=lambda: copy.deepcopy(net),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> plan = pipeloom.plan(job, ranks=1, microbatch_size=4, granularity="module", cluster="1 x a100-40")
    >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> stages, schedule = torch_stages(plan, net, 0, loss=nn.functional.mse_loss)
    >>> losses = []
    >>> output = schedule.step(input=torch.ones(32, 8), target=torch.zeros(32, 1), losses=losses)
    >>> len(losses), net[0].weight.grad.shape
    (8, torch.Size([8, 8]))
    >>> dist.destroy_process_group()
    """
    modules, order = stage_modules(plan), engine_order(plan, TITLE)
    stage_of = {name: stage for stage, names in enumerate(modules) for name in names}
    parts = _cut(model, stage_of, len(modules), example)
    _refuse_shared(parts)
    if (own := dist.get_rank(group)) != rank or dist.get_world_size(group) != order.ranks:
        raise ConfigError(
            f"rank {rank} of a plan for {order.ranks} ranks, in process {own} of a group of "
            f"{dist.get_world_size(group)}",
            hint="pass the group of the pipeline, as large as the plan, and this process's rank in it",
        )
    stages = [
        PipelineStage(part, stage, len(modules), torch.device(device), group=group)
        for stage, part in enumerate(parts)
        if order.placement[stage] == rank
    ]
    schedule: _PipelineScheduleRuntime = _Schedule(  # type: ignore[no-untyped-call]
        stages, order.microbatches, loss_fn=loss, scale_grads=scale_grads
    )
    schedule.pipeline_order = {
        number: [_Action.from_str(str(action)) for action in row] for number, row in enumerate(order.rows)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return stages, schedule


class _Schedule(_PipelineScheduleRuntime):
    """Torch's runtime, which refuses what torch would silently do wrong."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: ConfigError if the order has split backwards and modules within a stage are sharded: torch
        2.13 then computes wrong gradients or none, in its own zero-bubble schedules, too."""
        row = self.pipeline_order_with_comms[self.rank]
        splits = any(action.computation_type == _ComputationType.BACKWARD_WEIGHT for action in row)
        for stage in self._stages if splits else ():
            for name, module in stage.submod.named_modules():
                if name and isinstance(module, FSDPModule):
                    raise ConfigError(
                        f"module {name} of stage {stage.stage_index} is sharded by itself, and torch cannot "
                        "split backwards then",
                        hint="shard whole stages: fully_shard(stage.submod); or plan with 1f1b",
                    )
        return super().step(*args, **kwargs)


def _refuse_shared(parts: Sequence[nn.Module]) -> None:
    """Raises: PlanError if two stages share a parameter that is trained."""
    holder: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            first, other = holder.setdefault(parameter, (stage, name))
            if first != stage and parameter.requires_grad:
                raise PlanError(
                    f"{other} of stage {first} is {name} of stage {stage}, and {TITLE} does not sum their "
                    "gradients",
                    hint="use fewer stages, so that one has it, or run the plan with pipeloom",
                )


class _ToModules(fx.Tracer):
    """Traces what stands between modules."""

    def __init__(self, whole: Mapping[str, int]) -> None:
        super().__init__()
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = f"{module_qualified_name}."
        return not any(name.startswith(inside) for name in self.whole)


@contextmanager
def _makers_traced() -> Iterator[None]:
    """Sizes are not known while a forward is traced: what is made of them is recorded."""

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            proxies = [value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)]
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return call

    with patch.dict(vars(torch), {name: traced(getattr(torch, name)) for name in MAKERS}):
        yield


def _exported(model: nn.Module, example: Mapping[str, Tensor]) -> fx.GraphModule:
    """A model that calls modules of the same names, each with what its forward does on such a batch."""
    with warnings.catch_warnings(), without_export_output():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        exported = unflatten(torch.export.export(model, (), dict(example), strict=False))
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for name, module in exported.named_modules(remove_duplicate=False):
        for store in (module._parameters, module._buffers):
            for key in store:
                store[key] = own.get(f"{name}.{key}".lstrip("."), store[key])  # it has copies
    return fx.GraphModule(exported, exported.graph)


def _cut(
    model: nn.Module, stage_of: Mapping[str, int], count: int, example: Mapping[str, Tensor] | None
) -> list[fx.GraphModule]:
    try:
        traced = model if example is None else _exported(model, example)
        with _makers_traced():
            graph = _ToModules(stage_of).trace(traced)
    except Exception as error:  # the user's code, which may do anything with what is no tensor yet
        instead = "pass a micro-batch as example=, and torch.export traces it; or " if example is None else ""
        raise CaptureError(
            f"the forward of {type(model).__name__} cannot be traced between its modules: {error}",
            hint=f"{instead}run the plan with pipeloom",
        ) from error
    outputs = graph.output_node().args[0]
    if example is not None and isinstance(outputs, tuple | list) and len(outputs) == 1:
        graph.output_node().args = (outputs[0],)
    home, current, called = dict[fx.Node, int](), 0, set[str]()
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in stage_of:
            stage = stage_of[str(node.target)]
            if stage < current:
                raise PlanError(
                    f"module {node.target} of stage {stage} is called after modules of stage {current}",
                    hint="plan this model again",
                )
            current = stage
            called.add(str(node.target))
            home[node] = current
        elif node.op == "output" or any(source in home for source in node.all_input_nodes):
            home[node] = current
    if missing := sorted(stage_of.keys() - called):
        raise PlanError(
            f"the forward of {type(model).__name__} does not call module {missing[0]}, which the plan has",
            hint="pass the model that the plan was made for",
        )
    return [_part(traced, graph, home, stage) for stage in range(count)]


def _part(model: nn.Module, graph: fx.Graph, home: Mapping[fx.Node, int], stage: int) -> fx.GraphModule:
    """The module of a stage: (values of the stage in front, inputs of the model) -> values for the next one.

    Of the inputs it takes those that it reads, stage 0 all, and passes over other keywords.
    """
    part, copies, last = fx.Graph(), dict[fx.Node, fx.Node](), graph.output_node()
    own = {node: None for node in graph.nodes if home.get(node) == stage and node is not last}
    for value in _received(graph, home, stage):
        copies[value] = part.placeholder(value.name)
    pending = [*own, last] if home[last] == stage else [*own]
    read = set[fx.Node]()
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in home and source not in read:
                read.add(source)
                pending.append(source)
    for node in graph.find_nodes(op="placeholder"):
        if stage == 0 or node in read:
            copies[node] = part.node_copy(node)
    if not any(str(node.target).startswith("**") for node in copies):
        part.placeholder("**others")
    for node in graph.nodes:  # what reads no module is computed here, too
        if node in own or (node in read and node not in copies):
            copies[node] = part.node_copy(node, copies.__getitem__)
    if home[last] == stage:
        part.output(fx.node.map_arg(last.args[0], copies.__getitem__))
    else:
        sent = tuple(copies[value] for value in _received(graph, home, stage + 1))
        part.output(sent[0] if len(sent) == 1 else sent)
    return fx.GraphModule(model, part)


def _received(graph: fx.Graph, home: Mapping[fx.Node, int], stage: int) -> list[fx.Node]:
    """The values that a stage receives. Raises: PlanError if a value skips a stage, or there is none."""
    found = []
    for node in graph.nodes if stage else ():
        source, readers = home.get(node), [home[user] for user in node.users if user in home]
        if source is None or source >= stage or stage not in readers:
            continue
        if source != stage - 1:
            raise PlanError(
                f"{TITLE} passes values to the next stage only, and stage {source} sends {node.name} to "
                f"stage {stage}",
                hint="plan with --no-branches, or fewer stages: stages must form a chain",
            )
        found.append(node)
    if stage and not found:
        raise PlanError(f"stage {stage} reads nothing of stage {stage - 1}", hint="plan for fewer stages")
    return found

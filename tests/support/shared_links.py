"""Random programs that offload and recompute, random costs, and clusters whose ranks share links."""

from dataclasses import replace
from random import Random

from edits import Case

from pipeloom.ir.action import B, F, I, Kind
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering.passes import lower

INSTANT = Link(bandwidth_bytes_per_s=float("inf"))


def nodes(*of: int, **more: object) -> Cluster:
    """Ranks on nodes; nothing but what `more` says takes time."""
    devices = tuple(Device(name="any", memory_bytes=1, node=node) for node in of)
    return Cluster(devices=devices, within_node=INSTANT, **more)  # type: ignore[arg-type]


def on_switches(*names: str, **switches: Link) -> Cluster:
    devices = tuple(Device(name="any", memory_bytes=1, switch=name) for name in names)
    return Cluster(devices=devices, within_node=INSTANT, switches=switches)


def random_cluster(ranks: int, dice: Random) -> Cluster:
    per_node = dice.randint(1, 3)
    switched = dice.random() < 0.7
    devices = tuple(
        Device(
            name="any",
            memory_bytes=1,
            node=rank // per_node,
            group=dice.choice((None, "g")),
            switch=f"s{rank // per_node}{dice.randint(0, 1)}" if switched and dice.random() < 0.8 else None,
        )
        for rank in range(ranks)
    )

    def link(most: float) -> Link:
        return Link(bandwidth_bytes_per_s=dice.uniform(2, most), latency_s=dice.random() / 10)

    names = {device.switch for device in devices if device.switch}
    links = {"within_node": replace(link(60), overhead_s=0.05), "between_nodes": link(20)}
    switches = {name: link(60) for name in sorted(names)}
    node_link = link(20) if dice.random() < 0.8 else None
    return Cluster(devices=devices, **links, groups={"g": link(80)}, switches=switches, node_link=node_link)


def treated(program: Program, dice: Random) -> Program:
    """A program with actions on residuals at random places."""
    rows = []
    for row in program.rows:
        made = list(row)
        backs = [a for a in row if a.kind in (B, I)]
        for back in backs:
            kinds = dice.choice(
                ((), ("RECOMPUTE",), ("OFFLOAD", "RELOAD"), ("OFFLOAD", "RELOAD", "RECOMPUTE"))
            )
            low = made.index(replace(back, kind=F)) + 1
            for kind in kinds:
                at = dice.randint(low, made.index(back))
                made.insert(at, replace(back, kind=Kind(kind)))
                low = at + 1
        rows.append(tuple(made))
    return replace(program, rows=tuple(rows))


def uneven(stages: int, dice: Random) -> tuple[StageCost, ...]:
    """Random times: no two events of different ranks come at the same time by chance."""
    computing = {"forward_s": 1, "backward_s": 2, "input_grad_s": 1, "weight_grad_s": 0, "step_s": 0}

    def cost() -> StageCost:
        times = {name: least + dice.random() for name, least in (computing | {"recompute_s": 0}).items()}
        times |= {name: 3 * dice.random() for name in ("offload_s", "reload_s")}
        away = {name: dice.randint(0, 50) for name in ("offloaded_bytes", "recomputed_bytes")}
        return StageCost(**times, **away, residual_bytes=100, carried_bytes=10)

    return tuple(cost() for _ in range(stages))


def treated_case(case: Case, dice: Random) -> tuple[Program, StageGraph, tuple[StageCost, ...]]:
    """A program that treats some residuals, where it trains, and sums the gradients of what is tied."""
    program = lower(case.schedule, case.stages)
    if program.columns.trains:
        program = treated(program, dice)
    size = {name: dice.randint(0, 60) for name in sorted(case.stages.tied)}
    costs = tuple(replace(cost, tied_bytes=size) for cost in uneven(len(case.stages.stages), dice))
    return program, case.stages, costs


def sum_beside_a_message() -> tuple[Program, StageGraph, tuple[StageCost, ...]]:
    """Ranks 0 and 2 sum 8 bytes while rank 1 sends its output to rank 3."""
    stages = dag(4, [(1, 3)], params={0: ("x",), 2: ("x",)}, loss_stage=3)
    rows = (
        "0F0 0B0 0REDUCE 0STEP",
        "1F0 1SEND_F0>3 1RECV_B0<3 1B0 1STEP",
        "2F0 2B0 2REDUCE 2STEP",
        "3RECV_F0<1 3F0 3B0 3SEND_B0>1 3STEP",
    )
    program = parse_program(1, (0, 1, 2, 3), rows)
    costs = tuple(replace(equal_costs(1)[0], forward_s=s, tied_bytes={"x": 8}) for s in (1.0, 4.0, 1.0, 1.0))
    return program, stages, costs

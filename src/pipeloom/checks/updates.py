"""A proof that a program updates weights as its rule says: a row is followed with what gradients are made of
instead of numbers.

    0B0 0B1 ... 0B7   the gradient of stage 0 for the update: micro-batches 0 to 7, once each
    0REDUCE           ... and that of the other ranks that read the same parameter, once each
    0STEP             one rank, or each that holds it, updates it; micro-batches use it from the version on
                      that the rule of `ir.weight_policies` says

What `checks.programs` says of a program holds already: all actions are there, once, and nothing blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ir.action import STEP, Action, F
from ..ir.columns import B_, F_, I_, RECOMPUTE_, REDUCE_, STEP_, W_, Ints, Rows
from ..ir.errors import ScheduleError
from ..ir.schedule import Program, Schedule
from ..ir.shared_weights import OptimizerShares, Reduction, for_owners, reductions
from ..ir.stages import StageGraph
from ..ir.text import show_microbatches
from ..ir.weight_policies import FLUSH, Updates
from .weight_versions import versions

Sums = Sequence[Sequence[Reduction]]
"""For each rank what its REDUCE adds up."""


@dataclass(frozen=True, kw_only=True)
class UpdateProof:
    """What was proved. microbatches: per update, of all replicas.  tied: parameters of several stages.
    shares: ranks that share out an optimizer's state; 1 where none do.  updates: how many were followed."""

    parameters: int
    microbatches: int
    replicas: int
    tied: int
    shares: int
    policy: str
    updates: int

    def __str__(self) -> str:
        """
        >>> print(UpdateProof(
        ...     parameters=9, microbatches=8, replicas=2, tied=0, shares=2, policy="flush", updates=1
        ... ))
        proved: 9 gradients are summed once each over 8 micro-batches, 2 replicas; 2 ranks share the updates
        """
        over = [show_microbatches(self.microbatches)]
        over += [f"{self.replicas} replicas"] * (self.replicas > 1)
        over += [f"the stages of {self.tied} tied parameter{'s' * (self.tied > 1)}"] * (self.tied > 0)
        said = f"proved: {self.parameters} gradients are summed once each over {', '.join(over)}"
        if self.shares > 1:
            said += f"; {self.shares} ranks share the updates"
        if self.policy != FLUSH:
            said += f"; {self.updates} updates in a row use the versions of {self.policy}"
        return said


def sums_of(stages: StageGraph, placement: Sequence[int], shares: Sequence[OptimizerShares] = ()) -> Sums:
    """What the runtime's ranks add up. shares: see `prove_updates`."""
    rows = reductions(stages, placement)
    return [[part for one in row for part in for_owners(one, shares)] for row in rows]


def prove_updates(
    program: Program,
    stages: StageGraph,
    *,
    updates: Updates | None = None,
    shares: Sequence[OptimizerShares] = (),
    trained: Iterable[str] | None = None,
) -> UpdateProof:
    """Prove it for a program that trains.

    stages: of all replicas.  updates: of a program with several.
    shares: of all ranks who updates which parameter; empty where each updates all that it holds.
    trained: parameters; by default all.
    Raises: ScheduleError with the parameter or the action, and the rank.
    """
    sums = sums_of(stages, program.placement, shares)
    known = None if trained is None else set(trained)
    readers: dict[str, list[int]] = {}
    for stage, names in enumerate(stages.params):
        for name in names:
            if known is None or name in known:
                readers.setdefault(name, []).append(stage)
    _micro_batches_once(program)
    _ranks_once(program, readers, sums)
    _updated_once(program, readers, sums, shares)
    if updates is not None:
        _versions_of_the_rule(program, updates)
    origins = [{stages.origin(stage) for stage in of} for of in readers.values()]
    return UpdateProof(
        parameters=len(readers),
        microbatches=(program.every or program.microbatches) * stages.replicas,
        replicas=stages.replicas,
        tied=sum(len(each) > 1 for each in origins),
        shares=max((len(share.ranks) for share in shares), default=1),
        policy=FLUSH if updates is None else updates.policy,
        updates=len(program.updates),
    )


def _micro_batches_once(program: Program) -> None:
    """Where the gradients of a rank are taken, by a REDUCE or else by a STEP, they are those of the
    micro-batches of that update."""
    columns, every = program.columns, program.every or program.microbatches
    for rank in range(columns.ranks):
        low, high = columns.offsets[rank : rank + 2].tolist()
        kind = columns.kind[low:high]
        taken = _taken(program, rank)
        # An entry adds to the update that has as many takings in front of it:
        #
        #     row    B0 B1 REDUCE0 B2 B3 REDUCE1 B4        taken   [2, 5]
        #     adds    0  1          3  4          6        found   0 0 1 1 2
        #
        adds = low + np.flatnonzero((kind == B_) | (kind == W_))
        wanted = columns.microbatch[adds] // every
        found = np.searchsorted(taken, adds)
        if len(wrong := np.flatnonzero(found != wanted)):
            at, entry = wrong[0], int(adds[wrong[0]])
            who = "none" if found[at] >= len(taken) else f"update {found[at]}"
            raise ScheduleError(
                f"rank {rank} adds the gradient of {columns.at(entry)} to {who}, and it belongs to update "
                f"{wanted[at]}",
                hint="put the REDUCE of an update, or its STEP where there is none, behind its last backward "
                "and in front of the first one of the next",
            )


def _taken(program: Program, rank: int) -> Ints:
    """The entries of a rank at which the gradients of its updates are taken, in the order of these."""
    columns = program.columns
    low, high = columns.offsets[rank : rank + 2].tolist()
    kind = columns.kind[low:high]
    taken: Ints = low + np.flatnonzero(kind == REDUCE_)
    steps = _steps(program, rank)
    taken = taken if len(taken) else steps
    for entries in (taken, steps):
        numbers = columns.microbatch[entries]
        if len(early := np.flatnonzero(np.diff(numbers) < 0)):
            first, second = (columns.at(int(entries[early[0] + n])) for n in (0, 1))
            raise ScheduleError(
                f"rank {rank} runs {first} in front of {second}", hint="make updates one after the other"
            )
    return taken


def _steps(program: Program, rank: int) -> Ints:
    """A rank's optimizer steps all its stages, at the STEP of the last one."""
    columns = program.columns
    low, high = columns.offsets[rank : rank + 2].tolist()
    last = max(stage for stage, home in enumerate(program.placement) if home == rank)
    steps: Ints = low + np.flatnonzero((columns.kind[low:high] == STEP_) & (columns.stage[low:high] == last))
    return steps


def _ranks_once(program: Program, readers: Mapping[str, Sequence[int]], sums: Sums) -> None:
    """Each rank that holds a parameter adds to its gradient that of each other one, once."""
    placement, columns = program.placement, program.columns
    parts = [_by_name(row) for row in sums]
    reduces = set(map(columns.rank_of, np.flatnonzero(columns.kind == REDUCE_).tolist()))
    for name, of in readers.items():
        holders = tuple(sorted({placement[stage] for stage in of}))
        for rank in holders:
            others = [rank] if rank in reduces else []
            for part in parts[rank].get(name, ()) if others else ():
                odd = next((r for r in part.ranks if part not in parts[r].get(name, ())), None)
                if odd is not None:
                    raise ScheduleError(
                        f"rank {rank} adds up the gradient of {name} with rank {odd}, which does not",
                        hint="let both ranks have the same sum",
                    )
                others += [r for r in part.ranks if r != rank]
            counted = sorted(others or [rank])
            if tuple(counted) == holders:
                continue
            lacking = next((r for r in holders if r not in counted), None)
            if lacking is not None:
                raise ScheduleError(
                    f"the gradient of {name} on rank {rank} lacks that of rank {lacking}",
                    hint=f"let the REDUCE of rank {rank} add it",
                )
            extra = next(r for r in counted if r not in holders or counted.count(r) > 1)
            how = "twice" if extra in holders else "and it has no such parameter"
            raise ScheduleError(
                f"the gradient of {name} on rank {rank} has that of rank {extra}, {how}",
                hint="leave out one sum",
            )


def _by_name(row: Sequence[Reduction]) -> dict[str, list[Reduction]]:
    parts: dict[str, list[Reduction]] = {}
    for part in row:
        for name in part.names:
            parts.setdefault(name, []).append(part)
    return parts


def _updated_once(
    program: Program,
    readers: Mapping[str, Sequence[int]],
    sums: Sums,
    shares: Sequence[OptimizerShares],
) -> None:
    """Of ranks that share out an optimizer's state one updates a parameter, and has its whole gradient."""
    parts = [_by_name(row) for row in sums]
    for name, of in readers.items():
        for rank in sorted({program.placement[stage] for stage in of}):
            group = shares[rank].ranks if shares else (rank,)
            claims = [r for r in group if not shares or name in shares[r].of(r)]
            if len(claims) != 1 or (shares and {shares[r].owner[name] for r in group} != set(claims)):
                who = " and ".join(f"rank {r}" for r in claims) or "no rank"
                raise ScheduleError(
                    f"{name} is updated by {who} of ranks {', '.join(map(str, group))}, which share it out",
                    hint="name one owner, the same on all of them",
                )
            for part in parts[rank].get(name, ()):
                if part.owner not in (None, claims[0]):
                    raise ScheduleError(
                        f"rank {claims[0]} updates {name}, but the sum of its gradient goes to rank "
                        f"{part.owner}",
                        hint=f"let it go to rank {claims[0]}",
                    )


def _versions_of_the_rule(program: Program, updates: Updates) -> None:
    """Where STEPs stand, each micro-batch finds the version that the rule says, from its forward to its last
    backward."""
    columns = program.columns
    computing = Schedule(
        name="program",
        microbatches=program.microbatches,
        placement=program.placement,
        rows=Rows(columns.where(columns.is_compute)),
    )
    by_stage = {each.stage: each for each in versions(computing, updates)}
    uses = columns.among((F_, B_, I_, W_, RECOMPUTE_))
    for rank in range(columns.ranks):
        steps = _steps(program, rank)
        kept = max(each.needed for each in by_stage.values() if each.rank == rank)
        low, high = columns.offsets[rank : rank + 2].tolist()
        entries = low + np.flatnonzero(uses[low:high])
        for entry, newest in zip(entries.tolist(), np.searchsorted(steps, entries).tolist(), strict=True):
            action = columns.at(entry)
            rule = by_stage[action.stage].used[action.microbatch]
            version = rule
            if columns.kind[entry] == F_:
                version = updates.rule.version(action.microbatch, updates.every, newest)
            if version != rule or not newest - kept < version <= newest:
                raise _wrong_version(rank, action, rule, newest, kept, updates)


def _wrong_version(
    rank: int, action: Action, rule: int, newest: int, kept: int, updates: Updates
) -> ScheduleError:
    late = newest < rule
    what = "is to use" if action.kind == F else "is to use, as its forward did,"
    found = f"the newest is {newest}" if late else f"the newest is {newest}, and {kept} are kept"
    step = replace(action, kind=STEP, microbatch=rule - 1 if late else rule + kept - 1)
    return ScheduleError(
        f"by {updates.policy} {action} on rank {rank} {what} weight version {rule}, but {found} there",
        hint=f"put the STEP of update {step.microbatch} {'in front of' if late else 'behind'} {action}",
    )

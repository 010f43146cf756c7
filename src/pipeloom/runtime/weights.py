"""A rank's parameters, buffers, gradients and optimizer, and the versions of its parameters.

Gradients are added into buffers that live as long as the parameters do, as soon as a backward makes them:
no second copy of a stage's gradients ever exists, unless updates wait for sums while the next step runs.

Where a policy keeps versions (`ir.weight_policies`), they are chosen by reference. Torch's optimizers work in
place, so an update copies the newest parameters once, into the buffers of a version that nobody needs:

    before   newest = A   previous = B           B's micro-batches are all through
    copy     B <- A       the parameters' data is now B
    step     B is updated in place
    after    newest = B   previous = A           no byte is copied when actions change versions

An update that is corrected for its delay begins with B <- a mean of B and A, and ends beyond what the
optimizer makes of it (`ir.weight_policies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ..ir.graph import PartRows, UpdateBytes, step_bytes
from ..ir.shared_weights import OptimizerShares
from ..ir.weight_policies import Updates
from ..tracer.stage.functions import Sink
from ..tracer.tensors import storage_bytes, tensors_of
from .optimizers import (
    NO_ROWS,
    MakeOptimizer,
    default_optimizer,
    forget_stand_ins,
    make_checked,
    optimizers_of,
    refuse_coupled,
    refuse_kept_beside,
    stand_in,
    update_bytes,
)


class Gradients(Sink):
    """Sums of gradients by FQN. The first of a step overwrites what was there.

    together: names whose sums lie in one piece per dtype, in `flat` by those names: these are what is summed
    over some ranks, for all of them or for one.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], together: Sequence[tuple[str, ...]] = ()) -> None:
        trained = {name: p for name, p in params.items() if p.requires_grad}
        self.flat: dict[tuple[str, ...], tuple[Tensor, ...]] = {}
        views: dict[str, Tensor] = {}
        for names in together:
            own = {name: trained[name] for name in names if name in trained}
            kinds = sorted({p.dtype for p in own.values()}, key=str)
            pieces = [lay_together({n: p for n, p in own.items() if p.dtype == kind}) for kind in kinds]
            self.flat[names] = tuple(flat for flat, _ in pieces)
            views |= {name: view for _, inside in pieces for name, view in inside.items()}
        self.sums: dict[str, Tensor] = {
            name: views[name] if name in views else torch.zeros_like(p, memory_format=torch.preserve_format)
            for name, p in trained.items()
        }
        self.touched: set[str] = set()

    def add(self, name: str, grad: Tensor) -> None:
        # The first one overwrites, so that nobody has to write zeros: a step's sums go by emptying `touched`.
        if name in self.touched:
            self.sums[name].add_(grad)
        else:
            self.sums[name].copy_(grad)
            self.touched.add(name)

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        if self.sums[name].dtype != left.dtype:
            self.add(name, left @ right)
        elif name in self.touched:
            self.sums[name].addmm_(left, right)
        else:
            torch.mm(left, right, out=self.sums[name])
            self.touched.add(name)

    def total(self, name: str) -> Tensor:
        """The sum, zero if nothing was added."""
        if name not in self.touched:
            self.sums[name].zero_()
            self.touched.add(name)
        return self.sums[name]

    def forget(self, names: Iterable[str]) -> None:
        """Some sums are of no use any more."""
        self.touched.difference_update(names)

    def clear(self) -> None:
        self.touched.clear()


class Weights:
    """What the stages of one rank own.

    keep_gradients: copy each step's gradients to `last_gradients`, before they are clipped; of those that are
        summed for one owner only, the owner's.
    device: of the rank, which may own nothing.
    updates: which versions of the parameters micro-batches use; None for the newest.
    awaited: an update's gradients wait for sums over ranks while the next ones are added up.
    together: see `Gradients`.
    shares: of all ranks: who steps which parameter; empty where each steps all that it has.
    everywhere: all that the model trains, in its order, without data; by default what this rank has. The
        optimizer is made for all of these, so that it groups them as in one process, and keeps what it steps.
    rows: of those that are parts of a parameter.
    optimizers: those that hold the state of `optimizer`, which may be several in one.
    computed_in: dtypes of parameters that actions get copies of in these, and not as they are kept: in a
        higher precision, in which gradients are summed and stepped (master weights).
    copied_bytes: by updates, to make new versions.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        optimizer: MakeOptimizer | None,
        *,
        keep_gradients: bool = False,
        device: torch.device | str = "cpu",
        updates: Updates | None = None,
        awaited: bool = False,
        together: Sequence[tuple[str, ...]] = (),
        shares: Sequence[OptimizerShares] = (),
        rank: int = 0,
        everywhere: Mapping[str, nn.Parameter] | None = None,
        computed_in: Mapping[str, torch.dtype] | None = None,
        rows: Mapping[str, PartRows] = NO_ROWS,
    ) -> None:
        self.params = dict(params)
        self.buffers = dict(buffers)
        self.updates = updates
        self.newest = 0
        self.copied_bytes = 0
        self.grads = Gradients(self.params, together)
        self.summed = Gradients(self.params, together) if awaited else self.grads
        self.shares = shares
        own = shares[rank].of(rank) if shares else self.params.keys()
        self.stepped = frozenset(n for n, p in self.params.items() if p.requires_grad and n in own)
        trained = {n: p for n, p in (everywhere or self.params).items() if p.requires_grad}
        self._stand_ins = {n: stand_in(p.shape, self.params.get(n, p).dtype) for n, p in trained.items()}
        self._make_optimizer = optimizer or default_optimizer(torch.device(device).type != "cpu")
        here = {n: self.params[n] if n in self.stepped else p for n, p in self._stand_ins.items()}
        self.rows = rows
        self.keep_gradients = keep_gradients
        self.device = device
        if 0 < len(self.stepped) < len(trained):
            refuse_coupled(self._make_optimizer, self._stand_ins, self.stepped, rows)
        _ = self.update_bytes  # which makes some, too: a script may hold the last one, as for a scheduler
        self.optimizer = make_checked(self._make_optimizer, here, rows) if here else None
        self.optimizers = () if self.optimizer is None else optimizers_of(self.optimizer)
        if self.optimizer is not None:
            refuse_kept_beside(self.optimizer)
        for each in self.optimizers:
            forget_stand_ins(each)
        self.last_gradients: dict[str, Tensor] = {}
        self.casts = {n: self.params[n].data.to(dtype) for n, dtype in (computed_in or {}).items()}
        self._versions: dict[int, dict[str, Tensor]] = {0: {**self.params, **self.buffers, **self.casts}}
        self._users: Counter[int] = Counter()
        self._spare: list[dict[str, Tensor]] = []
        if updates is not None and updates.limit is not None:
            self._spare = [self._empty_version() for _ in range(updates.limit - 1)]

    @property
    def copies(self) -> int:
        """Versions of the trained parameters that there is room for."""
        return (self.updates.limit or 1) if self.updates is not None else 1

    @property
    def gradient_sets(self) -> int:
        return 1 if self.summed is self.grads else 2

    @property
    def next_number(self) -> int:
        """The number of the first micro-batch that uses the newest version, by policies that count them."""
        return 0 if self.updates is None else (self.newest + 1) * self.updates.every

    def use_version(self, microbatch: int) -> int:
        """The version for a micro-batch, numbered from the start of training, whose first forward begins; it
        is kept until `release_version`."""
        version = self.newest
        if self.updates is not None:
            version = self.updates.version(microbatch, self.newest)
            assert version in self._versions, f"version {version} of {sorted(self._versions)}"
            self._users[version] += 1
        return version

    def release_version(self, version: int) -> None:
        """The micro-batch's last backward on a stage is over."""
        if self.updates is not None:
            self._users[version] -= 1

    def state(self, version: int) -> Mapping[str, Tensor]:
        """Parameters and buffers by FQN, for an action that uses a version. Buffers have only one."""
        return self._versions[version]

    @property
    def newest_state(self) -> Mapping[str, Tensor]:
        return self._versions[self.newest]

    @property
    def previous(self) -> dict[str, Tensor]:
        """The trained parameters of the version before the newest, by FQN; empty where there is none."""
        state = self._versions.get(self.newest - 1, {})
        return {name: tensor for name, tensor in state.items() if name in self.grads.sums}

    def restart_versions(self, newest: int, previous: Mapping[str, Tensor]) -> None:
        """Begin with version `newest`, as after loading; before it stands `previous`, or a copy of it.

        newest: as many as there were updates. Nothing may be in flight.
        """
        state, spare = self._versions.pop(self.newest), self._spare
        spare += [self._trained(version) for version in self._versions.values()]
        self._versions, self.newest, self._users = {newest: state}, newest, Counter()
        if self.updates is None or newest < 1 or self.updates.limit == 1:
            return
        before = spare.pop() if spare else self._empty_version()
        for name, tensor in before.items():
            tensor.copy_(previous.get(name, self.params[name].data))
        self._versions[newest - 1] = {**state, **before}

    def replace_buffer(self, name: str, value: Tensor) -> None:
        """A forward made the next state of a buffer."""
        self.buffers[name] = value
        for state in self._versions.values():
            state[name] = value

    def begin_sums(self) -> Gradients:
        """The gradients of an update are complete: later ones are added up elsewhere until `step`."""
        assert not self.summed.touched, "the update before this one has not been made"
        self.grads, self.summed = self.summed, self.grads
        return self.summed

    def norm_squares(self, names: Iterable[str]) -> Tensor:
        """Sum of squares of some gradients, in float64 (float32 where there is no float64)."""
        summed = self.summed
        sums = [summed.sums[n] for n in names if n in summed.touched]
        if sums:
            return torch.stack(torch._foreach_norm(sums)).double().square().sum()
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def note_gradients(self) -> None:
        """Copy the gradients of an update, before they are clipped, if they are to be kept."""
        if self.keep_gradients:
            summed = self.summed
            self.last_gradients = {n: summed.sums[n].clone() for n in sorted(summed.touched)}

    def scale_gradients(self, factor: Tensor) -> None:
        """Each gradient times a factor, in at least float32, rounded once.

        factor: one number on the device, which the host does not wait for.
        """
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        alike: dict[torch.dtype, list[Tensor]] = {}
        for name in self.summed.touched:
            alike.setdefault(self.summed.sums[name].dtype, []).append(self.summed.sums[name])
        for kind, sums in alike.items():
            exactly = factor.reshape(()).to(torch.promote_types(kind, torch.float32))
            if kind == exactly.dtype or factor.device.type == "cpu":
                torch._foreach_mul_(sums, exactly)
                continue
            # Accelerators round a tensor without dimensions to the other's dtype; CPUs do not, and would make
            # a copy in float32 of what is multiplied by one with dimensions.
            for each in sums:
                each.mul_(exactly.expand(each.shape))

    def step(self) -> None:
        """Apply the optimizer to the gradients of an update, then forget them."""
        summed = self.summed
        before = {} if self.updates is None else self._begin_version(self.updates)
        if self.optimizer is not None:
            for name, param in self.params.items():
                param.grad = summed.sums[name] if name in summed.touched else None
            self.optimizer.step()
        if self.updates is not None:  # V + c (V - W(b)): beyond V, away from W(b)
            for name, tensor in before.items():
                self.params[name].data.lerp_(tensor, -self.updates.correction)
        for param in self.params.values():
            param.grad = None
        summed.clear()

    def cast_parameters(self) -> None:
        """Parameters have changed: so do the copies that actions get."""
        for name, cast in self.casts.items():
            cast.copy_(self.params[name].data)

    def _begin_version(self, updates: Updates) -> dict[str, Tensor]:
        """Copy the newest parameters, so that the optimizer can update the copy in place. Where only one
        version is kept, nobody uses it now, and it is updated itself.

        Returns: what the update is to be extrapolated from, if it is corrected for its delay.
        """
        limit = updates.limit
        if limit == 1:
            assert not self._users[self.newest], f"version {self.newest} is in use"
            self._versions[self.newest + 1] = self._versions.pop(self.newest)
            self.newest += 1
            return {}
        previous = self.previous if updates.correction and self.newest >= updates.flushed else {}
        for version in sorted(self._versions):
            # With version newest + 1, which this update makes, `limit` are kept; others while someone uses
            # them.
            kept = version == self.newest or (limit is not None and version > self.newest + 1 - limit)
            if not kept and not self._users[version]:
                self._spare.append(self._trained(self._versions.pop(version)))
        copy = self._spare.pop() if self._spare else self._empty_version()
        before = self._versions[self.newest]
        old = {}
        for name, tensor in copy.items():
            param = self.params[name]
            # Y = (W(b) + c W(b - 1)) / (1 + c), see `ir.weight_policies`. Of two versions W(b - 1) lies in
            # the very buffer that takes Y, which does no harm as each entry is read before it is written.
            if previous:
                torch.lerp(previous[name], param.data, 1 / (1 + updates.correction), out=tensor)
            else:
                tensor.copy_(param.data)
            self.copied_bytes += tensor.nbytes
            old[name], param.data = param.data, tensor
        self._versions[self.newest] = {**before, **old}
        self.newest += 1
        self._versions[self.newest] = before
        return old if previous else {}

    def _empty_version(self) -> dict[str, Tensor]:
        return {
            name: torch.empty_like(self.params[name].data, memory_format=torch.preserve_format)
            for name in self.grads.sums
        }

    def _trained(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] for name in self.grads.sums}

    @cached_property
    def update_bytes(self) -> Mapping[str, UpdateBytes]:
        """What the optimizer takes for each parameter that this rank steps."""
        if not self.stepped:
            return {}
        accelerated = torch.device(self.device).type != "cpu"
        known = update_bytes(self._make_optimizer, self._stand_ins, accelerated, self.rows)
        return {name: known[name] for name in self.stepped}

    @cached_property
    def step_bytes(self) -> int:
        """Scratch of `step`."""
        return step_bytes(self.update_bytes.values())

    @property
    def step_adds_bytes(self) -> int:
        """What `step` takes beyond what there is: its scratch, and state of parameters that have none yet and
        will be updated."""
        has_state = {id(param) for optimizer in self.optimizers for param in optimizer.state}
        updated = {name: self.update_bytes[name] for name in self.summed.touched & self.stepped}
        new = [update.state for name, update in updated.items() if id(self.params[name]) not in has_state]
        return self.step_bytes + sum(new)

    def discard_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None
        self.grads.clear()
        self.summed.clear()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by kind."""
        kept = [t for state in self._versions.values() for n, t in state.items() if n in self.params]
        kept += [tensor for version in self._spare for tensor in version.values()]
        kept += [self.params[name].data for name in self.casts]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return {
            "parameters": storage_bytes(kept),
            "gradients": storage_bytes([*self.grads.sums.values(), *self.summed.sums.values()]),
            "buffers": storage_bytes(self.buffers.values()),
            "optimizer": storage_bytes(tensors_of(states)),
        }


def lay_together(params: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Zeros like some tensors of one dtype, in one piece, and the part of each, which lies as that does.

    The largest come first, so that those of odd sizes do not spoil how others are aligned.
    """
    first = next(iter(params.values()))
    flat = torch.zeros(sum(p.numel() for p in params.values()), dtype=first.dtype, device=first.device)
    parts, at = {}, 0
    for name in sorted(params, key=lambda name: (-params[name].numel(), name)):
        like = torch.empty_like(params[name], device="meta", memory_format=torch.preserve_format)
        parts[name] = flat.as_strided(like.shape, like.stride(), at)
        at += like.numel()
    return flat, parts


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Factor for all gradients so that their global norm is at most `limit`.

    The same rule as `torch.nn.utils.clip_grad_norm_`: where the norm is not a number, no gradient is one.

    >>> float(clip_factor(torch.tensor(0.5), 1.0)), float(clip_factor(torch.tensor(torch.inf), 1.0))
    (1.0, 0.0)
    """
    # Not `limit / ...`: torch multiplies by the reciprocal then, which is rounded twice.
    return torch.clamp(torch.full_like(norm, limit) / (norm + 1e-6), max=1.0)

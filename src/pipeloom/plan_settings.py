"""The settings of a plan, once: Python keywords, options of commands, and the table [pipeline] of a config
file are made from the fields of `PlanSettings`, and their descriptions are the only help text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from .clusters.names import find_cluster
from .ir.cluster import MOST_DEVICES, Cluster
from .ir.errors import ConfigError, did_you_mean, shown
from .ir.memory_policy import TREATMENTS, Treatment
from .ir.text import parse_bytes
from .ir.weight_policies import WEIGHT_POLICIES

DEFAULT_SCHEDULE = "1f1b"
"""The schedule unless another one is named or chosen."""

RANKS = 2
"""Of a pipeline on this machine, unless it is said."""

SHAPE = "ranks", "replicas"
"""Settings that follow from others where they are not given."""

TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: ((str, PathLike), "a text"),
    tuple: (Sequence, "a tuple"),
    Callable: (Callable, "a function"),
}
"""By type of a setting: what is taken for it, and what messages call that. Any other is taken as it is."""

LARGEST = 2**63 - 1
"""Whole number of a setting that has no limit of its own, as tensors count."""

LONGEST_WAIT_S = 1e7
"""About four months: more, or infinity, clocks and sockets do not take."""

ROWS_OR_COUNT = "leave out one: the rows of a step say how many micro-batches it has"
"""For a step's rows given beside a number of micro-batches."""


def setting(default: Any, help: str, **more: Any) -> Any:
    """more: `short`, its one-letter option; `least` and `most`, of a whole number; `below`, it is from 0
    to less; `words`, a text is one of them; `kind` of a path, "folder" or "file"."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a plan is made for, and what it may do.

    In Python memory may also be a number of bytes, cluster a `Cluster`, and treatments a tuple, as
    ("recompute",).

    Raises: ConfigError for a value that cannot be, and for settings that contradict each other.

    >>> import pipeloom
    >>> four = pipeloom.PlanSettings(ranks=4, memory="16GiB")
    >>> four.changed(treatments="both").allowed
    ('recompute', 'offload')
    """

    ranks: int = setting(
        None,
        "Ranks of a pipeline; by default the devices of a cluster, or 2 without one, shared among replicas. "
        "A schedule puts one stage on each, or several: see --chunks.",
        short="-p",
        least=1,
        most=MOST_DEVICES,
    )
    replicas: int = setting(
        None,
        "Pipelines side by side: replicas of every stage, each on a rank of its own. By default 1; but where "
        "--ranks is not given either, planner auto shares out the ranks as makes the step fastest.",
        least=1,
    )
    schedule: str | None = setting(
        None,
        "Schedule, by name as `pipeloom schedule list` has it, or file.py:function of your own. By default "
        f"the choice of a planner that has one, as auto; {DEFAULT_SCHEDULE} with others.",
        short="-s",
    )
    chunks: int | None = setting(
        None, "Stages per rank, for schedules that want several; 2 by default.", short="-v", least=1
    )
    microbatches: int = setting(8, "Micro-batches per step, of all replicas together.", short="-m", least=1)
    microbatch_size: int = setting(4, "Rows per micro-batch.", least=1)
    global_batch: int | None = setting(
        None, "Rows per step, which then say how many micro-batches there are.", least=1
    )
    lengths: str | None = setting(
        None,
        "Histogram of the batches' sequence lengths, as 128:0.5,512:0.3,1024:0.2: the plan is made for the "
        "mean of their steps, and for memory that the longest fits into. Each length is captured and timed.",
    )
    split_backward: bool = setting(False, "Split each backward into input and weight gradients.")
    weights: str | None = setting(
        None,
        "How weights are updated: flush, once a step is over; 2bw or stash, without draining the pipeline. "
        "By default as the schedule does it.",
        words=WEIGHT_POLICIES,
    )
    delay_correction: float = setting(
        0.0,
        "Without a flush: share of its change since the update before that each update is extrapolated by, "
        "against the delay; 0 to below 1.",
        below=1,
    )
    warm_up_with_flush: int = setting(
        0, "Without a flush: steps from the start of training that still drain the pipeline.", least=0
    )
    clips: bool = setting(
        False, "Training will clip gradients by their global norm, which matters without a flush."
    )
    master_weights: bool = setting(
        False, "Keep float32 copies of parameters of lower precision; sums and updates are made in them."
    )
    shard_optimizer: bool = setting(False, "Replicas share out the optimizer's state, as ZeRO-1 does.")
    planner: str = setting("auto", "Planner, by name; see `pipeloom plan --planners`.")
    time_limit: int | None = setting(
        None, "Seconds after which planner auto takes the best plan so far; Ctrl-C does so, too.", least=1
    )
    granularity: str = setting(
        "op",
        "Where stages may begin: at any op; or at a whole module (a layer, an embedding, the head), as other "
        "engines need it: see `pipeloom export-plan`.",
        words=("op", "module"),
    )
    branches: bool = setting(
        True, "Stages that read nothing of each other may run side by side; if not, all are a chain."
    )
    split_words: str | int = setting(
        "auto",
        "Parts into which the words of the head (and of an embedding tied to it) are cut, so that ranks can "
        "share them: a number; off; or auto: as many as make the step fastest.",
    )
    memory: str | int | None = setting(None, "Cap per rank, as 300MiB: what does not fit is refused.")
    treatments: str | tuple[Treatment, ...] | None = setting(
        None,
        "What may be done with residuals besides keeping them. By default what the planner does, and both "
        "with --offload-dir.",
        words=TREATMENTS,
    )
    offload_dir: str | None = setting(
        None,
        "Folder on a disk where this machine's CPU may offload residuals to. Its speed is measured.",
        kind="folder",
    )
    cluster: Cluster | str | None = setting(
        None,
        "Devices whose times are estimated by roofline, instead of measured here: '8 x a100-40', '2 nodes of "
        "8 x h100', or a cluster file; see `pipeloom cluster`.",
    )
    compile: bool = setting(
        False,
        "Stages are passed to torch.compile. To plan with the times that they then take, layers are compiled "
        "and timed, which takes a minute or so once a day.",
    )

    def __post_init__(self) -> None:
        for one in fields(PlanSettings):
            _refuse_value(one.name, getattr(self, one.name), **one.metadata)
        refuse_types(self, PlanSettings)
        unsaid = {name: None for name in SHAPE if getattr(self, name) is None}
        vars(self)["_unsaid"] = unsaid  # so that another cluster brings its own
        if "replicas" in unsaid:
            vars(self)["replicas"] = 1
        if "ranks" in unsaid:
            cluster = self.described
            vars(self)["ranks"] = RANKS if cluster is None else max(1, len(cluster.devices) // self.replicas)
        if self.devices > MOST_DEVICES:
            raise ConfigError(
                f"{shown(self.replicas)} replicas of {self.ranks} ranks",
                hint=f"use at most {MOST_DEVICES} ranks in all",
            )
        if self.memory is not None:
            parse_bytes(self.memory, what="memory")
        _ = self.histogram
        if self.word_parts is not None and not 1 <= self.word_parts <= MOST_DEVICES:
            raise ConfigError(
                f"split_words is {shown(self.split_words)}",
                hint=f"use auto, off or 1 to {MOST_DEVICES} parts",
            )
        for word in self.allowed or ():
            _refuse_value("treatments", word, words=get_args(Treatment))
        if self.offload_dir is not None and self.allowed is not None and "offload" not in self.allowed:
            raise ConfigError(
                f"treatments are {shown(self.treatments)}, and {self.offload_dir} is to be offloaded to",
                hint="leave out --offload-dir, or let residuals be offloaded: --treatments offload, or both",
            )
        if self.cluster is not None and self.offload_dir is not None:
            raise ConfigError(
                f"a cluster was given, and {self.offload_dir} to offload to on this machine",
                hint="leave out one: clusters say how fast their devices offload, and `pipeloom cluster "
                "detect --directory` describes this machine with a directory",
            )

    def changed(self, **changes: Any) -> Self:
        """The same with other values of some fields.

        changes: field -> value.
        Raises: ConfigError, also if there is no such field.
        """
        known = [one.name for one in fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"there is no setting {name} of a plan",
                    hint=did_you_mean(name, known, f"there are {', '.join(known)}"),
                )
        return replace(self, **self.unsaid | changes)

    @property
    def unsaid(self) -> dict[str, None]:
        """Those of `SHAPE` that were not given. `changed` keeps them open, `dataclasses.replace` does not."""
        unsaid: dict[str, None] = vars(self)["_unsaid"]
        return unsaid

    @property
    def described(self) -> Cluster | None:
        """The cluster, also if it is named; None for processes of this machine."""
        if self.cluster is None or isinstance(self.cluster, Cluster):
            return self.cluster
        return find_cluster(str(self.cluster))

    @property
    def named_schedule(self) -> str:
        """The schedule of a planner that does not choose one."""
        return self.schedule or DEFAULT_SCHEDULE

    @property
    def sharing(self) -> int:
        """Replicas that share out the optimizer's state."""
        return self.replicas if self.shard_optimizer else 1

    @property
    def devices(self) -> int:
        """Ranks of all replicas together."""
        return self.ranks * self.replicas

    @property
    def rows(self) -> int:
        """Rows that the schedule runs once."""
        return self.microbatches * self.microbatch_size if self.global_batch is None else self.global_batch

    @property
    def histogram(self) -> dict[int, float]:
        """Shares of the steps by sequence length, ascending; empty if all batches are of one.

        Raises: ConfigError if `lengths` cannot be read.

        >>> PlanSettings(lengths="512:1, 128:3").histogram
        {128: 0.75, 512: 0.25}
        """
        shares: dict[int, float] = {}
        for entry in self.lengths.split(",") if self.lengths is not None else ():
            length, colon, share = entry.partition(":")
            with suppress(ValueError):
                if colon and (at := int(length)) > 0 and at not in shares and 0 < float(share) < 1e300:
                    shares[at] = float(share)
                    continue
            raise ConfigError(
                f"lengths has {shown(entry.strip())}",
                hint="give each length once, with its share of the batches: 128:0.5,512:0.3,1024:0.2",
            )
        return {length: shares[length] / sum(shares.values()) for length in sorted(shares)}

    @property
    def word_parts(self) -> int | None:
        """In how many parts words are cut, 1 for none; None if the planner chooses; 0 if it is nonsense."""
        text = str(self.split_words)
        return {"auto": None, "off": 1}.get(text, int(text) if text.isdecimal() else 0)

    @property
    def allowed(self) -> tuple[Treatment, ...] | None:
        """What may be done with residuals; None: what the planner does by itself."""
        if isinstance(self.treatments, str):
            return TREATMENTS[self.treatments]
        return None if self.treatments is None else tuple(self.treatments)


PlanSettings.__doc__ = f"{PlanSettings.__doc__}\n" + "\n".join(
    f"    {one.name}: {one.metadata['help']}" for one in fields(PlanSettings)
)


def refuse_types(settings: object, kind: type) -> None:
    """Raises: ConfigError if a field of a dataclass of this kind has a value of another type."""
    for name, types in _types(kind).items():
        value, known = getattr(settings, name), [TYPES.get(one, (one, "")) for one in types]
        if not any(isinstance(value, taken) for taken, _ in known):
            words = " or ".join(word for _, word in known if word)
            raise ConfigError(f"{name} is {shown(value)}", hint=f"give {words}")


@cache
def _types(kind: type) -> dict[str, list[Any]]:
    """By field of a dataclass; None goes where it is the default."""
    types, hints = {}, get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        union = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types[one.name] = [get_origin(each) or each for each in union]
        if one.default is None:
            types[one.name].append(NoneType)
    return types


def _refuse_value(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    below: int | None = None,
    words: Collection[str] = (),
    **_: Any,
) -> None:
    if value is None:
        return
    if least is not None and (not isinstance(value, int) or value < least or value > (most or LARGEST)):
        upper = "" if most is None else f" to {most}"
        raise ConfigError(f"{name} is {shown(value)}", hint=f"use a whole number from {least}{upper}")
    if below is not None and not (isinstance(value, int | float) and 0 <= value < below):
        raise ConfigError(f"{name} is {shown(value)}", hint=f"use a number from 0 to below {below}")
    if words and isinstance(value, str) and value not in words:
        raise ConfigError(
            f"{name} is {shown(value)}",
            hint=did_you_mean(value, words, f"use one of {', '.join(words)}"),
        )

"""The settings of `pipeloom train`: frozen dataclasses with defaults, read from TOML, written as TOML.

    name = "gpt"
    [model]
    width = 256
    [pipeline]
    ranks = 4

Every key may also be given as `--set model.width=256`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta

from ..ir.errors import ConfigError, shown
from ..ir.text import dotted, parse_toml, shortened
from ..plan_settings import LARGEST, LONGEST_WAIT_S, ROWS_OR_COUNT, PlanSettings, setting

Whole: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]

OPTIMIZERS = ("adamw", "muon+adamw")

WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
"""What messages call the types of values."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """context: bytes it sees at once.  tied: one matrix embeds and predicts."""

    layers: Count = 4
    width: Count = 128
    heads: Count = 4
    context: Count = 128
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        if self.heads > 0 and self.width % self.heads:
            raise ConfigError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}",
                hint="all heads have the same width",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """paths: files, or folders whose files are all taken; empty for Python's standard library.
    validation_share: share of the files (of each file, if there are too few) kept for validation."""

    paths: tuple[str, ...] = ()
    validation_share: Annotated[float, Meta(gt=0, lt=1)] = 0.05


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for the matrices of layers beside it, with a linear warm-up and a cosine decay.

    name: see `train.muon`. A file may say only this: `optimizer = "muon+adamw"` in the place of the table.
    final_rate_share: share of `learning_rate` that it falls to by the end, after the last step.
    clip_norm: largest global norm of the gradients; 0 does not clip.
    A job that brings its own optimizer uses only the schedule and clip_norm of these.
    """

    name: str = "adamw"
    learning_rate: Positive = 4e-3
    weight_decay: NotNegative = 0.05
    warmup_steps: Whole = 60
    final_rate_share: NotNegative = 0.05
    clip_norm: NotNegative = 1.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optimizer.name is {shown(self.name)}", hint=f"use {' or '.join(OPTIMIZERS)}")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PlanSettings):
    """How the model is spread: the settings of a plan, and those of the ranks that run it."""

    device: str = setting(
        "auto",
        "What ranks compute on: cpu, cuda, or auto, an accelerator of any type if PyTorch has one here, else "
        "the CPU. One GPU by its number, as cuda:1, is for a single rank, or for ranks that each see one.",
    )
    autocast: str | None = setting(None, "Mixed precision, in this dtype: bfloat16.")
    tf32: bool = setting(False, "GPUs multiply float32 matrices in TF32: faster, with 10 bits of mantissa.")
    plan: str | None = setting(
        None, "Follow this plan file instead of planning: what it says is not planned anew.", kind="file"
    )
    timeout_s: Annotated[float, Meta(gt=0, le=LONGEST_WAIT_S)] = setting(
        300.0, "Limit of each wait for other ranks, in seconds."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(
                f"pipeline.device is {shown(self.device)}", hint="use auto, cpu, cuda, or one GPU, as cuda:0"
            )
        if self.autocast not in (None, "bfloat16"):
            raise ConfigError(
                f"pipeline.autocast is {shown(self.autocast)}",
                hint='use "bfloat16", or leave it out; float16 would need the loss to be scaled, see '
                "docs/training.md",
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """name: of the run directory, runs/<name>-<n>; by default the job's name.
    job: "file.py:function" or "package.module:function" returning a `pipeloom.Job`; unset for the built-in
        GPT (then `model` and `data` are used).
    checkpoint_every: steps between checkpoints; one is always written at the end.
    compare: before the first step of a model that was not trained here before, compare two micro-batches with
        plain PyTorch; the run is refused if they differ.
    replan: after every so many steps look whether the ranks are as fast as planned, and go on with another
        plan if that gains more than it costs; 0 for never.
    """

    name: Annotated[str, Meta(pattern=r"^[^/\0]+$")] = "gpt"
    job: str | None = None
    seed: Annotated[int, Meta(ge=-LARGEST, le=LARGEST)] = 0
    steps: Count = 400
    validate_every: Count = 100
    validation_batches: Count = 4
    checkpoint_every: Count = 100
    keep_checkpoints: Count = 2
    replan: Whole = 0
    compare: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    @property
    def plan_settings(self) -> PlanSettings:
        """Those of the pipeline, which clips if the optimizer's gradients are to be."""
        return self.pipeline.changed(clips=bool(self.optimizer.clip_norm))


Override: TypeAlias = str | tuple[str, Any]
"""A setting that is changed: as text, "key=value", or its dotted key and its value."""


def read_config(file: Path | None, overrides: Sequence[Override] = ()) -> Config:
    """The defaults, changed by a TOML file, changed by overrides."""
    plain: dict[str, Any] = {}
    for key, value in dotted({} if file is None else parse_toml(_read(file), str(file))):
        _put(plain, key, value)  # of "model.width" = 64, too, which TOML takes for one name
    if isinstance(name := plain.get("optimizer"), str):
        plain["optimizer"] = {"name": name}
    pairs = [_parse_override(each) if isinstance(each, str) else each for each in overrides]
    given = {key for key, value in pairs if value is not None}
    for place, keys in (("", given), (f"{file}: ", {key for key, _ in dotted(plain)})):
        if {"pipeline.microbatches", "pipeline.global_batch"} <= keys:
            raise ConfigError(f"{place}microbatches and global_batch were both given", hint=ROWS_OR_COUNT)
    if "pipeline.microbatches" in given:
        pairs.append(("pipeline.global_batch", None))  # of the file
    for key, value in pairs:
        _put(plain, key, value)
    changed = {key for key, _ in pairs}

    def source(key: str) -> str:
        return f"{file}: " if file is not None and key not in changed else "--set: "

    for key, value in dotted(plain):
        _refuse_unknown(key, source(key))
        if key == "pipeline.clips" and value:
            raise ConfigError(f"{source(key)}{key} is given", hint="give optimizer.clip_norm, which clips")
        texts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
            raise ConfigError(
                f"{source(key)}{key} is {shown(value)}, which is not text in UTF-8",
                hint="rename the file: the run keeps its name in config.toml",
            )
    try:
        return msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`").partition("[")[0]
        found: Any = reduce(getitem, key.split("."), plain)
        hint = re.sub(r"`([\w |]+)`", _in_words, what).lower()
        raise ConfigError(f"{source(key)}{key} is {shown(found)}", hint=hint) from None
    except ConfigError as error:  # values that do not go together
        if file is None or changed:
            raise
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from None


def _in_words(types: re.Match[str]) -> str:
    return " or ".join(WORDS.get(one, one) for one in types[1].split(" | ") if one != "null")


def key_of(override: Override) -> str:
    """
    >>> key_of("model.width = 64"), key_of(("steps", 3))
    ('model.width', 'steps')
    """
    return override.partition("=")[0].strip() if isinstance(override, str) else override[0]


def write_config(config: Config) -> str:
    """The whole config as TOML, defaults included; `read_config` gives it back. Where the rows of a step say
    how many micro-batches there are, no other number stands beside them; nor ranks or replicas that a planner
    may still choose.

    >>> print(write_config(Config()).partition("[")[0].rstrip())
    name = "gpt"
    seed = 0
    steps = 400
    validate_every = 100
    validation_batches = 4
    checkpoint_every = 100
    keep_checkpoints = 2
    replan = 0
    compare = true
    """
    import tomli_w  # only `pipeloom train` writes a config

    return tomli_w.dumps(_without_none(as_dict(config)))


def as_dict(config: Config) -> dict[str, Any]:
    """Its values by name, as a user may say them."""
    plain = dataclasses.asdict(config)
    derived = [*config.pipeline.unsaid, *["microbatches"] * (config.pipeline.global_batch is not None)]
    for name in derived:
        del plain["pipeline"][name]
    return plain


def unused_keys(config: Config, *, own_optimizer: bool) -> tuple[str, ...]:
    """How the keys begin of what a job of the user's brings itself."""
    unused: tuple[str, ...] = ("model.", "data.") if config.job is not None else ()
    if own_optimizer:
        unused += ("optimizer.name", "optimizer.learning_rate", "optimizer.weight_decay")
    return unused


@cache
def known_keys() -> dict[str, Any]:
    """Every dotted key and its type, in the order of the dataclasses."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            inner = get_type_hints(kind, include_extras=True)
            kinds |= {f"{name}.{key}": type_ for key, type_ in inner.items()}
        else:
            kinds[name] = kind
    return kinds


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {file}: {error.strerror}",
            hint="check the path; without a file, the defaults are used",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {file} is not text", hint="write TOML in UTF-8") from None


def _parse_override(override: str) -> tuple[str, Any]:
    """`key=value` with the value in TOML; a text may stand without quotes, and no value unsets.

    >>> _parse_override("model.width=64"), _parse_override("name=300"), _parse_override("data.paths=a.txt")
    (('model.width', 64), ('name', '300'), ('data.paths', ['a.txt']))
    """
    key, equals, raw = (part.strip() for part in override.partition("="))
    if not equals:
        raise ConfigError(f"--set {shortened(override, most=80)} has no value", hint="write --set key=value")
    _refuse_unknown(key, "--set: ")
    kind = known_keys().get(key)
    if not raw and type(None) in get_args(kind):
        return key, None
    if raw.startswith(('"', "'", "[")):
        return key, parse_toml(f"value = {raw}", f"--set {key}")["value"]
    if kind == tuple[str, ...]:
        return key, [raw] if raw else []
    try:
        return key, msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:  # a number out of its range, a table, or what is refused as a text
        try:
            return key, parse_toml(f"value = {raw}", "")["value"]
        except ConfigError:
            return key, raw


def _refuse_unknown(key: str, place: str) -> None:
    known = known_keys()
    if key in known or any(each.startswith(f"{key}.") for each in known):
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the right word in the wrong section
        last = {each.rpartition(".")[2]: each for each in known}
        near = [last[word] for word in difflib.get_close_matches(key.rpartition(".")[2], last, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
    raise ConfigError(f"{place}there is no setting {shortened(key, most=80)}", hint=hint)


def _put(plain: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        plain = plain.setdefault(section, {})
        if not isinstance(plain, dict):
            raise ConfigError(f"{section} is set to {shown(plain)}", hint=f"{section} is a table of settings")
    plain[last] = value


def _without_none(plain: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in plain.items()}
    return {key: value for key, value in inner.items() if value is not None}

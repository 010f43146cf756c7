"""Config as TOML text: reading with exact complaints, `--set key=value`, writing."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, get_args, get_type_hints

import msgspec

from ..ir.errors import ConfigError, shown
from ..ir.json_codec import shortened
from ..ir.text_files import parse_toml
from .config import Config

_TABLE = re.compile(r"\s*\[([A-Za-z0-9_.\- ]+)\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+)\s*(?:\.|=)")
LARGEST_BITS = 63
"""Of whole numbers, as tensors count."""

Override: TypeAlias = str | tuple[str, Any]
"""A setting that is changed: as text, "key=value", or its dotted key and its value."""

_AT = re.compile(r" - at `\$\.(.+)`$")


def read_config(file: Path | None, overrides: Sequence[Override] = ()) -> Config:
    """The defaults, changed by a TOML file, changed by overrides.

    Raises: ConfigError naming the file and line, or the override, if something is missing, misspelt, of
        the wrong type or out of range.
    """
    text = "" if file is None else _read(file)
    plain = parse_toml(text, str(file))
    origin = {key: _where(file, text, key) for key, _ in _items(plain)}
    for key, place in origin.items():
        _refuse_unknown(key, place)
    for override in overrides:
        key, value = _parse_override(override) if isinstance(override, str) else override
        said = override if isinstance(override, str) else f"{key}={value}"
        origin[key] = f"--set {shortened(said, most=80)}"
        _refuse_unknown(key, origin[key])
        _put(plain, key, value)
    for key, value in _items(plain):
        if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
            raise ConfigError(
                f"{origin.get(key, '--set')}: {key} is {shown(value)}",
                hint=f"use a whole number between -2^{LARGEST_BITS} and 2^{LARGEST_BITS}",
            )
    try:
        return msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        key = at[1].partition("[")[0] if at else ""
        what = _AT.sub("", str(error)).replace("`", "").lower()
        place = origin.get(key, str(file or "--set"))
        raise ConfigError(
            f"{place}: {key}: {what}", hint=f"{key} is {_kind_of(key)}, by default {_default_of(key)!r}"
        ) from None


def key_of(override: Override) -> str:
    """
    >>> key_of("model.width = 64"), key_of(("steps", 3))
    ('model.width', 'steps')
    """
    return override.partition("=")[0].strip() if isinstance(override, str) else override[0]


def write_config(config: Config) -> str:
    """The whole config as TOML, defaults included; `read_config` gives it back.

    >>> print(write_config(Config()).partition("[")[0].rstrip())
    name = "gpt"
    seed = 0
    steps = 400
    validate_every = 100
    validation_batches = 4
    checkpoint_every = 100
    keep_checkpoints = 2
    rehearsals = 21
    compare = true
    """
    import tomli_w  # here, since only `pipeloom train` writes a config

    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def known_keys(kind: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key, in the order of the dataclasses.

    >>> known_keys()[8:11]
    ['rehearsals', 'compare', 'model.layers']
    """
    keys = []
    for name, inner in get_type_hints(kind).items():
        keys += known_keys(inner, f"{prefix}{name}.") if dataclasses.is_dataclass(inner) else [prefix + name]
    return keys


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {file}: {error.strerror}",
            hint="check the path; without a file, the defaults are used",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {file} is not text", hint="write TOML in UTF-8") from None


def _parse_override(override: str) -> tuple[str, Any]:
    """`key=value` with the value in TOML; a text may stand without quotes, and nothing unsets.

    >>> _parse_override("model.width=64"), _parse_override("name=tiny"), _parse_override("data.paths=a.txt")
    (('model.width', 64), ('name', 'tiny'), ('data.paths', ['a.txt']))
    """
    key, equals, raw = override.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals:
        raise ConfigError(f"--set {override!r} has no value", hint="write --set key=value")
    _refuse_unknown(key, f"--set {override}")
    kind, kinds = _type_of(key), _kinds_of(key)
    if type(None) in kinds and not raw:
        return key, None
    if str in kinds and not raw.startswith(('"', "'", "[")):
        return key, raw
    try:
        value = parse_toml(f"value = {raw}", key)["value"]
    except ConfigError:
        value = raw
    if kind == tuple[str, ...] and not isinstance(value, list):
        value = [raw if not isinstance(value, str) else value]
    return key, value


def _items(plain: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of what a file sets; a table where no table belongs counts as a value."""
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            yield from _items(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _refuse_unknown(key: str, place: str) -> None:
    known = known_keys()
    sections = {k.rpartition(".")[0] for k in known} - {""}
    if key in known or key in sections:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the right word in the wrong section
        last = {k.rpartition(".")[2]: k for k in known}
        near = [last[word] for word in difflib.get_close_matches(key.rpartition(".")[2], last, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
    raise ConfigError(f"{place}: there is no setting {shortened(key, most=80)}", hint=hint)


def _where(file: Path | None, text: str, dotted: str) -> str:
    """`config.toml line 3`, for people; only the file where the line cannot be told."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = match[1].strip() + "."
            if dotted == match[1].strip():
                return f"{file} line {number}"
        elif (match := _KEY.match(line)) and (dotted + ".").startswith(f"{table}{match[1]}."):
            return f"{file} line {number}"
    return str(file)


def _put(plain: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        plain = plain.setdefault(section, {})
        if not isinstance(plain, dict):
            raise ConfigError(f"{section} is set to {plain!r}", hint=f"{section} is a table of settings")
    plain[last] = value


def _type_of(dotted: str) -> Any:
    kind: Any = Config
    for name in dotted.split("."):
        kind = get_type_hints(kind)[name]
    return kind


def _kinds_of(dotted: str) -> tuple[Any, ...]:
    kind = _type_of(dotted)
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _kind_of(dotted: str) -> str:
    words = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        tuple[str, ...]: "a list of texts",
    }
    kinds = _kinds_of(dotted)
    return next((word for kind, word in words.items() if kind in kinds), "a table")


def _default_of(dotted: str) -> Any:
    value: Any = Config()
    for name in dotted.split("."):
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def _without_none(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in plain.items()
        if value is not None
    }

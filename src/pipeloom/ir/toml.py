"""TOML that users write, read with complaints instead of tracebacks."""

from __future__ import annotations

import tomllib
from typing import Any

from .errors import ConfigError


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """A document as plain values.

    what: names the text in the error, for instance the file's path.
    Raises: ConfigError if it is no TOML, or holds what Python cannot read: numbers of more than 4300 digits,
        lists thousands deep.

    >>> parse_toml("steps = 4", "config.toml")
    {'steps': 4}
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is not valid TOML: {error}", hint="mend that line") from None
    except ValueError:
        raise ConfigError(
            f"{what} has a number of thousands of digits", hint="write rates, times and sizes below 1e30"
        ) from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply", hint="no key takes lists in lists") from None

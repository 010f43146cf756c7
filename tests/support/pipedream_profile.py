"""Profiles in PipeDream's text format.

One line per node: `node1 -- Linear(...) -- forward_compute_time=1.0, backward_compute_time=2.0,
activation_size=100.0, parameter_size=50.0`, in milliseconds and bytes. Sizes may be lists such as
[100.0; 200.0]. Lines with two nodes are edges; the nodes are taken as a chain in the order of their lines.
"""

from __future__ import annotations

import re

from pipeloom.ir.errors import ConfigError
from pipeloom.planner.strategies.pipedream import Layer

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def read_profile(text: str) -> list[Layer]:
    """Layers of a profile, times in seconds; edges and blank lines are passed over.

    Raises: ConfigError that names the line.

    >>> line = ("node1 -- Linear(in_features=2) -- forward_compute_time=1.5, backward_compute_time=3.0, "
    ...         "activation_size=[8.0; 4.0], parameter_size=16.0")
    >>> layer, = read_profile(line)
    >>> layer.forward_s, layer.activation_bytes, layer.parameter_bytes
    (0.0015, 12.0, 16.0)
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if " -- " not in line:
            continue
        parts = [part.strip() for part in line.split(" -- ")]
        if len(parts) < 3:
            if len(parts) == 2 and parts[1].startswith("node"):
                continue  # an edge
            raise ConfigError(
                f"line {number} of the profile is {line!r}", hint="write name -- description -- numbers"
            )
        found.append(_layer(parts[0], parts[-1], number))
    return found


def _layer(name: str, numbers: str, line: int) -> Layer:
    fields = dict(part.partition("=")[::2] for part in re.split(r",\s*(?=[a-z_]+=)", numbers))
    try:
        forward, backward, activation, parameters = (
            sum(float(x) for x in re.split(r"[;,]", fields[key].strip(" []")) if x.strip()) for key in _KEYS
        )
    except KeyError as error:
        raise ConfigError(f"line {line} of the profile has no {error.args[0]}", hint="add it") from None
    except ValueError:
        raise ConfigError(f"line {line} of the profile has no number: {numbers!r}", hint="mend it") from None
    return Layer(
        name=name,
        forward_s=forward / 1e3,
        backward_s=backward / 1e3,
        activation_bytes=activation,
        parameter_bytes=parameters,
    )

"""Devices of this machine by PyTorch's names."""

from __future__ import annotations

import torch

from ..ir.errors import ConfigError


def usable_device(name: str) -> torch.device:
    """The device named as "cpu", "cuda" or "cuda:1". Raises: ConfigError if this machine has none such."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name!r} is no device that pipeloom runs on", hint='use "cpu" or "cuda"')
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        seen = f"only {count} with CUDA" if count else "none with CUDA"
        raise ConfigError(
            f"the device {name!r} was asked for, PyTorch sees {seen} here",
            hint='use "cuda" or "cpu"' if count else 'use "cpu"',
        )
    return device

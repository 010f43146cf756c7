"""Silence for what torch.export prints when it fails: its error is reported in one sentence instead."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGERS = ("torch.fx.experimental.symbolic_shapes",)


class _WithoutGraphs:
    """A stream that drops graphs which one thread writes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.muted = threading.get_ident()
        self.dropped = False

    def write(self, text: str) -> int:
        if threading.get_ident() == self.muted:
            end_of_line = self.dropped and text == "\n"
            self.dropped = "def forward(self, " in text
            if self.dropped or end_of_line:
                return len(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Graphs that this thread writes to stderr in the block are not shown, nor warnings of shape logic."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    before = sys.stderr
    sys.stderr = _WithoutGraphs(before)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        sys.stderr = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

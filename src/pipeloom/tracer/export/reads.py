"""Where a forward reads numbers from tensors, or makes tensors whose size depends on data: noted while it is
traced, as the traced graph knows lines of functions named `forward` only."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from ..fallback.torch_functions import READS, function_name, sized_by_data
from ..user_code import user_line

READ_AT = "pipeloom_read_at"
"""Key of the lines among the `meta` of a traced graph module."""


class ReadsNoted(TorchFunctionMode):
    """Notes in `lines` each line of the user's code that reads data, once."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if (name in READS or sized_by_data(name, args)) and (line := user_line()):
            self.lines[line] = None
        return func(*args, **(kwargs or {}))

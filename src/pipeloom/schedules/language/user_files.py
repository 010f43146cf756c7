"""A user's own schedule by name: `file.py:function`, and behind another colon its options.

    pipeloom schedule show mine.py:zigzag -p 4 -m 8
    pipeloom train --schedule mine.py:zigzag:group=2

The function takes a `Shape` and returns a `Recipe` or several. Instead of a function the name may be that
of an `Entry`, which also says where the stages go. Operations that the file declares are known from then on.
A file of actions is a name too, and says all there is: .csv, such as torch.distributed.pipelining writes, or
.txt with a row of actions per rank.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ...ir.errors import ScheduleError
from .names import ScheduleName

_HINT = "name a function that takes a Shape and returns a Recipe, as file.py:function"


def load_user_schedule(name: ScheduleName) -> Any:
    """What `file.py:function` names: a recipe's function, or an Entry. An exception inside the user's code
    is left as it is."""
    file, _, function = name.family.partition(":")
    if not function:
        raise ScheduleError(
            f"{file} is a file and not a schedule",
            hint=f"name the schedule in it, as {file}:found if a search has written it",
        )
    module = load_file(Path(file))
    schedule = getattr(module, function, None)
    if schedule is None:
        near = get_close_matches(function, [n for n in vars(module) if not n.startswith("_")], n=1)
        raise ScheduleError(
            f"{file} has no {function}",
            hint=f"did you mean {file}:{near[0]}?" if near else _HINT,
        )
    try:
        if callable(schedule):
            inspect.signature(schedule).bind(None)
        wrong = inspect.isclass(schedule)
    except TypeError:
        wrong = True
    if wrong:
        raise ScheduleError(f"{name.written} is not a function of one Shape", hint=_HINT)
    return schedule


def load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once. Raises: ScheduleError if there is none."""
    if not path.is_file():
        raise ScheduleError(f"there is no file {path}", hint=_HINT)
    path = path.resolve()
    # The user's job may be in the same file, which `tracer.job` has then imported under such a name.
    names = (path.stem, f"pipeloom_job_{path.stem}", f"pipeloom_schedule_{path.stem}")
    for module_name in names:
        if getattr(sys.modules.get(module_name), "__file__", None) == str(path):
            return sys.modules[module_name]
    name = names[0] if names[0] not in sys.modules else names[2]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""One rank's process, started by `launch` as `python -m pipeloom.runtime.child`. Imports no torch.

What to prepare, once or several times, and then the work, come pickled through standard input; the outcome
goes back through a pipe. When the launching process ends, however that happens, a guard process ends this
rank and all that it has started.
"""

from __future__ import annotations

import os
import pickle
import runpy
import select
import signal
import sys
import traceback
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..ir.errors import PeerError
from ..ir.text import as_utf8

PEER_FAILED = 76
"""Exit status of a rank that ends because another one failed."""

MAIN_OF_CHILD = "__mp_main__"
"""Name under which the launching script runs here, so that its `__main__` guard does not start it again; the
same as in multiprocessing."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank ended.

    status: exit status.  peer: it ended because another rank failed.  text: what to tell the user.
    """

    status: int
    peer: bool = False
    text: str = ""


def run(target: Any, args: tuple[object, ...]) -> RankExit:
    """Call the target and put the way it ended into words."""
    try:
        target(*args)
    except PeerError as error:
        return RankExit(status=PEER_FAILED, peer=True, text=str(error))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return RankExit(status=error.code or 0)
        return RankExit(status=1, text=str(error.code))
    except KeyboardInterrupt:
        return RankExit(status=128 + signal.SIGINT, text="interrupted")
    except BaseException as error:  # whatever it is, the launcher must hear of it
        return RankExit(status=1, text=_traceback(error))
    return RankExit(status=0)


def main(launcher_alive: int, report: int) -> int:
    """Run what standard input says.

    launcher_alive: pipe that ends with the launcher.  report: pipe for the outcome.
    """
    for descriptor in (launcher_alive, report):
        os.set_inheritable(descriptor, False)
    _start_guard(launcher_alive, report)
    try:
        target, args = _read_work()
    except Exception as error:  # noqa: B902  importing the user's code can fail in any way
        outcome = RankExit(status=1, text=_traceback(error))
    else:
        outcome = run(target, args)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(os.dup(report), "wb") as pipe:
        pipe.write(msgspec.json.encode(replace(outcome, text=as_utf8(outcome.text))) + b"\n")
    return outcome.status


def _read_work() -> tuple[Any, tuple[object, ...]]:
    with sys.stdin.buffer as pipe:
        while isinstance(message := pickle.load(pipe), bytes):
            run(*pickle.loads(message))  # what is wrong the work meets again, and it is then that it is said
        main_file, path, work = message
    sys.path += [folder for folder in path if folder not in sys.path]
    if main_file is not None:
        names = runpy.run_path(main_file, run_name=MAIN_OF_CHILD)
        main_module = type(sys)(MAIN_OF_CHILD)
        main_module.__dict__.update(names)
        sys.modules["__main__"] = sys.modules[MAIN_OF_CHILD] = main_module
    target, args = pickle.loads(work)
    return target, args


def _traceback(error: BaseException) -> str:
    """As Python prints it, without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _start_guard(launcher_alive: int, report: int) -> None:
    """Start the guard, a process that ends what this rank has started, however the launcher ends.

        launcher ends ─▶ launcher_alive can be read ─▶ the guard kills this rank's session, itself too
        rank ends     ─▶ rank_alive can be read     ─▶ the guard ends

    A process and not a thread, since code that holds the interpreter's lock would hold up a thread; and not
    Linux's PR_SET_PDEATHSIG, which would leave behind what this rank has started.
    report: a pipe that the guard must not keep open.
    """
    rank_alive, held = os.pipe()
    if os.fork():
        os.close(rank_alive)  # `held` stays open until this rank ends
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # those are for the rank, which may take its time
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (held, report, 0, 1, 2):
        os.close(descriptor)
    ended, _, _ = select.select([launcher_alive, rank_alive], [], [])
    if launcher_alive in ended:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

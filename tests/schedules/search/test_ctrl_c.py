"""Ctrl-C after searches."""

import subprocess
import sys
import textwrap

import pytest

SEARCHES = textwrap.dedent(
    """
    import signal
    import pipeloom
    from pipeloom.schedules.search.search import SearchOptions

    stages = [{"F": 1.1, "I": 0.7, "W": 0.9, "bytes": 1, "ranks": s} for s in range(2)]
    only = SearchOptions(engines=("ENGINE",))
    pipeloom.search_schedule({"stage": stages, "memory": "2"}, microbatches=3, options=only)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
    """
)


@pytest.mark.parametrize("engine", ["exact", "kernel"])
def test_python_still_gets_it(engine: str) -> None:
    words = [sys.executable, "-c", SEARCHES.replace("ENGINE", engine)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr

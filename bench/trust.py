"""A zoo of models that pipeloom was not written for: each trains as in eager PyTorch, or is refused with a
sentence.

    python bench/trust.py [--libraries transformers timm ...] [--models NAME ...]

Every model is trained for two steps and evaluated, in a pipeline of two or three ranks that are threads, and
in plain PyTorch with the same micro-batches; losses, gradients, updated parameters and buffers are compared,
in float64 where the model runs in it. Without dropout, as eager PyTorch draws other numbers. Libraries: the
extra `bench`; one that cannot be imported is named in the table. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from multiprocessing import get_context
from typing import Any

import torch
from machine import FOLDER, parser_of, print_stamp
from trust_zoo import import_torchvision

# isort: split
from nets import in_double
from odd.case import differences
from runs import Numbers, capture_of, even_plan, pipelined, plain

from pipeloom import Job
from pipeloom.ir.errors import PipeloomError

PAGE = FOLDER.parent / "docs" / "trust.md"

LIBRARIES = {
    "transformers": "trust_zoo.transformers_models",
    "timm": "trust_zoo.timm_models",
    "torchvision": "trust_zoo.torchvision_models",
    "peft": "trust_zoo.peft_models",
    "torch_geometric": "trust_zoo.graph_models",
    "diffusers": "trust_zoo.diffusers_models",
    "segmentation_models_pytorch": "trust_zoo.segmentation_models",
    "x_transformers": "trust_zoo.x_transformers_models",
    "odd models": "odd",
}
"""Library -> the module with its models. The odd models are the zoo of the tests, `tests/support/odd`."""
ODD = "odd models"

TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
MICROBATCHES, ROWS = 3, 2
VERDICTS = ("equal", "refused", "wrong", "broken", "not here")
MARK = "<!-- written by bench/trust.py -->"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a model.

    verdict: "equal", "refused", "wrong" (other numbers than eager PyTorch, and nothing said), "broken" (an
        error that is none of pipeloom's) or "not here" (its library cannot be imported).
    how: "one graph" (exported) or "between modules".  largest: relative difference.  says: why not.
    """

    library: str
    model: str
    verdict: str
    how: str = ""
    stages: int = 0
    dtype: str = ""
    largest: float = 0.0
    says: str = ""
    seconds: float = 0.0


def try_model(library: str, model: str, stages: int) -> Verdict:
    """Train one model both ways."""
    quiet()
    start = time.perf_counter()
    zoo = models_of(library)
    known = Verdict(library=library, model=model, verdict="broken", stages=stages)
    for double in (True, False):
        job = in_double(zoo.MODELS[model]()) if double else zoo.MODELS[model]()
        known = replace(known, dtype="float64" if double else "float32")
        try:
            expected = eager(job)
        except (RuntimeError, ValueError, TypeError) as error:
            found = replace(known, says=f"not even in plain PyTorch: {error}")
            continue
        try:
            found = compared(job, expected, known)
        except PipeloomError as error:
            found = replace(known, verdict="refused", says=str(error))
            continue  # some forwards cast to float32 within
        except Exception as error:  # any other is what this bench looks for
            lines = traceback.format_exception(error)
            found = replace(known, says=f"{type(error).__name__}: {error}\n{''.join(lines[-4:])}")
        break
    if found.verdict == "refused":
        found = replace(found, dtype="", stages=0)
    return replace(found, says=without_folders(found.says), seconds=round(time.perf_counter() - start, 1))


def without_folders(text: str) -> str:
    """A message whose files are named from where Python finds them on, as on any other machine."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def compared(job: Job, expected: Numbers, known: Verdict) -> Verdict:
    captured = capture_of(job, ROWS)
    how = "between modules" if captured.graph.fallback else "one graph"
    possible = sum(not op.cheap for op in captured.graph.ops)
    known = replace(known, how=how, stages=min(known.stages, possible))
    plan = even_plan(job, known.stages, microbatches=MICROBATCHES, microbatch_size=ROWS)
    train, evaluate = batches(job)
    found = pipelined(job, plan, train, evaluate=evaluate, timeout_s=120.0, compare=False)
    apart = differences(job, found, expected)
    worst = max(apart, key=lambda name: apart[name])
    right = apart[worst] <= TOLERANCE[known.dtype]
    return replace(
        known,
        verdict="equal" if right else "wrong",
        largest=apart[worst],
        says="" if right else f"{worst} differ by {apart[worst]:.2g}",
    )


def models_of(library: str) -> Any:
    """The file of the zoo. Raises: ImportError if the library is not here."""
    with suppress(ImportError):
        import_torchvision()  # some of the others import it, and it may need help
    return importlib.import_module(LIBRARIES[library])


def batches(job: Job) -> tuple[list[Any], list[Any]]:
    made = [job.batch(seed, MICROBATCHES * ROWS) for seed in range(3)]
    return made[:2], made[2:]


def eager(job: Job) -> Numbers:
    """A job's numbers in plain PyTorch."""
    train, evaluate = batches(job)
    with torch.random.fork_rng():
        return plain(job, train, MICROBATCHES, evaluate=evaluate)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pipeloom").setLevel(logging.ERROR)


def listed(libraries: Sequence[str], models: Sequence[str]) -> list[tuple[str, str] | Verdict]:
    found: list[tuple[str, str] | Verdict] = []
    for library in libraries:
        try:
            zoo = models_of(library)
        except ImportError as error:
            found.append(Verdict(library=library, model="", verdict="not here", says=str(error)))
            continue
        found += [(library, name) for name in zoo.MODELS if not models or name in models]
    return found


def main(libraries: Sequence[str], models: Sequence[str]) -> int:
    quiet()
    start = time.perf_counter()
    verdicts: list[Verdict] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [
            one if isinstance(one, Verdict) else pool.submit(try_model, *one, 2 + index % 2)
            for index, one in enumerate(listed(libraries, models))
        ]
        for run in runs:
            verdicts.append(run if isinstance(run, Verdict) else run.result())
            v = verdicts[-1]
            print(
                f"{v.verdict:8} {v.library} / {v.model}: {v.how} {v.stages} stages {v.dtype} {v.largest:.1e} "
                f"{v.seconds:.0f} s {v.says}",
                flush=True,
            )
    counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in VERDICTS}
    took_s = time.perf_counter() - start
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"in {took_s:.0f} s")
    if not models and list(libraries) == list(LIBRARIES):
        record(verdicts)
    return 1 if counts["wrong"] or counts["broken"] else 0


def record(verdicts: Sequence[Verdict]) -> None:
    """Print the versions of the libraries, and write the tables of the page."""
    print_stamp()
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            print(library, version(library))
    begin, _, rest = PAGE.read_text().partition(MARK)
    _, _, end = rest.partition(MARK)
    PAGE.write_text(f"{begin}{MARK}\n{page_of(verdicts)}\n{MARK}{end}")


def page_of(verdicts: Sequence[Verdict]) -> str:
    """A row for each library with its equal models, of the tests' many how many; then the others' reasons."""
    lines = ["| library | as one graph | between modules | largest difference |", "|---|---|---|---|"]
    for library, group in groupby((v for v in verdicts if v.verdict == "equal"), key=lambda v: v.library):
        own = list(group)
        named = ([v.model for v in own if v.how == how] for how in ("one graph", "between modules"))
        names = (str(len(some)) if library == ODD else "; ".join(some) for some in named)
        worst = f"{max((v.largest for v in own if v.dtype == 'float64'), default=0.0):.1e}"
        single = "".join(f"; {v.model} {v.largest:.1e} in float32" for v in own if v.dtype == "float32")
        lines.append(f"| {' | '.join((library, *names, worst + single))} |")
    lines += ["", "| library, model | verdict | why |", "|---|---|---|"]
    odd = sum(v.verdict == "refused" for v in verdicts if v.library == ODD)
    lines.append(f"| {ODD}, {odd} | refused | the reason of each is with it in `tests/support/odd` |")
    for v in verdicts:
        if v.verdict != "equal" and (v.library, v.verdict) != (ODD, "refused"):
            reason = re.split(r"\nhint: |: |; and as modules", v.says)[0].replace("|", "\\|")
            lines.append(f"| {v.library}, {v.model} | {v.verdict} | {reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--models", nargs="+", default=[], help="only these, by name")
    arguments = parser.parse_args()
    sys.exit(main(arguments.libraries, arguments.models))

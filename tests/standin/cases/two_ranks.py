"""One rank of pipelines of two, one after the other. Prints a line for each: losses, checksums of
parameters, waits of the host in a step, and reports."""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import mutations
import standin
from torch import Tensor
from two_rank_plans import CASES, trained


def places(waits: list[standin.Happening]) -> list[str]:
    return [f"{wait.text} {wait.place.rpartition('/')[2].partition(':')[0]}" for wait in waits]


def checksum(value: Any) -> int:
    """Of a tensor, for JSON."""
    assert isinstance(value, Tensor)
    return zlib.crc32(value.numpy().tobytes())


def main(device: str, folder: str, *words: str) -> None:
    """words: cases, each followed by a mutation."""
    for number, (name, mutation) in enumerate(zip(words[::2], words[1::2], strict=True)):
        with mutations.applied(mutation), standin.collecting() as found:
            there = trained(CASES[name], device, Path(folder) / str(number), standin.counted_syncs())
        there["waits"] = places(there["waits"])
        there["reports"] = sorted({f"{report.kind}: {report.text.partition(': ')[2]}" for report in found})
        print(json.dumps(there, default=checksum), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

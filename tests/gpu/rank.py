"""One rank of `test_two_ranks`: trains plans, one after the other, and writes to a file what each gave."""

import os
import sys
from pathlib import Path

import torch
from two_rank_plans import CASES, trained

from pipeloom.ir.errors import PipeloomError


def main(device: str, folder: Path, names: list[str]) -> None:
    rank = os.environ["LOCAL_RANK"] = os.environ["RANK"]
    for name in names:
        try:
            found = trained(CASES[name], device, folder / name)
        except PipeloomError as error:
            found = {"error": str(error)}
        torch.save(found, folder / f"{name} {rank}.pt")
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

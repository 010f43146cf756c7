"""One rank of `test_two_ranks`: trains plans, one after the other, and writes to a file what each gave."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from two_rank_plans import CASES, trained

from pipeloom.ir.errors import PipeloomError


def main(device: str, folder: Path, names: list[str]) -> None:
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = rank
    if device == "cuda" and torch.accelerator.device_count() == 1:
        # Both ranks on one device. NCCL refuses that on one host, so each says that it is on one of its own.
        os.environ |= {
            "LOCAL_RANK": "0",
            "NCCL_HOSTID": rank,
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    for name in names:
        try:
            found = trained(CASES[name], device, folder / name)
        except PipeloomError as error:
            found = {"error": str(error)}
        torch.save(found, folder / f"{name} on {device} {rank}.pt")
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

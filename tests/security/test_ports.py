"""The ranks of one machine listen on its loopback interface only, as SECURITY.md says."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeloom.runtime.connect import connect
from pipeloom.runtime.launch import launch

LISTENS, LOOPBACK = "0A", ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, as /proc writes them."""
    links = [file for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    held = {os.readlink(file) for file in links if os.path.lexists(file)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").open()]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in held]


def rank(folder: Path) -> None:
    group = connect(torch.device("cpu"))
    dist.all_reduce(torch.ones(1), group=group)
    found = [address for pid in (os.getpid(), os.getppid()) for address in listening(pid)]
    (folder / str(group.rank())).write_text("\n".join(found))
    dist.barrier(group)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nobody_else_can_reach_the_ranks_of_one_machine(tmp_path: Path) -> None:
    assert launch(rank, 2, args=(tmp_path,)) == 0
    for number in "01":
        found = (tmp_path / number).read_text().splitlines()
        assert found and set(found) <= set(LOOPBACK), found

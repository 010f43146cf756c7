"""Files are written in their own directory, whatever links somebody has put there."""

import os
from pathlib import Path

from pipeloom.ir.text import write_whole


def test_a_name_that_can_be_foreseen_leads_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "plan.json"
    (tmp_path / f"plan.json.{os.getpid()}.partial").symlink_to(victim)
    write_whole(target, "theirs")
    assert victim.read_text() == "mine"
    assert target.read_text() == "theirs" and not target.is_symlink()


def test_files_get_the_rights_that_the_user_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640

"""Text: which bytes, split how, and windows of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pipeloom.ir.errors import ConfigError
from pipeloom.train.text_data import FileSpan, Text, files_of, split, standard_library


def text_of(folder: Path, *contents: bytes) -> Text:
    for number, content in enumerate(contents):
        (folder / f"{number:03d}.txt").write_bytes(content)
    paths = [folder / f"{number:03d}.txt" for number in range(len(contents))]
    return Text(tuple(FileSpan(p, p.name, 0, len(c)) for p, c in zip(paths, contents, strict=True)))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_reading_crosses_the_borders_of_files(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(contents)
    text = text_of(tmp_path_factory.mktemp("text"), *contents)
    assert len(text) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    size = data.draw(st.integers(0, len(whole) - start))
    assert text.read(start, size).tobytes() == whole[start : start + size]


def test_windows_follow_from_the_seed_and_reach_every_place(tmp_path: Path) -> None:
    text = text_of(tmp_path, bytes(range(5)), bytes(range(5, 12)))
    windows = text.windows(3, 400, 4)
    assert windows.shape == (400, 4) and windows.dtype == np.uint8
    assert np.array_equal(windows, text.windows(3, 400, 4))
    assert not np.array_equal(windows, text.windows(4, 400, 4))
    assert {int(row[0]) for row in windows} == set(range(9))
    assert (np.diff(windows.astype(int), axis=1) == 1).all()


def test_the_standard_library_is_there_and_split_by_file() -> None:
    train, validation = split(standard_library(), 0.05)
    assert len(train) > 5_000_000
    assert 0.01 < len(validation) / len(train) < 0.15
    names = {span.name for span in train.spans}
    assert "argparse.py" in names | {span.name for span in validation.spans}
    assert not names & {span.name for span in validation.spans}
    assert not any("test" in name.split("/") for name in names)
    assert split(standard_library(), 0.05)[0].fingerprint == train.fingerprint != validation.fingerprint


def test_an_added_file_moves_no_other(tmp_path: Path) -> None:
    def validation() -> set[str]:
        return {span.name for span in split(files_of([str(tmp_path)]), 0.3)[1].spans}

    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("some text")
    before = validation()
    assert 0 < len(before) < 30
    (tmp_path / "another.txt").write_text("more text")
    assert validation() - {"another.txt"} == before


def test_few_files_give_their_ends_for_validation_and_empty_ones_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("hidden")
    (tmp_path / "empty").write_text("")
    (tmp_path / "only.txt").write_bytes(bytes(range(100)))
    train, validation = split(files_of([str(tmp_path)]), 0.2)
    assert train.read(0, len(train)).tobytes() == bytes(range(80))
    assert validation.read(0, len(validation)).tobytes() == bytes(range(80, 100))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "nowhere: No such file" in refused(ConfigError, files_of, [str(tmp_path / "nowhere")])
    assert "no file with text in it" in refused(ConfigError, files_of, [str(tmp_path)])
    text = text_of(tmp_path, b"0123456789")
    (tmp_path / "000.txt").write_bytes(b"0123")
    assert "000.txt has become shorter" in refused(ConfigError, text.read, 2, 6)
    (tmp_path / "000.txt").unlink()
    assert "000.txt: No such file" in refused(ConfigError, text.read, 2, 6)

"""Mixed precision: bfloat16 trains, float16 is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from deep import TANH

from pipeloom import Options
from pipeloom.cli import main
from pipeloom.ir.errors import ConfigError
from pipeloom.planning import capture


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_what_loses_gradients_is_refused(dtype: torch.dtype) -> None:
    """In float16 an RMS norm left the layer before it with gradients of zero, and said nothing."""
    for make in (lambda: Options(autocast=dtype), lambda: capture(TANH, 2, autocast=dtype)):
        with pytest.raises(ConfigError, match=str(dtype)) as caught:
            make()
        assert "bfloat16" in (caught.value.hint or "")


def test_train_refuses_float16(tmp_path: Path) -> None:
    words = ["train", "--steps", "1", "--out", str(tmp_path / "run"), "--set", "pipeline.autocast=float16"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code and "float16" in result.output and "bfloat16" in result.output
    assert "Traceback" not in result.output

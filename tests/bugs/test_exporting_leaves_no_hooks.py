"""A capture that fails inside a checkpoint left the checkpoint's hooks on saved tensors in place.

Seen with torch 2.11: the next backward of the process then ran the failed capture's forward again.
"""

from __future__ import annotations

import odd_code
import odd_models
import torch

from pipeloom.tracer.capture import capture


def test_a_capture_that_fails_in_a_checkpoint_leaves_no_hooks() -> None:
    captured = capture(odd_models.job(odd_code.CheckpointedInside), 2)
    assert captured.graph.fallback
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

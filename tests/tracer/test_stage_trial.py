"""What no stage could run by itself is found out when a model is captured, not in its first step."""

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from odd.case import Stack, job
from odd.control_flow import ComparesWithText, NoModules
from runs import assert_same, capture_of, even_plan, pipelined, plain
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeloom.ir.errors import CutError
from pipeloom.tracer.capture import capture


class Objects(Stack):
    """Modules hand on what only the rank that runs them has: an object with tensors in it."""

    class Holding(nn.Module):
        def forward(self, h: Tensor) -> object:
            return SimpleNamespace(tensor=h * 2)

    def prepare(self) -> None:
        self.hold = self.Holding()

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        held = self.hold(h)
        h = self.blocks[1](h)
        if h.sum() > 1e9:
            h = -h
        return self.blocks[2](h) + torch.add(h, held.tensor)  # line of Objects


class LeavesOutAll(Stack):
    """Mostly no block is called; what they returned is joined at the end, as encoders with LayerDrop do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        seen = [self.inlet(x)]
        for block in self.blocks:
            if self.training and random.random() < 0.7:
                continue
            seen.append(block(seen[-1]))
        logits = self.head(torch.stack(seen).mean(0))  # line of LeavesOutAll
        return {"loss": cross_entropy(logits, y)}


@pytest.mark.parametrize("model", [Objects, LeavesOutAll])
def test_what_cannot_run_apart_stays_together_with_the_line(
    model: type[Stack], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        graph = capture(job(model), 2).graph
    (told, *_) = [r.getMessage() for r in caplog.records if "stay in one stage" in r.getMessage()]
    lines = open(__file__).readlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# line of {model.__name__}\n"))
    assert f"test_stage_trial.py:{line})" in told and "move this code into a module of its own" in told
    assert any("..." in op.name for op in graph.ops)


def test_a_number_of_another_stage_is_no_text() -> None:
    assert len(capture(job(ComparesWithText), 2).graph.ops) == 5


def test_what_is_kept_together_trains_as_one_process() -> None:
    made = job(Objects)
    batches = [made.batch(seed, 8) for seed in range(2)]
    plan = even_plan(made, min(2, len(capture_of(made).graph.ops)), microbatches=4)
    found = pipelined(made, plan, batches, evaluate=batches[:1])
    assert_same(found, plain(made, batches, 4, evaluate=batches[:1]), tolerance=2e-5)


def test_lists_of_modules_that_do_not_run_are_refused_at_once() -> None:
    lists = [["inlet", "blocks.0", "hold"], ["blocks.1", "blocks.2", "head"]]
    with pytest.raises(CutError, match="hold and blocks.2 into two stages, but .* neither returns"):
        capture(job(Objects, modules=lists), 2)


def test_a_model_without_modules_to_cut_says_where_it_computes() -> None:
    fallback = capture(job(NoModules), 2).graph.fallback
    assert "nor can it be cut between its modules: what computes is the forward of NoModules" in fallback
    assert "control_flow.py:" in fallback

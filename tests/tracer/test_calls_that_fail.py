"""A loss that fails, and batches that a forward or a loss does not take, are what is told."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import runs
import torch
from torch import Tensor, nn

from pipeloom import Job, Pipeline, PipeloomError, capture
from pipeloom.ir.errors import CaptureError, ConfigError
from pipeloom.profiler.measure_ops import measure

X, Y, IDS = torch.ones(4, 3), torch.zeros(4, 3), torch.arange(4)


class Cleans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, noisy: Tensor) -> Tensor:
        return self.layer(noisy)


class MisCalls(Cleans):
    def forward(self, noisy: Tensor) -> Tensor:
        return super().forward(noisy, 3)  # type: ignore[call-arg]


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3, max_norm=1.0)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (self.words(one) * self.words(other)).mean()


def captured(loss: Any = None, model: type[nn.Module] = Cleans, **batch: Tensor) -> object:
    return capture(Job(model=model, batch=lambda seed, rows: batch, loss=loss), 4)


def pipeline(example: Any, loss: Any = None) -> object:
    return Pipeline(Cleans(), example=example, loss=loss, microbatches=2)


@pytest.mark.parametrize(
    ("made", "error", "word", "hint"),
    [
        (
            lambda: captured(None, Embeds, one=IDS, other=IDS),
            CaptureError,
            "=1 of Embedding words",
            "max_norm",
        ),
        (
            lambda: captured(lambda o, b: (o - b["claen"]).mean(), noisy=X, clean=Y),
            CaptureError,
            r"^the loss of model fails: KeyError: 'claen' \(.*:\d+\); it gets \(outputs, batch\)\n",
            "the batch has noisy, clean",
        ),
        (lambda: captured(lambda o: o.mean(), noisy=X), CaptureError, "it gets", "noisy"),
        (lambda: captured(noisy=X, clean=Y), CaptureError, r"takes no 'clean' \(.*:\d+\)", "Job.loss"),
        (lambda: captured(lambda o, b: o, nosy=X), CaptureError, "of 'nosy': missing .*'noisy'", "noisy"),
        (lambda: captured(lambda o, b: o, noisy=X[:3]), CaptureError, "4 rows .* noisy of 3", "dimension"),
        (lambda: captured(noisy=X), CaptureError, "^the output of model has no .loss\n", "Job.loss"),
        (lambda: captured(lambda o, b: o, noisy=X), CaptureError, "got shape", "mean"),
        (lambda: captured(lambda o, b: None, noisy=X), CaptureError, "got None", "one number"),
        (lambda: pipeline(X), CaptureError, "^the output of Cleans has no .loss\n", "Pipeline loss="),
        (lambda: pipeline((X, Y)), CaptureError, "cannot take 2 parts", "Pipeline loss="),
        (lambda: pipeline((X, Y), lambda o: o.mean()), CaptureError, "cannot take 2 parts", "the loss gets"),
        (
            lambda: pipeline(X, lambda o, b: o.mean()),
            ConfigError,
            r"\(.*:\d+\): missing a required argument: 'b'; it gets only the output, because the batch is",
            "dictionary",
        ),
        (lambda: pipeline((X, Y), lambda o, a, b: o.mean()), ConfigError, "the last part of", "dictionary"),
        (lambda: pipeline((X, Y), lambda o, b: o.nope()), CaptureError, "gets .outputs, target.", "PyTorch"),
        (lambda: pipeline({"noisy": X, "clean": Y}), CaptureError, "no 'clean'", "Pipeline loss="),
        (lambda: pipeline((X, Y), torch.cosine_similarity), CaptureError, "got shape", ""),  # a builtin
    ],
)
def test_what_failed_is_told(
    made: Callable[[], object], error: type[PipeloomError], word: str, hint: str
) -> None:
    with pytest.raises(error, match=word) as caught:
        made()
    assert hint in (caught.value.hint or "") and "torch.export" not in caught.value.message.split(";")[0]


def numbered(seed: int, rows: int) -> dict[str, Tensor]:
    return {"input": torch.full((rows, 2), 9 if seed else 1)}


def test_a_type_error_inside_the_forward_is_its_own() -> None:
    both = r"capture model: TypeError: .*; and as modules: the forward of model fails: TypeError.*\n.* such a"
    with pytest.raises(CaptureError, match=both):
        captured(model=MisCalls, noisy=X)


def test_a_number_that_an_op_does_not_take_is_told() -> None:
    """In the first step, in later ones, and where ops are timed."""

    def scores(output: Tensor, batch: Any) -> Tensor:
        return output.mean()

    job = Job(model=lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), batch=numbered, loss=scores)
    plan = runs.even_plan(job, 2, microbatches=2)

    def train(seeds: Sequence[int]) -> list[Any]:
        return runs.each_rank(job, plan, lambda rank: [rank.step(numbered(seed, 4)) for seed in seeds])

    for seeds in ((1,), (0, 1)):
        with pytest.raises(PipeloomError, match="forward of stage 0 fails at aten.embedding.*IndexError"):
            train(seeds)
    double = Job(model=lambda: nn.Linear(3, 3), batch=lambda s, n: {"input": X[:n].double()}, loss=scores)
    with pytest.raises(CaptureError, match="Double"):
        measure(capture(double, 2))

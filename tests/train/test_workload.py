"""The GPT, its batches, and jobs of one's own."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from pipeloom.ir.errors import ConfigError
from pipeloom.tracer.job import Job
from pipeloom.train.config import Config, DataConfig, ModelConfig, OptimizerConfig, read_config
from pipeloom.train.model import GPT
from pipeloom.train.workload import derive_seed, gpt_workload, job_of, job_workload, tokens_of

SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8}


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    bytes_BT = torch.randint(256, (rows, 9), generator=generator)
    return {"input_ids": bytes_BT[:, :-1].contiguous(), "labels": bytes_BT[:, 1:].contiguous()}


def test_no_byte_sees_the_ones_after_it() -> None:
    torch.manual_seed(0)
    model, inputs = GPT(**SMALL).eval(), batch()
    before = model(**inputs).logits
    inputs["input_ids"][:, 5:] = 0
    after = model(**inputs).logits
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_a_model_of_which_one_size_is_set_has_the_usual_others() -> None:
    """msgspec leaves defaults that a table does not name in the class, where `vars` does not find them."""
    set_so = job_of(read_config(None, ["model.width=16"])).model()
    built_so = job_of(Config(model=ModelConfig(width=16))).model()
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (set_so, built_so)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not_it_exports_and_drops_only_while_training(tied: bool) -> None:
    model = GPT(**SMALL, tied=tied, dropout=0.5)
    assert (model.head.weight is model.embed.weight) == tied
    assert not torch.equal(model(**batch()).loss, model(**batch()).loss)
    model.eval()
    program = torch.export.export(model, (), batch())
    assert torch.equal(program.module()(**batch()).loss, model(**batch()).loss)


def test_batches_follow_from_seed_and_step(tiny: Config) -> None:
    one, two = gpt_workload(tiny), gpt_workload(tiny)
    for name in ("input_ids", "labels"):
        assert torch.equal(one.train(5)[name], two.train(5)[name])
        assert not torch.equal(one.train(5)[name], one.train(6)[name])
    other = gpt_workload(dataclasses.replace(tiny, seed=1))
    assert not torch.equal(one.train(5)["labels"], other.train(5)["labels"])
    assert torch.equal(one.validation(0)["labels"], other.validation(0)["labels"])
    found = one.train(5)
    assert found["input_ids"].shape == (4, 16) and found["input_ids"].dtype == torch.int64
    assert torch.equal(found["input_ids"][:, 1:], found["labels"][:, :-1])
    assert tokens_of(one.job, found) == 64
    sample = one.job.batch(0, 3)  # of any size
    assert sample["labels"].shape == (3, 16) and tokens_of(one.job, sample) == 48
    torch.manual_seed(0)
    assert one.job.model()(**sample).loss.item() == pytest.approx(math.log(256), abs=0.1)  # that of a guess


def test_too_little_text_is_said(tiny: Config, tmp_path) -> None:
    long = dataclasses.replace(tiny, model=ModelConfig(layers=1, width=16, heads=2, context=10**6))
    with pytest.raises(ConfigError, match="training text .* needs 1000001"):
        gpt_workload(long)
    (tmp_path / "one.txt").write_text("x" * 100)
    short = dataclasses.replace(tiny, data=DataConfig(paths=(str(tmp_path / "one.txt"),)))
    with pytest.raises(ConfigError, match="validation text .* needs 17"):
        gpt_workload(short)


def a_job(**others: object) -> Job:
    return Job(
        name="mine",
        model=lambda: nn.Linear(2, 1),
        batch=lambda seed, size: {"input": torch.full((size, 2), seed)},
        **others,
    )


def test_a_job_of_ones_own(tiny: Config) -> None:
    workload = job_workload(dataclasses.replace(tiny, job="file.py:mine"), a_job())
    assert workload.train(3)["input"].tolist() == [[derive_seed(0, "train", 3)] * 2] * 4
    assert tokens_of(workload.job, workload.train(3)) == 8  # rows of two integers each
    assert workload.data == "file.py:mine" and workload.rate == tiny.optimizer.learning_rate
    made = workload.job.optimizer(nn.Linear(2, 1).parameters())
    assert isinstance(made, torch.optim.AdamW)
    own = job_workload(tiny, a_job(optimizer=torch.optim.SGD))
    assert own.job.optimizer is torch.optim.SGD and own.rate is None


def test_muon_gets_the_matrices_of_layers_only(tiny: Config) -> None:
    """Not those of the embeddings, which stand once; and a job with none is told."""
    config = dataclasses.replace(tiny, optimizer=OptimizerConfig(name="muon+adamw"))
    job = gpt_workload(config).job
    named = dict(job.model().named_parameters())
    made = job.optimizer(named.items())
    names = {id(p): name for name, p in named.items()}
    matrices, rest = ({names[id(p)] for p in o.param_groups[0]["params"]} for o in made.parts)
    assert matrices | rest == named.keys() and {"embed.weight", "position.weight"} <= rest
    assert matrices == {name for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    with pytest.raises(ConfigError, match="numbered layer"):
        job_workload(config, a_job()).job.optimizer(nn.Linear(2, 1).named_parameters())
    with pytest.raises(ConfigError, match="brings its own"):
        job_workload(config, a_job(optimizer=torch.optim.SGD))

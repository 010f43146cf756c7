"""Heads and embeddings that are cut by words give the numbers of one process."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nets
import pytest
import torch
import transformers as hf
from odd.case import WIDTH, Stack, job
from optimizers import MuonAndAdamW
from runs import assert_same, capture_of, each_rank, even_plan, pipelined, plain
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job, Pipeline, PipeloomError, planning
from pipeloom.integrations.as_one_process import load_optimizer_states, optimizer_states
from pipeloom.ir.errors import PlanError
from pipeloom.ir.plan import Plan
from pipeloom.tracer.capture import capture
from pipeloom.tracer.split_words import heads, split_words

split_words_module = sys.modules[split_words.__module__]
SIZES = {"microbatches": 4, "microbatch_size": 2}
WORDS = 203

_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
    "attention_dropout": 0.0,
}


_T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "dropout_rate": 0.0}
_T5 |= {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}


def _causal(config: type, **given: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(config(**_SMALL, **given))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _causal(hf.GPT2Config, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "llama": _causal(hf.LlamaConfig),
    "gemma2": _causal(hf.Gemma2Config, head_dim=8, final_logit_softcapping=3.0),
    "qwen2": _causal(hf.Qwen2Config, tie_word_embeddings=True),
    "mistral": _causal(hf.MistralConfig),
    "granite": _causal(hf.GraniteConfig, logits_scaling=2.0),
    "phi": _causal(hf.PhiConfig, embd_pdrop=0.0, resid_pdrop=0.0),
    "opt": _causal(hf.OPTConfig, word_embed_proj_dim=16, ffn_dim=24, dropout=0.0),
    "gpt_neox": _causal(hf.GPTNeoXConfig, hidden_dropout=0.0),
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**_SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, num_heads=2, **_T5)),
}
"""Tied: gpt2, gemma2, qwen2, opt, bert, t5. With a bias: phi, bert. Scaled: t5, granite. Capped:
gemma2."""


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    """Some labels count, others (-100) do not; padding, which has no gradient in some embeddings, is among
    the inputs."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, 10), generator=draw)
    counts = torch.rand(ids.shape, generator=draw) < 0.7
    return {"input_ids": ids, "labels": torch.where(counts, ids, -100)}


def smoothed(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Hugging Face's own losses are in float32 at most."""
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    return fn.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), label_smoothing=0.1)


def family(name: str, *, double: bool) -> Job:
    """In float32 with its own loss, in float64 with labels smoothed."""
    single = Job(model=FAMILIES[name], batch=batch, optimizer=nets.sgd, name=name)
    return replace(nets.in_double(single), loss=smoothed) if double else single


class Net(nn.Module):
    """A head whose loss is a function of logits and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=3)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=bias)
        self.loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.middle(self.embed(input_ids)))), labels)


def _likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()


def _flat(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return fn.cross_entropy(logits.float().to(logits.dtype).view(-1, WORDS), labels.view(-1), **how)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smoothed": partial(_flat, label_smoothing=0.1),
    "summed": partial(_flat, reduction="sum"),
    "of-each": lambda logits, labels: _flat(logits, labels, reduction="none").square().mean(),
    "words-in-the-middle": lambda logits, labels: fn.cross_entropy(logits.transpose(1, 2), labels),
    "negative-likelihood": lambda logits, labels: fn.nll_loss(
        fn.log_softmax(logits, -1).flatten(0, 1), labels.flatten()
    ),
    "gathered": _likelihood,
    "z-loss": lambda logits, labels: _flat(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "capped": lambda logits, labels: _flat(3 * torch.tanh(logits / 3), labels),
    "masked": lambda logits, labels: _flat(
        logits.masked_fill(torch.arange(WORDS) > WORDS // 2, float("-inf")), labels.clamp(max=WORDS // 2)
    ),
}


def with_loss(name: str) -> Job:
    net = partial(Net, LOSSES[name], bias=len(name) % 2 == 0)
    return Job(model=lambda: net().double(), batch=batch, optimizer=nets.sgd, name=name)


GPT = nets.in_double(Job(model=partial(nets.GPT, 8, 1), batch=nets.token_batch, name="gpt"))


@pytest.mark.slow
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, double: bool) -> None:
    job = family(name, double=double)
    batches = [batch(seed, 8) for seed in range(3)]
    plan = even_plan(job, 4, words=3, placement=(0, 1, 1, 0), schedule="zb_v", **SIZES)
    expected = plain(job, batches[:2], 4, evaluate=batches[2:], clip_norm=1.0)
    found = pipelined(job, plan, batches[:2], evaluate=batches[2:], clip_norm=1.0)
    assert_same(found, expected, tolerance=1e-12 if double else 1e-5)
    assert plan.split_words


@pytest.mark.sampled("gathered")
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    job = with_loss(name)
    batches = [batch(seed, 8) for seed in range(2)]
    plan = even_plan(job, 3, words=4, **SIZES)
    (head,) = heads(capture_of(job))
    assert head.names[0] == "head.weight"
    assert_same(pipelined(job, plan, batches), plain(job, batches, 4), tolerance=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("key", "value"), [("labels", 10_000), ("input_ids", 10_000), ("input_ids", -1)])
def test_what_is_no_word_is_refused_as_with_whole_words(key: str, value: int) -> None:
    job = with_loss("summed")
    bad = {**(good := batch(0, 8)), key: good[key].clone().index_fill_(1, torch.tensor([1]), value)}
    with pytest.raises(PipeloomError, match="IndexError|RuntimeError"):
        pipelined(job, even_plan(job, 3, words=4, **SIZES), [bad])


@pytest.mark.slow
def test_outputs_are_put_together() -> None:
    job = family("gpt2", double=True)

    def outputs(words: int) -> tuple[float, dict[str, torch.Tensor]]:
        plan = even_plan(job, 2, words=words, **SIZES)
        return each_rank(job, plan, lambda pipeline: pipeline.outputs(batch(0, 8)))[0]

    whole, split = outputs(1), outputs(3)
    assert whole[1].keys() == {"logits"}
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups by the names that the model has; one that makes its state at once."""
    rest = dict(named_parameters)
    decayed = [rest.pop(name) for name in ("tokens.weight", "norm.weight") if name in rest]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [*rest.values()]}]
    return torch.optim.Adagrad(groups, lr=0.1, lr_decay=0.5, initial_accumulator_value=0.5)


def test_checkpoints_exports_and_groups_have_whole_names(tmp_path: Path) -> None:
    """A tied head, trained whole, is trained in 3 parts, then in 2, then whole again."""
    job = replace(GPT, optimizer=by_name)
    batches = [job.batch(seed, 4) for seed in range(3)]
    whole, *parts = (even_plan(job, 2, words=words, microbatches=2) for words in (1, 3, 2))
    shapes = [(n, t.shape) for n, t in job.model().state_dict().items()]

    def trains(plan: Plan, first: int, steps: int) -> list[float]:
        def work(pipeline: Pipeline) -> list[float]:
            if first:
                pipeline.load(tmp_path)
            losses = [pipeline.step(batch) for batch in batches[first : first + steps]]
            pipeline.save(tmp_path)
            state = pipeline.state_dict()
            assert [(n, t.shape) for n, t in state.items()] == shapes
            pipeline.load_weights(pipeline.export(tmp_path / "weights.safetensors"))
            pipeline.load_state_dict(state)
            assert all(torch.equal(t, state[n]) for n, t in pipeline.state_dict().items())
            return losses

        return each_rank(job, plan, work)[0]

    expected = trains(whole, 0, 3)
    in_turns = [*trains(parts[0], 0, 1), *trains(parts[1], 1, 1), *trains(whole, 2, 1)]
    assert in_turns == pytest.approx(expected, rel=1e-12)
    assert {*parts[0].split_words} == {"tokens.weight"}


@pytest.mark.slow
def test_a_trainer_made_for_one_process_saves_whole_states(tmp_path: Path) -> None:
    """Optimizer states of a head in 3 parts, loaded into one that is whole, and back."""
    job = replace(GPT, optimizer=torch.optim.AdamW)
    batches = [job.batch(seed, 4) for seed in range(3)]
    whole, parts = (even_plan(job, 2, words=words, microbatches=2) for words in (1, 3))
    between: dict[str, Any] = {}

    def steps(plan: Plan, first: int, count: int) -> list[float]:
        def work(pipeline: Pipeline) -> tuple[list[float], Any]:
            if first:
                pipeline.load_state_dict(between["weights"])
                load_optimizer_states(pipeline, between["states"])
            losses = [pipeline.step(batch) for batch in batches[first : first + count]]
            return losses, {"weights": pipeline.state_dict(), "states": optimizer_states(pipeline)}

        (losses, after), *_ = each_rank(job, plan, work)
        between.update(after)
        return losses

    expected = steps(whole, 0, 3)
    states = between["states"]
    in_turns = [*steps(parts, 0, 1), *steps(whole, 1, 1), *steps(parts, 2, 1)]
    assert in_turns == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(between["states"], states, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [MuonAndAdamW, torch.optim.Adafactor])
def test_optimizers_of_whole_matrices_are_refused(make: Callable[..., torch.optim.Optimizer]) -> None:
    job = replace(nets.job("gpt"), optimizer=make)
    captured = split_words(capture_of(job), {"tokens.weight": 2})
    with pytest.raises(PlanError, match="rows"):
        planning.with_updates(captured.graph, job)


def test_layers_as_wide_as_a_batch_has_rows_are_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be cut to see that it is none."""
    tried = Mock(wraps=split_words_module._cut_in_two)
    monkeypatch.setattr(split_words_module, "_cut_in_two", tried)
    assert [head.names for head in heads(capture(job(Stack), WIDTH))] == [("head.weight", "head.bias")]
    assert {call.args[1][0] for call in tried.call_args_list} == {"head.weight"}


@pytest.mark.parametrize("split", [{"nothing": 2}, {"tokens.weight": nets.VOCABULARY + 1}])
def test_what_cannot_be_split_is_refused(split: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="split"):
        split_words(capture_of(nets.job("gpt")), split)

"""Which modules a model is cut between."""

from collections.abc import Callable, Sequence

import pytest
import zoo
from odd.decisions import BranchInBlock, MixtureOfExperts
from torch import nn

from pipeloom.ir.errors import CutError
from pipeloom.tracer.fallback.units import derive_units, listed_units


def small() -> nn.Module:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.trunk = nn.Module()
    model.trunk.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    model.trunk.more = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.trunk.norm = nn.LayerNorm(4)
    model.neck = nn.Module()
    model.neck.parts = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model.heads = nn.ModuleDict({"left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})
    model.empty = nn.ModuleList()
    return model


def test_containers_are_replaced_by_their_items_and_large_trunks_opened() -> None:
    assert derive_units(small()) == (
        "stem.0",
        "stem.1",
        "trunk.layers.0",
        "trunk.layers.1",
        "trunk.more.0",
        "trunk.more.1",
        "trunk.norm",
        "neck",
        "heads.left",
        "heads.right",
        "empty",
    )
    assert "trunk" in derive_units(small(), frozenset({"trunk"}))


def test_a_module_with_two_names_is_one_unit() -> None:
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)
    assert derive_units(model) == ("a",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]),
        ("t5", ["encoder.embed_tokens", "encoder.block.0", "decoder.block.1", "lm_head"]),
        ("bert", ["bert.embeddings", "bert.encoder.layer.0", "cls"]),
    ],
)
def test_hugging_face_models_are_cut_between_their_layers(name: str, expected: list[str]) -> None:
    units = derive_units(zoo.job(name).model())
    assert set(expected) <= set(units)
    assert not any(".self_attn" in unit or ".mlp" in unit for unit in units)


def test_lists_may_name_containers() -> None:
    model = BranchInBlock()
    assert listed_units(model, [["blocks"], ["head"]]) == (
        ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
        ("head",),
    )


WRONG = {
    "Job.modules names 'block.1', which the model does not have\nhint: did you mean blocks.1?": [
        ["blocks.0", "block.1"],
        ["head"],
    ],
    "Job.modules names blocks.0 twice\nhint: name each module once": [["blocks.0", "blocks.0"], ["head"]],
    "Job.modules names blocks.0 and, inside it, blocks.0.net\nhint: name only one": [
        ["blocks.0", "blocks.0.net"],
        ["head"],
    ],
    "list 0 of Job.modules names no module\n"
    "hint: Job.modules is a list of FQN lists, one list per stage, as model.named_modules() has them": [
        [],
        ["head"],
    ],
}


@pytest.mark.parametrize(("message", "lists"), WRONG.items())
def test_wrong_lists_are_refused(message: str, lists: Sequence[Sequence[str]]) -> None:
    with pytest.raises(CutError) as caught:
        listed_units(BranchInBlock(), lists)
    assert str(caught.value) == message


@pytest.mark.parametrize("make", [BranchInBlock, MixtureOfExperts, small])
def test_units_are_disjoint(make: Callable[[], nn.Module]) -> None:
    model = make()
    inside = [id(m) for unit in derive_units(model) for m in model.get_submodule(unit).modules()]
    assert len(inside) == len(set(inside))

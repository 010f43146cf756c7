"""Layers and module calls from the ops' modules; Megatron's equal layers."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from random_ops import layered_search

from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import Op, Value
from pipeloom.planner.search.layer_groups import Piece, borders, calls, layer_names, layers
from pipeloom.planner.strategies.exact import equal


def ops_of(*modules: str) -> list[Op]:
    out = Value(name="v", shape=(1,), dtype="float32")
    return [Op(name=f"op{k}", target="x", inputs=(), outputs=(out,), module=m) for k, m in enumerate(modules)]


def test_layers_are_the_outermost_numbered_containers():
    modules = ["embed", "h.0.attn", "h.0.mlp.0", "h.0.mlp.1", "h.1.attn", "", "h.1.mlp.0", "norm", "head", ""]
    assert layers(ops_of(*modules)) == [Piece(0, 1), Piece(1, 4, "h.0"), Piece(4, 7, "h.1"), Piece(7, 10)]
    ops = ops_of("enc.0.a", "enc.1.a", "enc.norm", "dec.0.a", "dec.1.a", "enc.1.b", "head")
    assert [p.layer for p in layers(ops)] == ["enc.0", "enc.1", "dec.0", "dec.1", ""]


def test_without_containers_calls_of_modules_and_without_modules_ops():
    assert calls(ops_of("a", "a", "b", "a")) == [Piece(0, 2, "a"), Piece(2, 3, "b"), Piece(3, 4, "a")]
    assert layers(ops_of("a", "a", "b")) == [Piece(0, 2, "a"), Piece(2, 3, "b")]
    assert layers(ops_of("", "")) == [Piece(0, 1), Piece(1, 2)]


def test_borders_are_where_cuts_may_be():
    assert borders([Piece(0, 3), Piece(3, 5), Piece(5, 8)], [0, 1, 5, 8]) == [0, 5, 8]


def test_equal_layers():
    modules = ["embed", *(f"h.{k}.{part}" for k in range(8) for part in ("a", "b")), "norm", "head"]
    assert equal(layered_search(modules, 4)) == (0, 5, 9, 13, 19)
    odd = layered_search(modules, 3)
    assert sorted(np.diff(equal(odd))) == [5, 6, 8]  # 2, 3 and 3 layers, the embedding and the head
    with pytest.raises(PlanError, match="8 layers"):
        equal(replace(odd, caps=(10**9,) * 9))


def wired(*rows: str) -> list[Op]:
    """Ops as "module <- name name": one with a parameter, which reads what those made."""
    ops = []
    for row in rows:
        name, _, reads = row.partition(" <- ")
        out = Value(name=name, shape=(1,), dtype="float32")
        inputs = tuple(reads.split())
        ops.append(Op(name=name, target="x", inputs=inputs, outputs=(out,), params=("p",), module=name))
    return ops


def test_side_by_side_are_towers_and_their_layers_are_the_layers():
    """Two towers of two layers, each an attention and an MLP in a Sequential; run layer by layer in turn."""
    rows = before = [f"towers.{t}.embed" for t in range(2)]
    for depth, t in product(range(2), range(2)):
        name = f"towers.{t}.layers.{depth}"
        parts = [before[t], f"{name}.attn", f"{name}.mlp.0", f"{name}.mlp.1"]
        rows = [*rows, *(f"{later} <- {earlier}" for earlier, later in pairwise(parts))]
        before = [parts[-1] if other == t else last for other, last in enumerate(before)]
    ops = wired(*rows, f"head <- {' '.join(before)}")
    names = layer_names(ops)
    assert names["towers.1.layers.0.mlp.1"] == "towers.1.layers.0"
    assert names["towers.0.embed"] == names["head"] == ""
    inner = [f"towers.{t}.layers.{depth}" for depth in range(2) for t in range(2)]
    assert [p.layer for p in layers(ops)] == ["", *inner, ""]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (  # T5
            [
                "encoder.block.0.layer.0.k",
                "encoder.block.0.layer.1.k <- encoder.block.0.layer.0.k",
                "encoder.block.1.layer.0.k <- encoder.block.0.layer.1.k",
                "encoder.block.1.layer.1.k <- encoder.block.1.layer.0.k",
                "decoder.block.0.layer.0.k",
                "decoder.block.1.layer.0.k <- decoder.block.0.layer.0.k encoder.block.1.layer.1.k",
            ],
            {"encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"},
        ),
        (  # a Mixture of Experts
            [
                "layers.0.gate",
                *(f"layers.0.experts.{i}.w <- layers.0.gate" for i in range(3)),
                "layers.1.gate <- layers.0.experts.0.w layers.0.experts.1.w layers.0.experts.2.w",
                *(f"layers.1.experts.{i}.w <- layers.1.gate" for i in range(3)),
            ],
            {"layers.0", "layers.1"},
        ),
        (  # torchvision's Swin
            ["features.0.0", "features.1.0.attn <- features.0.0", "features.1.1.attn <- features.1.0.attn"],
            {"features.0", "features.1"},
        ),
        (  # heads of a convolution and a norm
            ["heads.0.0", "heads.0.1.norm <- heads.0.0", "heads.1.0", "heads.1.1.norm <- heads.1.0"],
            {"heads.0", "heads.1"},
        ),
        (  # tables of embeddings
            ["tables.0", "tables.1", "top.0 <- tables.0 tables.1", "top.1 <- top.0"],
            {"tables.0", "tables.1", "top.0", "top.1"},
        ),
    ],
)
def test_one_after_another_or_without_repetition_the_outermost_are_the_layers(rows, names):
    assert set(layer_names(wired(*rows)).values()) == names


def test_a_tower_of_blocks_may_have_towers_within():
    nested = wired(
        *(f"towers.{t}.arms.{a}.steps.0" for t in range(2) for a in range(2)),
        *(f"towers.{t}.arms.{a}.steps.1 <- towers.{t}.arms.{a}.steps.0" for t in range(2) for a in range(2)),
    )
    assert layer_names(nested)["towers.1.arms.0.steps.1"] == "towers.1.arms.0.steps.1"

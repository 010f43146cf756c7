"""Layers and module calls from the ops' modules; Megatron's equal layers."""

from dataclasses import replace
from itertools import groupby

import pytest

from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import Op, Value
from pipeloom.planner.search.layer_groups import Piece, borders, calls, layer_names, layers


def ops_of(*modules: str) -> list[Op]:
    out = Value(name="v", shape=(1,), dtype="float32")
    return [Op(name=f"op{k}", target="x", inputs=(), outputs=(out,), module=m) for k, m in enumerate(modules)]


def test_layers_are_the_outermost_numbered_containers():
    ops = ops_of(
        "embed",
        "h.0.attn",
        "h.0.mlp.0",
        "h.0.mlp.1",
        "h.1.attn",
        "",
        "h.1.mlp.0",
        "norm",
        "head",
        "",
    )
    assert layers(ops) == [Piece(0, 1), Piece(1, 4, "h.0"), Piece(4, 7, "h.1"), Piece(7, 10)]


def test_encoder_and_decoder():
    ops = ops_of("enc.0.a", "enc.1.a", "enc.norm", "dec.0.a", "dec.1.a", "enc.1.b", "head")
    assert [p.layer for p in layers(ops)] == ["enc.0", "enc.1", "dec.0", "dec.1", ""]


def test_without_containers_calls_of_modules_and_without_modules_ops():
    assert calls(ops_of("a", "a", "b", "a")) == [Piece(0, 2, "a"), Piece(2, 3, "b"), Piece(3, 4, "a")]
    assert layers(ops_of("a", "a", "b")) == [Piece(0, 2, "a"), Piece(2, 3, "b")]
    assert layers(ops_of("", "")) == [Piece(0, 1), Piece(1, 2)]


def test_every_op_is_in_one_piece():
    ops = ops_of("0.a", "1.a", "0.b", "1.b", "2.a", "", "0.c", "tail")
    pieces = layers(ops)
    assert [p.start for p in pieces][1:] == [p.end for p in pieces][:-1]
    assert (pieces[0].start, pieces[-1].end) == (0, len(ops))
    assert all(len(list(same)) == 1 for _, same in groupby(p.layer for p in pieces))


def test_borders_are_where_cuts_may_be():
    assert borders([Piece(0, 3), Piece(3, 5), Piece(5, 8)], [0, 1, 5, 8]) == [0, 5, 8]


def test_equal_layers(layered_search):
    from pipeloom.planner.strategies.equal import equal

    modules = ["embed", *(f"h.{k}.{part}" for k in range(8) for part in ("a", "b")), "norm", "head"]
    search = layered_search(modules, 4)
    assert equal(search) == (0, 5, 9, 13, 19)
    odd = layered_search(modules, 3)
    sizes = [end - start for start, end in zip(equal(odd), equal(odd)[1:], strict=False)]
    assert sorted(sizes) == [5, 6, 8]  # 2, 3 and 3 layers, the embedding and the head
    with pytest.raises(PlanError, match="8 layers for 9 stages"):
        equal(replace(odd, caps=(10**9,) * 9))


def wired(*rows: str) -> list[Op]:
    """Ops as "module <- name name": one with a parameter, which reads what those made."""
    ops = []
    for row in rows:
        module, _, reads = row.partition(" <- ")
        out = Value(name=module, shape=(1,), dtype="float32")
        ops.append(
            Op(
                name=module,
                target="x",
                inputs=tuple(reads.split()),
                outputs=(out,),
                params=("p",),
                module=module,
            )
        )
    return ops


def towers_in_turn(layer: str) -> list[Op]:
    """Two towers of two layers, each an attention and an MLP in a Sequential; run layer by layer in turn."""
    rows = [f"towers.{t}.embed" for t in range(2)]
    before = [f"towers.{t}.embed" for t in range(2)]
    for depth in range(2):
        for t in range(2):
            name = f"towers.{t}.{layer}.{depth}"
            rows += [
                f"{name}.attn <- {before[t]}",
                f"{name}.mlp.0 <- {name}.attn",
                f"{name}.mlp.1 <- {name}.mlp.0",
            ]
            before[t] = f"{name}.mlp.1"
    return wired(*rows, f"head <- {' '.join(before)}")


def test_side_by_side_are_towers_and_their_layers_are_the_layers():
    ops = towers_in_turn("layers")
    names = layer_names(ops)
    assert names["towers.1.layers.0.mlp.1"] == "towers.1.layers.0"
    assert names["towers.0.embed"] == names["head"] == ""
    assert [p.layer for p in layers(ops)] == [
        "",
        *(f"towers.{t}.layers.{depth}" for depth in range(2) for t in range(2)),
        "",
    ]


def test_one_after_another_the_outermost_are_the_layers():
    """Names as T5, a Mixture of Experts, and torchvision's Swin and Inception have them."""
    t5 = wired(
        "encoder.block.0.layer.0.k",
        "encoder.block.0.layer.1.k <- encoder.block.0.layer.0.k",
        "encoder.block.1.layer.0.k <- encoder.block.0.layer.1.k",
        "encoder.block.1.layer.1.k <- encoder.block.1.layer.0.k",
        "decoder.block.0.layer.0.k",
        "decoder.block.1.layer.0.k <- decoder.block.0.layer.0.k encoder.block.1.layer.1.k",
    )
    assert set(layer_names(t5).values()) == {
        f"{part}.block.{i}" for part in ("encoder", "decoder") for i in (0, 1)
    }
    experts = wired(
        "layers.0.gate",
        *(f"layers.0.experts.{i}.w <- layers.0.gate" for i in range(3)),
        "layers.1.gate <- layers.0.experts.0.w layers.0.experts.1.w layers.0.experts.2.w",
        *(f"layers.1.experts.{i}.w <- layers.1.gate" for i in range(3)),
    )
    assert set(layer_names(experts).values()) == {"layers.0", "layers.1"}
    stages = wired(
        "features.0.0", "features.1.0.attn <- features.0.0", "features.1.1.attn <- features.1.0.attn"
    )
    assert set(layer_names(stages).values()) == {"features.0", "features.1"}


def test_what_does_not_repeat_within_a_tower_is_not_its_layers():
    """Tables of embeddings; and heads of a convolution and a norm."""
    tables = wired("tables.0", "tables.1", "top.0 <- tables.0 tables.1", "top.1 <- top.0")
    assert list(layer_names(tables).values()) == ["tables.0", "tables.1", "top.0", "top.1"]
    heads = wired("heads.0.0", "heads.0.1.norm <- heads.0.0", "heads.1.0", "heads.1.1.norm <- heads.1.0")
    assert set(layer_names(heads).values()) == {"heads.0", "heads.1"}


def test_a_tower_of_blocks_may_have_towers_within():
    nested = wired(
        *(f"towers.{t}.arms.{a}.steps.0" for t in range(2) for a in range(2)),
        *(f"towers.{t}.arms.{a}.steps.1 <- towers.{t}.arms.{a}.steps.0" for t in range(2) for a in range(2)),
    )
    assert layer_names(nested)["towers.1.arms.0.steps.1"] == "towers.1.arms.0.steps.1"

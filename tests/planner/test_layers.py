"""Layers and module calls from the ops' modules; Megatron's equal layers."""

from dataclasses import replace
from itertools import groupby

import pytest

from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import Op, Value
from pipeloom.planner.search import Piece, borders, calls, layers


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
    from pipeloom.planner.strategies import equal

    modules = ["embed", *(f"h.{k}.{part}" for k in range(8) for part in ("a", "b")), "norm", "head"]
    search = layered_search(modules, 4)
    assert equal(search) == (0, 5, 9, 13, 19)
    odd = layered_search(modules, 3)
    sizes = [end - start for start, end in zip(equal(odd), equal(odd)[1:], strict=False)]
    assert sorted(sizes) == [5, 6, 8]  # 2, 3 and 3 layers, the embedding and the head
    with pytest.raises(PlanError, match="8 layers for 9 stages"):
        equal(replace(odd, caps=(10**9,) * 9))

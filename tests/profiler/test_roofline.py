"""Estimated costs against arithmetic by hand. What autograd keeps is tested in test_measure."""

import warnings
from dataclasses import replace

import pytest

from pipeloom.ir.cluster import Device
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.graph import Op, OpGraph, Parameter, Value
from pipeloom.ir.profile import OpCost
from pipeloom.profiler.roofline import UNALIGNED, roofline

DEVICE = Device(
    name="gpu",
    memory_bytes=1,
    flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    memory_bytes_per_s=1e9,
    efficiency={"matmul": 0.5, "default": 0.25},
    launch_s=1e-3,
)


def value(name: str, *shape: int, dtype: str = "float32", grad: bool = True) -> Value:
    return Value(name=name, shape=shape, dtype=dtype, needs_grad=grad)


def cost(target: str, inputs: list[Value], out: Value, *, params=None, device=DEVICE, **how) -> OpCost:
    """The cost of one op that reads these values (made by a first op) and parameters."""
    floats = [v for v in inputs if "float" in v.dtype] or [value("unused", 1)]
    source = Op(name="source", target="aten.alias.default", inputs=("x",), outputs=tuple(floats))
    others = tuple(v for v in inputs if v not in floats)
    names = tuple(v.name for v in inputs)
    op = Op(name="op", target=target, inputs=names, outputs=(out,), params=tuple(params or ()), **how)
    graph = OpGraph(
        name="one",
        inputs=(value("x", 1, grad=False), *others),
        ops=(source, op),
        buffers=(),
        loss=out.name,
        parameters=tuple(Parameter(name=n, shape=s, dtype="float32") for n, s in (params or {}).items()),
    )
    return roofline(graph, device).costs["op"]


PRODUCT_S = 2 * 64 * 32 * 128 / 0.5e9
SLOW = Device(name="d", memory_bytes=1, flops_per_s={"float32": 1e12}, memory_bytes_per_s=1e3)
LINEAR = {"params": {"w": (32, 128)}}


@pytest.mark.parametrize(
    ("target", "inputs", "out", "how", "forward_s", "gradient_s", "saves"),
    [
        # y[64, 32] = x[64, 128] @ w: 2 * 64 * 32 * 128 FLOPs at half of 1e9 per second
        ("linear.default", [value("a", 64, 128)], value("y", 64, 32), LINEAR, PRODUCT_S, PRODUCT_S, "a"),
        # the dtype chooses the peak
        (
            "linear.default",
            [value("a", 64, 128, dtype="bfloat16")],
            value("y", 64, 32, dtype="bfloat16"),
            LINEAR,
            PRODUCT_S / 4,
            PRODUCT_S / 4,
            "a",
        ),
        # elementwise: bytes are moved; for the gradient the saved, the arriving and the made ones
        ("gelu.default", [value("a", 1000)], value("y", 1000), {}, 8000 / 0.25e9, 12000 / 0.25e9, "a"),
        # an addition passes its gradient on, and sums it for b
        ("add.Tensor", [value("a", 1000), value("b", 10)], value("y", 1000), {}, None, 4040 / 0.25e9, ""),
        # grouped
        (
            "conv2d.default",
            [value("a", 1, 8, 10, 10)],
            value("y", 1, 16, 8, 8),
            {"params": {"w": (16, 2, 3, 3)}},
            2 * 16 * 64 * 18 / 0.25e9,
            None,
            "a",
        ),
        # of a view only the gradient of a slice costs
        ("slice.Tensor", [value("a", 1000)], value("y", 500), {"view": True}, -1e-3, 6000 / 0.25e9, ""),
    ],
)
def test_times_by_hand(target, inputs, out, how, forward_s, gradient_s, saves) -> None:
    """Seconds without the launch. saves: names of values."""
    made = cost(f"aten.{target}", inputs, out, **how)
    if forward_s is not None:
        assert made.forward_s == pytest.approx(forward_s + 1e-3)
    if gradient_s is not None:
        assert made.input_grad_s == pytest.approx(gradient_s + 1e-3)
    assert made.saves == tuple(saves)
    assert how is not LINEAR or made.weight_grad_s == made.input_grad_s


def test_what_costs_nothing_and_what_is_bound_by_memory():
    made = cost("aten.gelu.default", [value("x0", 10, grad=False)], value("y", 10, grad=False))
    assert (made.saves, made.input_grad_s, made.weight_grad_s) == ((), 0.0, 0.0)
    made = cost("aten.mm.default", [value("a", 4, 8), value("b", 8, 2)], value("y", 4, 2), device=SLOW)
    assert made.forward_s == pytest.approx(4 * (32 + 16 + 8) / 1e3)
    assert made.saves == ("a", "b") and made.weight_grad_s == 0.0
    whole = cost("aten.reshape.default", [value("x0", 10, 10)], value("y", 100), view=True)
    assert whole == OpCost(forward_s=0.0, passes=("x0",))


def test_a_looked_up_table_is_not_read_whole():
    ids = value("ids", 4, dtype="int64", grad=False)
    made = cost("aten.embedding.default", [ids], value("y", 4, 100), params={"table": (10**6, 100)})
    assert made.forward_s == pytest.approx(2 * 1600 / (0.25 * 1e9) + 1e-3)
    assert made.weight_grad_s > 4e8 / (0.25 * 1e9)  # but its gradient is written whole
    assert made.saves == ("ids",)


@pytest.mark.parametrize(
    ("attributes", "share"), [("((%, %, %), {})", 1), ("((%, %, %, None, 0.0, True), {})", 2)]
)
def test_attention(attributes, share):
    inputs = [value(n, 2, 4, 32, 16) for n in "qkv"]
    out = value("y", 2, 4, 32, 16)
    made = cost("aten.scaled_dot_product_attention.default", inputs, out, attributes=attributes)
    flops = 4 * 2 * 4 * 32 * 32 * 16 / share
    assert made.forward_s == pytest.approx(flops / (0.25 * 1e9) + 1e-3)
    assert made.input_grad_s == pytest.approx(2.5 * flops / (0.25 * 1e9) + 1e-3)
    assert made.saves == ("q", "k", "v", "y") and made.extra_saved_bytes == 2 * 4 * 32 * 4


def test_a_causal_mask_saves_nothing_on_the_cpu():
    inputs, out = [value(n, 2, 4, 32, 16) for n in "qkv"], value("y", 2, 4, 32, 16)
    target, cpu = "aten.scaled_dot_product_attention.default", replace(DEVICE, name="cpu")
    whole, causal = (
        cost(target, inputs, out, device=cpu, attributes=text)
        for text in ("((%, %, %), {})", "((%, %, %, None, 0.0, True), {})")
    )
    assert causal.forward_s == whole.forward_s and causal.input_grad_s == whole.input_grad_s


def test_unknown_ops_are_named():
    with pytest.warns(UserWarning, match="mine.special.default"):
        made = cost("mine.special.default", [value("x0", 1000)], value("y", 1000))
    assert made.forward_s == pytest.approx(8000 / (0.25 * 1e9) + 1e-3) and made.saves == ("x0",)


def test_a_device_without_rates_is_refused():
    with pytest.raises(ConfigError, match="bare has no flops_per_s"):
        cost("aten.gelu.default", [value("a", 1)], value("y", 1), device=Device(name="bare", memory_bytes=1))


def test_recurrent_layers_count_as_products_and_keep_their_gates() -> None:
    """8 rows of 32 steps pass both matrices of an LSTM."""
    a, y, h = value("a", 8, 32, 128), value("y", 8, 32, 256), value("h", 1, 8, 256)
    weights = {"w": (1024, 128), "u": (1024, 256), "b": (1024,), "c": (1024,)}
    estimated = cost("aten.lstm.input", [a, h], y, params=weights)
    product_s = 2 * 8 * 32 * 1024 * (128 + 256) / 0.5e9 + 1e-3
    for seconds in (estimated.forward_s, estimated.input_grad_s, estimated.weight_grad_s):
        assert seconds == pytest.approx(product_s)
    assert estimated.saves == ("a", "h") and estimated.extra_saved_bytes == 8 * 32 * 2 * 1024 * 4


def test_a_bias_has_a_kernel_of_its_own_and_a_cast_is_cast_back() -> None:
    """Its gradient sums over rows, at 0.27 of a normalisation's rate, and takes a launch."""
    a, y = value("a", 64, 128), value("y", 64, 32)
    plain, biased = (
        cost("aten.linear.default", [a], y, params={"w": (32, 128)} | more) for more in ({}, {"b": (32,)})
    )
    sums_s = (y.bytes + 4 * 32) / (0.27 * 0.25e9)
    assert biased.weight_grad_s == pytest.approx(plain.weight_grad_s + sums_s + 1e-3)
    cast = cost("aten._to_copy.default", [a], value("y", 64, 128, dtype="bfloat16"))
    assert cast.input_grad_s == cast.forward_s > 1e-3
    assert cost("aten.add.Tensor", [a], value("y", 64, 128)).input_grad_s == 0


@pytest.mark.parametrize(("words", "slower"), [(1040, 1), (1041, 1 / UNALIGNED)])
def test_odd_widths_are_slow_in_16_bits(words: int, slower: float) -> None:
    """As a vocabulary of 50,257; also in both gradients."""
    a, b = value("a", 64, 128, dtype="bfloat16"), value("b", 128, words, dtype="bfloat16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = cost("aten.mm.default", [a, b], value("y", 64, words, dtype="bfloat16"))
    product_s = slower * 2 * 64 * words * 128 / 2e9
    assert found.forward_s == pytest.approx(product_s + 1e-3)
    assert found.input_grad_s == pytest.approx(2 * (product_s + 1e-3))
    assert ["no multiple of 8" in str(w.message) for w in told] == [True] * (slower > 1)

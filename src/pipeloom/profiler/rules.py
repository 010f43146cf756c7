"""What each kind of op costs and what autograd keeps for its backward, as one table.

Kept tensors follow PyTorch's `tools/autograd/derivatives.yaml` (2.13): `mul` keeps each factor that another
factor's gradient needs, `relu` and `softmax` their result, `gelu` its input, and so on. Where one op stands
for a fused kernel (attention, layer_norm, cross_entropy) the statistics that the kernel keeps are added.
The measured profile is the truth; a test holds this table to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import isqrt, prod
from typing import Literal

Class = Literal["matmul", "recurrent", "attention", "convolution", "normalisation", "elementwise", "free"]
Keeps = Literal["nothing", "input", "inputs", "output", "factors", "divisor", "indices", "queries"]
Extra = Literal[
    "nothing",
    "mask",
    "noise",
    "statistics",
    "channel statistics",
    "positions",
    "places",
    "probabilities",
    "attention",
    "gates",
]
OrderRule = Literal["at once", "last factor", "divisor", "power", "scores"]


@dataclass(frozen=True)
class Rule:
    """One kind of op.

    kind: op class; "free" ops run no kernel.
    keeps: "input" the first input; "output" the first output; "inputs" all inputs; "factors" each operand
        that the gradient of another one needs; "divisor" the last input; "indices" the inputs that are no
        floating-point numbers; "queries" attention: see roofline.
    extra: kept besides: "mask" a byte per number; "noise" a number per number; "statistics" two float32 per
        row of the last dimension; "channel statistics" two float32 per channel; "positions" an int64 per
        output number; "places" the same, unless it is an output itself; "probabilities" as much as the first
        input, and one number; "attention" see roofline; "gates" for each row of the first input as many
        numbers as the weights have rows; PyTorch was seen to keep 0.9 to 2.1 times that on the CPU.
    passes: the gradient of an input of the output's shape is the output's own gradient.
    scratch: scratch of the backward as a multiple of the first input.
    order: in which the backward makes gradients, see `gradient_order.py`.
    """

    kind: Class = "elementwise"
    keeps: Keeps = "nothing"
    extra: Extra = "nothing"
    passes: bool = False
    scratch: float = 0.0
    order: OrderRule = "at once"


_TABLE: dict[Rule, str] = {
    Rule("matmul", "factors", order="last factor"): "linear matmul mm bmm",
    Rule("matmul", "factors"): """
        addmm baddbmm addbmm dot mv addmv einsum tensordot bilinear _grouped_mm _scaled_mm
        grouped_mm_fallback""",
    Rule("recurrent", "inputs", "gates"): "lstm gru rnn_tanh rnn_relu",
    Rule("convolution", "factors"): """
        convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d""",
    Rule("attention", "queries", "attention", order="scores"): """
        scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention""",
    Rule("normalisation", "input", "statistics"): "layer_norm native_layer_norm rms_norm _fused_rms_norm",
    Rule("normalisation", "input", "channel statistics"): """
        batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training cudnn_batch_norm group_norm native_group_norm instance_norm""",
    Rule("normalisation", "output"): "softmax _softmax log_softmax _log_softmax _safe_softmax",
    Rule("normalisation", "indices", "probabilities", scratch=1.0): "cross_entropy_loss",
    Rule("elementwise", "indices"): """
        embedding scatter scatter_add scatter_reduce index_add index_put index_copy where masked_fill
        masked_scatter masked_select nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd""",
    Rule("elementwise", "indices", scratch=1.0): "index index_select gather take_along_dim",
    Rule("elementwise", "indices", "places", scratch=1.0): "sort topk",
    Rule("elementwise", "inputs", scratch=1.0): "take",
    Rule("elementwise", "nothing", "mask"): "native_dropout bernoulli",
    Rule("elementwise", "nothing", "noise"): "dropout feature_dropout alpha_dropout",
    Rule("elementwise", "input", "positions"): """
        max_pool1d max_pool2d max_pool3d max_pool2d_with_indices""",
    Rule("elementwise", "input"): """
        avg_pool1d avg_pool2d avg_pool3d gelu silu mish softplus log log2 log10 log1p sin cos tan asin acos
        atan sinh cosh abs leaky_relu elu celu selu hardtanh hardswish hardsigmoid relu6 clamp clamp_min
        clamp_max erf erfc logit log_sigmoid log_sigmoid_forward glu var var_mean std_mean cumprod
        softshrink hardshrink digamma lgamma _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d im2col""",
    Rule("elementwise", "input", scratch=1.0, order="power"): "pow square",
    Rule("elementwise", "output"): "relu sigmoid tanh exp exp2 expm1 sqrt reciprocal",
    Rule("elementwise", "output", scratch=1.0, order="power"): "rsqrt",
    Rule("elementwise", "inputs"): """
        maximum minimum fmax fmin max min amax amin prod norm linalg_vector_norm logsumexp std atan2 hypot
        smooth_l1_loss l1_loss mse_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        kl_div prelu _prelu_kernel lerp addcdiv fmod remainder cdist cosine_similarity""",
    Rule("elementwise", "factors", order="last factor"): "mul",
    Rule("elementwise", "factors"): "addcmul outer cross",
    Rule("elementwise", "divisor", order="divisor"): "div true_divide",
    Rule("elementwise", passes=True): """
        add sub clone contiguous reshape _to_copy to type_as lift_fresh_copy detach_copy""",
    Rule("elementwise"): """
        neg sum mean nansum cat stack hstack vstack cumsum flip roll repeat repeat_interleave
        constant_pad_nd pad tril triu sign floor ceil round trunc argsort argmax argmin eq ne lt le gt ge any
        all isnan isinf logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not bitwise_xor
        __and__ __or__ __xor__ __invert__ floor_divide diff fill copy select_scatter slice_scatter arange
        zeros ones full rand randn zeros_like ones_like full_like rand_like randn_like new_zeros new_ones
        new_full scalar_tensor one_hot histc bincount rsub nonzero unique upsample_nearest2d
        upsample_bilinear2d _upsample_nearest_exact2d pixel_shuffle reflection_pad2d replication_pad2d""",
    Rule("free"): """
        alias detach broadcast_tensors lift_fresh empty empty_like empty_strided new_empty _unsafe_view
        sym_size item""",
}

RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE.items() for name in names.split()}

VIEW = Rule("free")
UNKNOWN = Rule("elementwise", "input")
"""For ops that are not in the table: elementwise, and keeping the first input."""


def base_name(target: str) -> str:
    """The operation's name without namespace and overload.

    >>> base_name("aten.add.Tensor"), base_name("aten._native_batch_norm_legit_functional.default")
    ('add', '_native_batch_norm_legit_functional')
    """
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def rule_of(target: str) -> Rule:
    """How an op counts, also one that is not in the table."""
    return RULES.get(base_name(target), UNKNOWN)


# Floating-point operations of one forward call, from shapes alone; a multiply and an add count as two.

Shape = tuple[int, ...]

_CAUSAL = re.compile(r"'is_causal': True|^\(\(%, %, %, [^,]+, [^,]+, True")


def matmul_flops(name: str, operands: Sequence[Shape], out: Shape) -> int:
    """2 m n k for each of the products in linear, matmul, bmm, addmm and their kin.

    >>> matmul_flops("linear", [(8, 128, 64), (256, 64), (256,)], (8, 128, 256)) == 2 * 8 * 128 * 64 * 256
    True
    >>> [matmul_flops("matmul", shapes, (48,)) for shapes in ([(4, 48), (4,)], [(48, 4), (4,), (48,)])]
    [384, 384]
    """
    return 2 * prod(out) * _contracted(name, operands, out)


def recurrent_flops(operands: Sequence[Shape], weights: Sequence[Shape]) -> int:
    """Each row of the input, a step of a sequence, passes all weights of all layers and directions.

    >>> recurrent_flops([(8, 32, 128), (1, 8, 256)], [(1024, 128), (1024, 256), (1024,), (1024,)])
    201326592
    """
    return 2 * prod(operands[0][:-1]) * sum(prod(shape) for shape in weights if len(shape) > 1)


_EQUATION = re.compile(r"'([^']+)'")


def einsum_flops(operands: Sequence[Shape], attributes: str) -> int:
    """2 for each combination of what the letters of the equation stand for. Operands may come in any order.

    >>> einsum_flops([(8, 32, 64), (64, 4, 5)], "(('btd,dhk->bthk', [%, %]), {})") == 2 * 8 * 32 * 64 * 4 * 5
    True
    >>> shapes = [(8, 32, 4, 16), (4, 16, 64)]
    >>> einsum_flops(shapes, "(('hkd,...hk->...d', [%, %]), {})") == 2 * 8 * 32 * 4 * 16 * 64
    True
    """
    found = _EQUATION.search(attributes)
    terms = found[1].replace(" ", "").partition("->")[0].split(",") if found else []
    for shapes in permutations(operands, len(terms)):
        lengths: dict[str | int, int] = {}
        if all(_named_alike(term, shape, lengths) for term, shape in zip(terms, shapes, strict=True)):
            return 2 * prod(lengths.values())
    return 2 * max(map(prod, operands))  # as a matrix by a vector: its letters are not known


def _named_alike(term: str, shape: Shape, lengths: dict[str | int, int]) -> bool:
    """Whether letters of a term stand for the lengths of a shape, which are noted. Those of "..." are counted
    from the last one; any may be 1 where another operand's is not."""
    before, dots, after = term.partition("...")
    between = range(len(before) + len(after) - len(shape), 0) if dots else ()
    names = (*before, *between, *after)
    if len(names) != len(shape):
        return False
    for name, length in zip(names, shape, strict=True):
        known = lengths.setdefault(name, length)
        if 1 not in (known, length) and known != length:
            return False
        lengths[name] = max(known, length)
    return True


def _contracted(name: str, operands: Sequence[Shape], out: Shape) -> int:
    """The length of the dimension that is summed over."""
    widest = max(operands, key=len)
    if name == "linear" or not out or len(widest) < 2:
        return widest[-1] if widest else 1
    rows = out[-2] if len(out) > 1 else 1
    for a in operands:
        for b in operands:
            if len(a) > 1 and len(b) > 1 and a[-1] == b[-2] and a[-2] == rows and b[-1] == out[-1]:
                return a[-1]
    if name == "bilinear":  # a matrix for each number of a row of the result
        return prod(widest) // max(1, out[-1])
    if name == "tensordot":  # all others of the operands' dimensions are the result's
        return isqrt(prod(operands[0]) * prod(operands[-1]) // max(1, prod(out)))
    if min(map(len, operands)) == 1:  # a matrix by a vector
        return prod(widest) // max(1, prod(out))
    return operands[0][-1] if operands[0] else 1


def convolution_flops(name: str, operands: Sequence[Shape], out: Shape) -> int:
    """Each output number is a product with one filter; groups are in the filter's shape.

    A transposed convolution does the same work per input number.

    >>> convolution_flops("conv2d", [(1, 3, 32, 32), (16, 3, 3, 3)], (1, 16, 30, 30)) == 2 * 16 * 30 * 30 * 27
    True
    """
    image, weight = operands[0], next((s for s in operands[1:] if len(s) > 2), operands[-1])
    return 2 * prod(image if "transpose" in name else out) * prod(weight[1:])


def attention_flops(operands: Sequence[Shape], out: Shape, attributes: str) -> int:
    """Q K^T and the weighted sum of V; half of it under a causal mask (FlashAttention-2, 2307.08691, 4.1).

    >>> attention_flops([(2, 4, 32, 16)] * 3, (2, 4, 32, 16), "((%, %, %), {})")
    524288
    >>> attention_flops([(2, 4, 32, 16)] * 3, (2, 4, 32, 16), "((%, %, %), {'is_causal': True})")
    262144
    """
    query, key = operands[0], operands[min(1, len(operands) - 1)]
    whole = 2 * key[-2] * (prod(query) + prod(out))
    return whole // 2 if _CAUSAL.search(attributes) else whole

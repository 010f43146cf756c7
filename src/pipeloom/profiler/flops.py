"""Floating-point operations of one forward call, from shapes alone; a multiply and an add count as two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

Shape = tuple[int, ...]

_CAUSAL = re.compile(r"'is_causal': True|^\(\(%, %, %, [^,]+, [^,]+, True")


def matmul_flops(name: str, operands: Sequence[Shape], out: Shape) -> int:
    """2 m n k for each of the products in linear, matmul, bmm, addmm and their kin.

    >>> matmul_flops("linear", [(8, 128, 64), (256, 64), (256,)], (8, 128, 256)) == 2 * 8 * 128 * 64 * 256
    True
    """
    return 2 * prod(out) * _contracted(name, operands, out)


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

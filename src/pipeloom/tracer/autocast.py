"""Mixed precision on CPU tensors as another device does it.

`torch.autocast("cuda")` and `torch.autocast("cpu")` cast different operations: a softmax, an exponential or a
norm is float32 on the one and bfloat16 on the other. Models are captured on tensors of the CPU, whatever they
will run on, so the lists of the CPU are replaced for that time by those of the device.

                               operation under torch.autocast
                                            |
    dispatch key AutocastCPU:   cast the arguments by the device's list, then call the operation below it
                                            |
    autograd, tracing, kernels:     see casts and an operation, as on the device
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from .random import TRACING_LOCK

LOWER_PRECISION = tuple(
    """_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
    prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
    linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention""".split()
)
FLOAT32 = tuple(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim""".split()
)
FLOAT32_RESULT = tuple(
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
)
WIDEST = tuple(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
)
REFUSED = ("binary_cross_entropy",)
"""Operations that `torch.autocast("cuda")` runs in the lower dtype, in float32, with a float32 result of
arguments as they are, in the widest dtype of their arguments, and not at all.

Source: `ATen/autocast_mode.h` of PyTorch 2.13; a test compares the lists with that file."""

RECURRENT = tuple(
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
"""A GPU's kernels for whole sequences (cuDNN's) run in the lower dtype."""

COMPOSED = tuple(
    """cross_entropy_loss nll_loss_nd square arccos arcsin float_power.Scalar float_power.Tensor_Scalar
    float_power.Tensor_Tensor special_erfinv special_expm1 special_log1p special_softmax special_log_softmax
    special_logsumexp inner linalg_matmul matrix_power linalg_matrix_power linalg_norm linalg_norm.ord_str
    pairwise_distance norm_except_dim _weight_norm cov corrcoef conv1d.padding conv2d.padding conv3d.padding
    _convolution_mode trapezoid.x trapezoid.dx trapz.x trapz.dx cumulative_trapezoid.x cumulative_trapezoid.dx
    sum_to_size linalg_cond linalg_cond.p_str vander linalg_vander
    upsample_linear1d.vec upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec upsample_trilinear3d.vec
    upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec upsample_nearest1d.vec _upsample_nearest_exact1d.vec
    upsample_nearest2d.vec _upsample_nearest_exact2d.vec upsample_nearest3d.vec
    _upsample_nearest_exact3d.vec""".split()
)
"""In no list, but made of operations that are: a graph that kept one whole would cast nothing inside it."""

_KEY = torch._C.DispatchKey.AutocastCPU


def autocast_around(device: torch.device) -> bool:
    """Whether `torch.autocast` is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class Autocast(NamedTuple):
    """Mixed precision in this dtype, as on a device of this type ("cpu", "cuda")."""

    dtype: torch.dtype
    device: str


@contextmanager
def autocast_region(autocast: Autocast | None, *, run_on: str = "cpu") -> Iterator[None]:
    """Tensors on `run_on` are cast like that in the block; with None not at all.

    While CPU tensors are cast as on another device, those of all threads are; only one thread at a time is
    in such a block, and no block in another.

    >>> x = torch.ones(2, 2)
    >>> for device in ("cuda", "cpu"):
    ...     with autocast_region(Autocast(torch.bfloat16, device)):
    ...         (x @ x).dtype, torch.softmax(x @ x, -1).dtype
    (torch.bfloat16, torch.float32)
    (torch.bfloat16, torch.bfloat16)
    """
    dtype = autocast.dtype if autocast is not None else torch.bfloat16
    region = torch.autocast(run_on, dtype=dtype, enabled=autocast is not None)
    if autocast is None or run_on != "cpu" or autocast.device == "cpu":
        with region:
            yield
        return
    with TRACING_LOCK:
        library = _lists_of_accelerators()
        try:
            with region:
                yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]


def _lists_of_accelerators() -> Library:
    """The lists above in the place of the CPU's, until the library is destroyed."""
    library = Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]
    rules: list[tuple[tuple[str, ...], Callable[[Any], Callable[..., Any]]]] = [
        (COMPOSED, lambda op: partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)),
        (LOWER_PRECISION + RECURRENT, lambda op: _with_arguments(op, _lower_dtype)),
        (FLOAT32, lambda op: _with_arguments(op, lambda args: torch.float32)),
        (FLOAT32_RESULT, _with_float32_result),
        (WIDEST, lambda op: _with_arguments(op, _widest_dtype)),
        (REFUSED, _refused),
    ]
    kernels = {name: rule(_overload(name)) for names, rule in rules for name in names}
    of_the_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    not_cast = {name[6:] for name in of_the_cpu if name.startswith("aten::")} - set(kernels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*(O|o)verrid", category=UserWarning)
        for name, kernel in (kernels | dict.fromkeys(not_cast, fallthrough_kernel)).items():
            library.impl(name, kernel, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _below(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
        return op(*args, **kwargs)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _lower_dtype(arguments: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest_dtype(arguments: Any) -> torch.dtype:
    wide = any(_eligible(leaf) and leaf.dtype == torch.float32 for leaf in tree_leaves(arguments))
    return torch.float32 if wide else torch.get_autocast_dtype("cpu")


def _with_arguments(op: Any, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs))

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if _eligible(tensor) else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return _below(op, *args, **kwargs)

    return call


def _with_float32_result(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and _eligible(args[0]):
            args, kwargs = args[:position], kwargs | {"dtype": torch.float32}
        return _below(op, *args, **kwargs)

    return call


def _refused(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "binary_cross_entropy is unsafe under autocast, whose gradients it would not survive: "
            "use binary_cross_entropy_with_logits, or leave out the sigmoid in front of it"
        )

    return call

"""Ops over channels: `F.batch_norm` with running statistics, as in evaluation.

An element is computed of one element and of its channel's numbers, so this is a row of the table,
though no broadcasting of torch's brings these together. With statistics of the batch it is a
reduction, in an order that is torch's or cudnn's.

Eager takes one of three kernels, which round in other places: torch's own, which does the same for
contiguous tensors and for channels_last (its Normalization.cu), and one of cudnn's for each of
these. Their formulas were found by comparing: one gives no -0.0, the other has other products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..layout import contiguous
from .reductions import is_recordable
from .row import FUNCTIONAL, Op, spelled

# of each kernel: its formula, whether there are weights, and whether it is cudnn's
KERNELS = {
    "native": ("fma(w * (x - m), rsqrt(v + eps), b)", True, False),
    "native, not affine": ("fma(x - m, rsqrt(v + eps), 0.0)", False, False),
    "cudnn": ("fma(w * (x - m), rsqrt(v + eps), b) + 0.0", True, True),
    "cudnn, channels last": ("r = rsqrt(v + eps); fma(x, w * r, fma(-(m * w), r, b))", True, True),
}
_MOST_DIMS, _MOST_IN_BATCH = 5, 65535  # that cudnn takes


def _eager(cudnn: bool) -> Callable[..., torch.Tensor]:
    def normed(x: Any, m: Any, v: Any, *rest: Any) -> torch.Tensor:
        *affine, eps = rest
        w, b = affine or (None, None)
        return torch.batch_norm(x, w, b, m, v, False, 0.0, eps, cudnn)

    return normed


@cache
def _normed(kernel: str) -> Op:
    formula, affine, cudnn = KERNELS[kernel]
    weights = " w:channel b:channel" if affine else ""
    return Op(
        "batch_norm", f"x m:channel v:channel{weights} eps:opmath", formula, copies="f",
        eager=_eager(cudnn), costs=2,
    )  # fmt: skip


def _kernel_for(x: Any, w: Any) -> str:
    """Which of eager's kernels computes it, for weights `w` or None."""
    if w is None:
        return "native, not affine"
    single = w.dtype is torch.float32 and x.dtype is not torch.bfloat16
    if not (single and x.ndim > 2 and x.shape[0] <= _MOST_IN_BATCH):
        return "native"
    if not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()):
        return "native"
    # `chain.infer` refuses what is neither
    return "cudnn" if x.stride() == contiguous(x.shape) else "cudnn, channels last"


FUNCTIONAL.add("batch_norm")


@spelled()
def batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Op, tuple[Any, ...]] | None:  # fmt: skip
    if training is not False or (weight is None) is not (bias is None):
        return None
    if type(eps) is not float or type(momentum) is not float or eps <= 0.0:
        return None
    if not is_recordable(input) or input.ndim > _MOST_DIMS:
        return None
    op, statistics = _normed(_kernel_for(input, weight)), (input, running_mean, running_var)
    return op, ((*statistics, eps) if weight is None else (*statistics, weight, bias, eps))

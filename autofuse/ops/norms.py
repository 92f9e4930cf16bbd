"""`layer_norm` and `rms_norm`, over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .reductions import NODES, REDUCTIONS, Reduction, is_row_wise
from .row import registrar

_reduced = registrar(REDUCTIONS)


@cache
def normed_row(name: str, params: str) -> Reduction:
    eager = {
        ("layer_norm", "x eps:opmath"):
            lambda x, eps: torch.layer_norm(x, x.shape[-1:], None, None, eps),
        ("layer_norm", "x w b eps:opmath"):
            lambda x, w, b, eps: torch.layer_norm(x, x.shape[-1:], w, b, eps),
        ("rms_norm", "x eps:opmath"): lambda x, eps: torch.rms_norm(x, x.shape[-1:], None, eps),
        ("rms_norm", "x w eps:opmath"): lambda x, w, eps: torch.rms_norm(x, x.shape[-1:], w, eps),
    }[name, params]  # fmt: skip
    statistics = tuple(
        Reduction(f"{what}_of_{name}", params, "", keepdim=True, eager=_statistic(name, params, k))
        for k, what in enumerate({"layer_norm": ("mean", "rstd"), "rms_norm": ("rstd",)}[name], 1)
    )
    keeps = params.removesuffix(" eps:opmath")
    x, *affine = keeps.split()
    read = [x, "rstd", *affine, "eps"] if name == "rms_norm" else [x, "mean", "rstd", *affine]
    grad = f"{name}_backward(g, {', '.join(read)});" * (1 + len(affine)) + "none"
    return Reduction(
        name, params, "", keeps=keeps, grad=grad, whole=True, eager=eager, statistics=statistics
    )


def _statistic(name: str, params: str, which: int) -> Callable[..., torch.Tensor]:
    """What gives one of the results of torch's op for a norm."""
    absent = [None] * (("w" not in params) + (name == "layer_norm" and "b" not in params))

    def eager(x: Any, *more: Any) -> torch.Tensor:
        *affine, eps = more
        op = getattr(torch.ops.aten, NODES[name])
        return op(x, x.shape[-1:], *affine, *absent, eps)[which]

    return eager


def _is_last(x: Any, shape: Any) -> bool:
    """Whether `shape`, as torch takes it, is that of a row."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 1 or type(shape[0]) is not int:
        return False
    return is_row_wise(x, -1) and shape[0] == x.shape[-1]


@_reduced()
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> tuple[Reduction, tuple[Any, ...]] | None:  # fmt: skip
    # with one of weight and bias alone torch's kernel was compiled to what differs by its lanes
    if (weight is None) is not (bias is None) or not _is_last(input, normalized_shape):
        return None
    if type(eps) not in (float, int) or type(cudnn_enable) is not bool:
        return None
    if weight is None:
        return normed_row("layer_norm", "x eps:opmath"), (input, float(eps))
    return normed_row("layer_norm", "x w b eps:opmath"), (input, weight, bias, float(eps))


@_reduced()
def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> tuple[Reduction, tuple[Any, ...]] | None:
    if not _is_last(input, normalized_shape) or (eps is not None and type(eps) not in (float, int)):
        return None
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)  # of the type it adds in
    if weight is None:
        return normed_row("rms_norm", "x eps:opmath"), (input, eps)
    return normed_row("rms_norm", "x w eps:opmath"), (input, weight, eps)

"""Ops over channels: `F.batch_norm` with running statistics, as in evaluation.

An element is computed of one element and of its channel's numbers, so this is a row of the table,
though no broadcasting of torch's brings these together. Eager's kernels, cudnn's among them, round
alike for contiguous tensors (`chain.infer` has the layouts); with statistics of the batch they are
reductions in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .reductions import is_recordable
from .row import FUNCTIONAL, Op, spelled

_NORMED = "fma({}x - m{}, rsqrt(v + eps), {})"


def _eager(affine: bool) -> Callable[..., torch.Tensor]:
    def normed(x: Any, m: Any, v: Any, *rest: Any) -> torch.Tensor:
        *weights, eps = rest
        w, b = weights if affine else (None, None)
        enabled = torch.backends.cudnn.enabled
        return torch.batch_norm(x, w, b, m, v, False, 0.0, eps, enabled)

    return normed


@cache
def _normed(affine: bool) -> Op:
    own = " w:channel b:channel" if affine else ""
    return Op(
        "batch_norm", f"x m:channel v:channel{own} eps:opmath",
        _NORMED.format(*(("w * (", ")", "b") if affine else ("", "", "0.0"))),
        copies="f", eager=_eager(affine),
    )  # fmt: skip


FUNCTIONAL.add("batch_norm")


@spelled()
def batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Op, tuple[Any, ...]] | None:  # fmt: skip
    if training is not False or (weight is None) is not (bias is None):
        return None
    if type(eps) is not float or type(momentum) is not float or not is_recordable(input):
        return None
    statistics = input, running_mean, running_var
    if weight is None:
        return _normed(False), (*statistics, eps)
    return _normed(True), (*statistics, weight, bias, eps)

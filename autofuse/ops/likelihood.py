"""Losses of classes, `F.cross_entropy` and `F.nll_loss`: torch's own, but for their gradient.

Eager's gradient of the logits goes through memory as often as all the rest: zeros of their shape,
in which each row gets one element, what log_softmax makes of them, perhaps a cast. Here it is one
kernel, and the zeros are never there. So these are ops of a chain that torch computes, outside of
its kernel, whatever the order of its sums is; what follows is another chain. Rows that a kernel can
reduce as torch does, it does with what comes before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from .losses import REDUCED
from .reductions import (
    REDUCTIONS,
    ROW_COMPOSITES,
    Reduction,
    is_recordable,
    is_row_wise,
    soft_row,
)
from .row import registrar

_aten = torch.ops.aten
_reduced = registrar(REDUCTIONS)
_HOW = {"none": 0, **REDUCED}


@cache
def _logarithms() -> Reduction:
    """log_softmax without casts, as torch calls it for a loss of classes."""
    own = soft_row("log_softmax", False)
    eager = lambda x: torch._log_softmax(x, -1, False)  # noqa: E731

    def outside(out: Any, x: Any) -> None:
        _aten._log_softmax.out(x, -1, False, out=out)

    apart = replace(own, outside=outside, eager=eager)
    return replace(own, instead=apart, eager=eager)


@_reduced()
def _log_softmax(
    input: Any, dim: Any, half_to_float: Any
) -> tuple[Reduction, tuple[Any, ...]] | None:
    return (_logarithms(), (input,)) if not half_to_float and is_row_wise(input, dim) else None


@cache
def _of_classes(reduction: str, ignored: int, casts: bool = False) -> Reduction:
    """What is left of rows of logarithms of probabilities x for the classes t; by torch itself.

    casts: whether x is made float32 first.
    """
    how = _HOW[reduction]
    forward = _aten.nll_loss_forward

    def read(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32) if casts else x

    def outside(out: Any, weight: Any, x: Any, t: Any) -> None:
        forward.output(read(x), t, None, how, ignored, output=out, total_weight=weight)

    def weight(x: Any, t: Any) -> Any:
        return forward.default(read(x), t, None, how, ignored)[1]

    return Reduction(
        "nll_loss", "x t", "", keeps="x t", grad="nll_loss_backward(g, x, t, weight); none",
        axes=(-1,) if reduction == "none" else (-2, -1), of_all=reduction != "none", casts=casts,
        statistics=(Reduction("weight_of_nll_loss", "x t", "", eager=weight),),
        outside=outside, of_classes=(how, ignored),
        instead=None if casts else _of_classes(reduction, ignored, True),
        eager=lambda x, t: torch._C._nn.nll_loss_nd(read(x), t, None, how, ignored),
    )  # fmt: skip


@_reduced()
def nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
) -> tuple[Reduction, tuple[Any, ...]] | None:  # fmt: skip
    if any(option is not None for option in (weight, size_average, reduce)):
        return None
    if reduction not in _HOW or type(ignore_index) is not int or abs(ignore_index) >= 1 << 31:
        return None
    if not is_recordable(input) or input.ndim != 2:
        return None
    return _of_classes(reduction, ignore_index), (input, target)


@registrar(ROW_COMPOSITES)()
def cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Callable[[], torch.Tensor] | None:  # fmt: skip
    found = nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    if found is None or label_smoothing != 0 or target.dtype is not torch.int64:
        return None
    if target.shape != input.shape[:1] or not target.is_contiguous():
        return None
    if not (torch.is_grad_enabled() and input.requires_grad):
        return None
    return lambda: F.nll_loss(
        torch._log_softmax(input, -1, False), target, ignore_index=ignore_index, reduction=reduction
    )

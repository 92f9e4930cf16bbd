"""Reductions over groups of channels: `F.group_norm`.

A row is a group's part of a tensor [N, C, ...]. Every element is then computed of its group's
statistics and of its channel's weights, by a kernel of its own: a row has one block, and there are
fewer rows than a GPU has room for blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..layout import Ints
from .reductions import NODES, REDUCTIONS, Reduction, every_axis, is_recordable
from .row import Op, registrar

NODES["group_norm"] = "native_group_norm"
_COSTS = 4  # torch has two functions and three kernels for it: 31 us on the host of an H100
_AFFINE = "x w:channel b:channel m r"
# what gives elements x, with m and r of their group, the mean and what 1 is divided by to deviate
_FINISHED = {
    "plain": Op("group_norm", "x m r", "mul(sub(x, m), r)"),
    "affine": Op("group_norm", _AFFINE, "a = mul(r, w); fma(a, x, sub(b, mul(a, m)))"),
    # torch has another kernel for these
    "affine, one element": Op("group_norm", _AFFINE, "fma(mul(sub(x, m), r), w, b)"),
}


def finished(op: Reduction, shape: Ints) -> Op:
    """What gives the elements of the result of `op`, of `shape`."""
    if "w" not in op.names:
        return _FINISHED["plain"]
    return _FINISHED["affine" if math.prod(shape[2:]) > 1 else "affine, one element"]


def _statistic(groups: int, which: int) -> Callable[..., torch.Tensor]:
    """What gives one of the results of torch's op."""

    def eager(x: Any, *more: Any) -> torch.Tensor:
        *affine, eps = more
        n, c, *row = x.shape
        w, b = affine or (None, None)
        op = torch.ops.aten.native_group_norm
        return op(x, w, b, n, c, math.prod(row), groups, eps)[which]

    return eager


@cache
def _group_norm(groups: int, ndim: int, affine: bool) -> Reduction:
    params = f"x {'w:channel b:channel ' if affine else ''}eps:opmath"
    statistics = tuple(
        Reduction(f"{what}_of_group_norm", params, "", eager=_statistic(groups, which))
        for which, what in enumerate(("mean", "rstd"), 1)
    )

    def eager(x: Any, *more: Any) -> torch.Tensor:
        *affine, eps = more
        w, b = affine or (None, None)
        return torch.group_norm(x, groups, w, b, eps)

    return Reduction(
        "group_norm", params, "", keeps="x w b" if affine else "x", whole=True,
        axes=every_axis(ndim - 1), groups=groups, statistics=statistics, eager=eager, costs=_COSTS,
    )  # fmt: skip


@registrar(REDUCTIONS)()
def group_norm(
    input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> tuple[Reduction, tuple[Any, ...]] | None:  # fmt: skip
    if type(num_groups) is not int or num_groups < 1 or type(eps) not in (float, int):
        return None
    if type(cudnn_enabled) is not bool:
        return None
    # with one of weight and bias alone torch's kernels have other formulas
    if (weight is None) is not (bias is None) or not is_recordable(input) or input.ndim < 2:
        return None
    op = _group_norm(num_groups, input.ndim, weight is not None)
    affine = () if weight is None else (weight, bias)
    return op, (input, *affine, float(eps))

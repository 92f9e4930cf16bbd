"""Losses: rows of the op table for their elements, and the reductions of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from .autocast import is_half
from .reductions import Over, Reduction, components_of, every_axis, is_recordable
from .row import FUNCTIONAL, OPS, Op, composite, is_number, row, spelled

_backward = torch.ops.aten
_nn: Any = torch._C._nn
REDUCED = {"mean": 1, "sum": 2}  # by torch's numbers, which functions of C take

# fmt: off

# --- their elements -------------------------------------------------------------------------------

row("mse_loss", "x y", "d = x - y; d * d", narrow="d = rnd(x - y); d * d",
    eager=partial(F.mse_loss, reduction="none"),
    grad="mse_loss_backward(g, x, y); mse_loss_backward(g, y, x)")
row("smooth_l1_loss", "x y b:common",
    "z = abs(x - y); 0.5 * z * z / b if z < b else fma(-0.5, b, z)",
    narrow="z = abs(rnd(x - y)); 0.5 * z * z / b if z < b else z - rnd(0.5 * b)",
    one_dtype=True, eager=lambda x, y, b: F.smooth_l1_loss(x, y, reduction="none", beta=b),
    grad="smooth_l1_loss_backward(g, x, y, b); smooth_l1_loss_backward(g, y, x, b); none")
row("huber_loss", "x y d:common", "z = abs(x - y); 0.5 * z * z if z < d else d * fma(-0.5, d, z)",
    narrow="z = abs(rnd(x - y)); 0.5 * z * z if z < d else d * (z - rnd(0.5 * d))", one_dtype=True,
    copies="f", eager=lambda x, y, d: F.huber_loss(x, y, reduction="none", delta=d),
    grad="huber_loss_backward(g, x, y, d); huber_loss_backward(g, y, x, d); none")

# --- what their derivatives call: the kernels of PyTorch's own backward ops -----------------------

row("mse_loss_backward", "g x y", "2.0 * (x - y) * g", narrow="rnd(rnd(2.0 * rnd(x - y)) * g)",
    contiguous="cpu cuda", eager=lambda g, x, y: _backward.mse_loss_backward(g, x, y, 0))
row("smooth_l1_loss_backward", "g x y b:common",
    "d = x - y; -g if d < -b else g if d > b else d * g / b",
    narrow="d = rnd(x - y); -g if d < -b else g if d > b else rnd(d * g) / b",
    contiguous="cpu cuda",
    eager=lambda g, x, y, b: _backward.smooth_l1_loss_backward(g, x, y, 0, b))
row("huber_loss_backward", "g x y d:common",
    "z = x - y; -g * d if z < -d else g * d if z > d else z * g",
    narrow="z = rnd(x - y); -g * d if z < -d else g * d if z > d else z * g", contiguous="cpu cuda",
    eager=lambda g, x, y, d: _backward.huber_loss_backward(g, x, y, 0, d))

# fmt: on

# --- of all elements ------------------------------------------------------------------------------

FUNCTIONAL.update(("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "nll_loss",
                   "binary_cross_entropy_with_logits"))  # fmt: skip
_COMPLEMENT = Op("complement", "x", "1 - x")  # of a probability
LOGITS = "binary_cross_entropy_with_logits"
# of what torch makes their elements, before it takes the mean or sum
LOSSES = {
    "mse_loss": ("x y", "mse_loss(x, y)"),
    "smooth_l1_loss": ("x y b:common", "smooth_l1_loss(x, y, b)"),
    "huber_loss": ("x y d:common", "huber_loss(x, y, d)"),
    LOGITS: ("x y", "sub(mul(complement(y), x), log_sigmoid(x))"),
}


@cache
def _of_all(name: str, reduction: str, ndim: int) -> Reduction:
    params, elements = LOSSES[name]
    how = REDUCED[reduction]
    eager: Callable[..., torch.Tensor] = {
        "mse_loss": lambda x, y: _nn.mse_loss(x, y, how),
        "smooth_l1_loss": lambda x, y, b: _nn.smooth_l1_loss(x, y, how, b),
        "huber_loss": lambda x, y, d: _nn.huber_loss(x, y, how, d),
        LOGITS: lambda x, y: torch.binary_cross_entropy_with_logits(x, y, None, None, how),
    }[name]
    components = components_of(
        f"{reduction}({elements})", Over(every_axis(ndim), True), {"complement": _COMPLEMENT}
    )
    read = [param.partition(":")[0] for param in params.split()]
    rule = f"{name}_backward(g, {', '.join(read)})"
    grad = "; ".join([rule, rule, *("none" for _ in read[2:])])
    return Reduction(
        name, params, "", keeps="x y", grad=grad, axes=every_axis(ndim), of_all=True,
        components=components, eager=eager, costs=len(components),
    )  # fmt: skip


def _is_plain(x: Any, y: Any, options: tuple[Any, ...]) -> bool:
    """Whether a loss is of elements of its operands alone, without old or rare options."""
    return all(option is None for option in options) and x.shape == y.shape


def _loss(
    name: str, x: Any, y: Any, reduction: str, options: tuple[Any, ...], *width: Any
) -> tuple[Op, tuple[Any, ...]] | None:
    """What a loss is recorded as."""
    if not all(is_number(number) and number > 0 for number in width):
        return None
    if not _is_plain(x, y, options):
        return None
    operands = (x, y, *map(float, width))
    if reduction == "none" and name in OPS:
        return OPS[name], operands
    if reduction not in REDUCED or not is_recordable(x):
        return None
    if any(number > torch.finfo(x.dtype).max for number in width):
        return None
    return _of_all(name, reduction, x.ndim), operands


@spelled()
def mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", weight: Any = None,
) -> tuple[Op, tuple[Any, ...]] | None:  # fmt: skip
    if _is_refused(input, target):
        return None
    return _loss("mse_loss", input, target, reduction, (size_average, reduce, weight))


def _is_refused(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a backward is to come that torch, up to 2.11 and not in 2.13, has for one dtype."""
    if x.dtype is y.dtype or not torch.is_grad_enabled():
        return False
    casts = torch.is_autocast_enabled(x.device.type)
    first, second = (torch.float32 if casts and is_half(z.dtype) else z.dtype for z in (x, y))
    return first is not second and (x.requires_grad or y.requires_grad)


@spelled()
def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", beta: float = 1.0,
) -> tuple[Op, tuple[Any, ...]] | None:  # fmt: skip
    return _loss("smooth_l1_loss", input, target, reduction, (size_average, reduce), beta)


@spelled()
def huber_loss(
    input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> tuple[Op, tuple[Any, ...]] | None:
    return _loss("huber_loss", input, target, reduction, (weight,), delta)


@spelled()
def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", pos_weight: Any = None,
) -> tuple[Op, tuple[Any, ...]] | None:  # fmt: skip
    options = weight, size_average, reduce, pos_weight
    return _loss(LOGITS, input, target, reduction, options)


@composite()
def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", weight: Any = None,
) -> torch.Tensor | None:  # fmt: skip
    if not _is_plain(input, target, (size_average, reduce, weight)):
        return None
    if reduction == "none":
        return (input - target).abs()
    if reduction not in REDUCED or not is_recordable(input):
        return None
    apart = (input - target).abs()
    return apart.mean() if reduction == "mean" else apart.sum()

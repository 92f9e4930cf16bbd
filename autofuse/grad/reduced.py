"""Gradients of reductions: by torch's own ops, and as steps of a backward's program.

The gradient of rows that were reduced is made of sums over rows in torch's order of adding, with
pointwise steps before and after them. That of weights is torch's, of the gradient of the result,
which the kernel stores for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..chain.meta import Meta
from ..kernel.division import NORM_SUMS, SOFT_SUM
from ..ops.arithmetic import CASTS
from ..ops.reductions import Reduction
from ..ops.row import OPS, Op
from ..program.program import Ref

Needs = tuple[bool, ...]  # of each operand, whether it gets a gradient
Values = dict[str, Any]  # what a rule reads, in its order, by the names of the op


def by_torch(
    op: Reduction, g: torch.Tensor, values: Values, shape: tuple[int, ...], needs: Needs
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for the operands of `op`, as autograd's node computes them.

    shape: of the first operand.
    """
    if op.name in ("sum", "mean"):
        g = _spread(op.keepdim, shape)(g)
        return (g / shape[-1] if op.name == "mean" else g,)
    if op.statistics:
        return _norm_by_torch(needs)(g, *values.values())
    out = values["out"]
    backward = getattr(torch.ops.aten, f"_{op.name}_backward_data")
    return (backward(g, out, -1, out.dtype),)


@cache
def _norm_by_torch(needs: Needs) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A function of the gradient of a layer norm and of what its rule reads."""
    mask = [*needs[:-1], False, False][:3]  # the last one is the epsilon

    def backward(
        g: Any, x: Any, mean: Any, rstd: Any, w: Any = None, b: Any = None
    ) -> tuple[torch.Tensor | None, ...]:
        op = torch.ops.aten.native_layer_norm_backward
        return op(g, x, x.shape[-1:], mean, rstd, w, b, mask)

    return backward


@cache
def _spread(keepdim: bool, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives every element of a row the number of the row."""
    return lambda g: (g if keepdim else g.unsqueeze(-1)).expand(shape)


# --- as steps of a Tape ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Later:
    """A gradient that torch computes from values of a Tape, once its kernel has run."""

    call: Callable[..., tuple[torch.Tensor | None, ...]]  # gives several...
    refs: tuple[Ref, ...]
    which: int  # ...of which this is one
    meta: Meta


def _sum(name: str, params: str) -> Reduction:
    return Reduction(name, params, "", result=torch.float32, keepdim=True)


def _row(name: str, params: str, expr: str, **columns: Any) -> Op:
    return Op(name, params, expr, contiguous="cuda cpu", **columns)


_SOFT_SUM = _sum(SOFT_SUM, "x")
_NORM_SUM, _NORM_DOT = map(_sum, NORM_SUMS, ("x", "x r"))
_OF_SOFT = {
    "softmax": _row("softmax_backward", "g out s", "fma(-out, s, g)"),
    "log_softmax": _row("log_softmax_backward", "g out s", "fma(-exp(out), s, g)"),
}
_WEIGHTED = _row("weighted", "g w", "mul(g, w)", result=torch.float32)
_CENTRED = _row("centred", "g x m", "mul(g, sub(x, m))")


@cache
def _of_norm(weighted: bool) -> Op:
    """The gradient of the rows of a layer norm of n columns; s and t are its sums."""
    scaled, own = ("mul(n, w)", " w") if weighted else ("n", "")
    whole = f"sub(fma(g, {scaled}, -mul(t, mul(r, sub(x, m)))), s)"
    params = f"g x m r s t n:opmath{own}"
    return _row("layer_norm_backward", params, f"mul({whole}, mul(1 / n, r))")


def on_tape(
    op: Reduction, tape: Any, g: Any, values: Values, metas: tuple[Meta, ...], needs: Needs
) -> tuple[Any, ...]:
    """As `by_torch`, values of `tape`; metas: of the operands that are tensors."""
    shape = tuple(metas[0].shape)
    if op.name in ("sum", "mean"):
        seen = tape.part(_spread(op.keepdim, shape), g)
        if op.name == "mean":
            return (tape.apply(OPS["div"], (seen, tape.number(shape[-1]))),)
        return (seen,)
    if op.statistics:
        found: list[Any] = [_norm_on_tape(tape, g, values, shape[-1]) if needs[0] else None]
        if any(needs[1:]):
            call = _norm_by_torch((False, *needs[1:]))
            refs = tuple(map(tape.step, (g, *values.values())))
            found += [Later(call, refs, k, meta) for k, meta in enumerate(metas[1:], 1)]
        return tuple(found)
    if op.name == "softmax":
        g = tape.apply(OPS["mul"], (g, values["out"]))
    total = tape.apply(_SOFT_SUM, (g,))
    return (tape.apply(_OF_SOFT[op.name], (g, values["out"], total)),)


def _norm_on_tape(tape: Any, g: Any, values: Values, columns: int) -> Any:
    x, mean, rstd, *weight = (value for name, value in values.items() if name != "b")
    if weight:
        scaled = tape.apply(_WEIGHTED, (g, *weight))
    else:
        wide = tape.dtype(g) is torch.float32
        scaled = g if wide else tape.apply(CASTS[torch.float32], (g,))
    total = tape.apply(_NORM_SUM, (scaled,))
    dot = tape.apply(_NORM_DOT, (tape.apply(_CENTRED, (scaled, x, mean)), rstd))
    n = tape.number(float(columns))
    return tape.apply(_of_norm(bool(weight)), (g, x, mean, rstd, total, dot, n, *weight))

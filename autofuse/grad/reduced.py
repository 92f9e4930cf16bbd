"""Gradients of reductions: by torch's own ops, and as steps of a backward's program.

The gradient of rows that were reduced is made of sums over rows in torch's order of adding, with
pointwise steps before and after them. That of weights is torch's, of the gradient of the result,
which the kernel stores for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ..chain.meta import Meta
from ..kernel.division import MOMENTS, NORM_SUMS, SOFT_SUM
from ..ops.arithmetic import CASTS
from ..ops.losses import LOGITS, LOSSES, REDUCED
from ..ops.reductions import Over, Reduction, number_a_row
from ..ops.row import OPS, Op
from ..program.program import Ref
from ..torch_private import without_autocast

Needs = tuple[bool, ...]  # of each operand, whether it gets a gradient
Values = dict[str, Any]  # what a rule reads, in its order, by the names of the op


def _column(op: Reduction) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives numbers of rows the dimensions that rows have."""
    if op.keepdim:
        return lambda x: x
    if len(op.axes) == 1:
        return partial(torch.unsqueeze, dim=op.axes[0])
    dims = [None if axis in op.axes else slice(None) for axis in range(op.axes[0], 0)]
    return lambda x: x[(..., *dims)]


def by_torch(
    op: Reduction, shape: tuple[int, ...], needs: Needs, names: Sequence[str]
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """What computes the gradients for the operands of `op`, as autograd's node does.

    Of the gradient of the result and the values `names` that the rule reads. shape: of the first
    operand.
    """
    if op.name in ("sum", "mean"):
        spread, (_, columns) = spread_by(op, shape), op.count(shape)
        return lambda g: (spread(g) / columns if op.name == "mean" else spread(g),)
    number = _column(op)
    if op.name == "vector_norm":
        return lambda g, x, out: (_length_by_torch(number(g), x, number(out)),)
    if op.name in MOMENTS:
        return partial(_moment_by_torch, op, number, names)
    if op.name == "logsumexp":
        return lambda g, x, out: (_log_of_sum_by_torch(number(g), x, number(out)),)
    if op.name == "nll_loss":
        return partial(_classes_by_torch, *op.of_classes)
    if op.name in LOSSES:
        return partial(_loss_by_torch, op, needs, _elements(op, shape))
    if op.statistics:
        norm = _norm_by_torch(op.name, needs, shape[-1])
        return partial(_rms_norm_by_torch, norm, names, needs) if "eps" in names else norm
    backward = getattr(torch.ops.aten, f"_{op.name}_backward_data").default
    return lambda g, out: (backward(g, out, op.axes[0], out.dtype),)


def _length_by_torch(g: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # functions, for operators of what was saved would be recorded
    direction = torch.masked_fill(torch.div(x, out), torch.eq(out, 0), 0)
    return torch.mul(g, direction)


def _log_of_sum_by_torch(g: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(g, torch.exp(torch.sub(x, out)))


def _elements(op: Reduction, shape: tuple[int, ...]) -> int:
    """By how many elements a loss is divided."""
    return math.prod(shape) if op.reduces == ("mean",) else 1


def _loss_by_torch(
    op: Reduction, needs: Needs, count: int, g: torch.Tensor, x: torch.Tensor, y: torch.Tensor,
    *width: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    nothing = [None for _ in width]
    if op.name == LOGITS:
        first = torch.mul(torch.sub(torch.sigmoid(x), y), g) if needs[0] else None
        second = torch.mul(x, torch.neg(g)) if needs[1] else None
        if op.reduces == ("mean",):
            first = None if first is None else torch.div(first, count)
            second = None if second is None else torch.div(second, count)
        return first, second
    backward = getattr(torch.ops.aten, f"{op.name}_backward").default
    how = REDUCED[op.reduces[0]]
    first = backward(g, x, y, how, *width) if needs[0] else None
    second = backward(g, y, x, how, *width) if needs[1] else None
    return first, second, *nothing


def _classes_by_torch(
    how: int, ignored: int, g: torch.Tensor, x: torch.Tensor, t: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    own = x.new_empty(x.shape, dtype=g.dtype)  # of which the shape is read
    found = torch.ops.aten.nll_loss_backward.default(g, own, t, None, how, ignored, weight)
    return found.to(x.dtype), None


def _moment_by_torch(
    op: Reduction,
    number: Callable[[torch.Tensor], torch.Tensor],
    names: Sequence[str],
    g: torch.Tensor,
    *values: Any,
) -> tuple[torch.Tensor | None, ...]:
    named = dict(zip(names, values, strict=True))
    x, c = named["x"], named["c"]
    if "out" in named:  # of a root: the gradient of the variance
        out = named["out"]
        g = torch.masked_fill(torch.div(g, torch.mul(out, 2)), torch.eq(out, 0), 0)
    apart = torch.sub(x, torch.mean(x, op.axes, True))
    _, columns = op.count(tuple(x.shape))
    return torch.mul(torch.mul(number(g), 2.0 / (columns - c)), apart), None


def _tensors(values: Values) -> list[Any]:
    return [value for name, value in values.items() if name != "eps"]


@lru_cache(1024)
def _norm_by_torch(
    name: str, needs: Needs, columns: int
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A function of the gradient of a norm and of the tensors that its rule reads."""
    shape = [columns]  # to take it from the rows takes 2.2 us of 9
    mask = [*needs[:-1], False, False]  # the last one is the epsilon
    if name == "layer_norm":
        op = torch.ops.aten.native_layer_norm_backward.default
        return lambda g, x, mean, rstd, w=None, b=None: op(g, x, shape, mean, rstd, w, b, mask[:3])
    op = torch.ops.aten._fused_rms_norm_backward.default
    return lambda g, x, rstd, w=None: op(g, x, shape, rstd, w, mask[:2])


def _rms_norm_by_torch(
    norm: Callable[..., tuple[torch.Tensor | None, ...]],
    names: Sequence[str],
    needs: Needs,
    g: torch.Tensor,
    *values: Any,
) -> tuple[torch.Tensor | None, ...]:
    """What `norm` gives, or its like with a graph."""
    named = dict(zip(names, values, strict=True))
    if torch.is_grad_enabled():
        return _rms_norm_again(g, named, needs)
    return norm(g, *_tensors(named))


@without_autocast
def _rms_norm_again(
    g: torch.Tensor, values: Values, needs: Needs
) -> tuple[torch.Tensor | None, ...]:
    """Those of rms_norm with a graph: torch's op has none, its node computes them otherwise then.

    So there is such a node, of views, for one tensor may be both operands; or, of one that has come
    to require no grad since, of a leaf.
    """
    x, w = _led_to(values["x"]), values.get("w")
    w = None if w is None else _led_to(w)
    normed = torch.rms_norm(x, x.shape[-1:], w, values["eps"])
    wanted: list[Any] = [one for one, need in zip((x, w), needs, strict=False) if need]
    found = iter(torch.autograd.grad(normed, wanted, g, create_graph=True))
    return tuple([next(found) if need else None for need in needs])


def _led_to(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


@lru_cache(1024)
def spread_by(op: Reduction, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives every element of a row the number of the row."""
    column = _column(op)
    return lambda g: column(g).expand(shape)


# --- as steps of a Tape ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Later:
    """A gradient that torch computes from values of a Tape, once its kernel has run."""

    call: Callable[..., tuple[torch.Tensor | None, ...]]  # gives several...
    refs: tuple[Ref, ...]
    which: int  # ...of which this is one
    meta: Meta


@dataclass(frozen=True, slots=True)
class OneOfRow:
    """A gradient of rows that are zero but for one element each."""

    value: Ref  # that of the row, for each of its elements
    mask: Ref  # whether it is the one
    meta: Meta


@cache
def _sum(name: str, params: str, axes: tuple[int, ...] = (-1,)) -> Reduction:
    return Reduction(name, params, "", result=torch.float32, keepdim=True, axes=axes)


def _row(name: str, params: str, expr: str, **columns: Any) -> Op:
    return Op(name, params, expr, contiguous="cuda cpu", **columns)


_NORM_SUM, _NORM_DOT = map(_sum, NORM_SUMS, ("x", "x r"))
_OF_SOFT = {
    "softmax": _row("softmax_backward", "g out s", "fma(-out, s, g)"),
    "log_softmax": _row("log_softmax_backward", "g out s", "fma(-exp(out), s, g)"),
}
ROWS = _row("rows", "g", "g")
SPREAD = _row("spread", "g x", "g")  # along the rows of x
# the sum of such a row is its element, which zeros are added to; so it is never -0.0
_OF_ONE = _row(
    "log_softmax_backward", "g m:bool out", "s = g + 0; fma(-exp(out), s, g if m else 0)"
)
ONE_OF_ROW = _row("nll_loss_backward", "g m:bool", "g if m else 0")
# which element of its row an operand is that walks along one: how far it lies from where the
# operand begins, which has to be where a row does
PLACE = _row("place", "x:place", "place(x)", result=torch.int64)
# n: what torch multiplies by for the mean or the sum
_OF_LOSS = {
    "mse_loss": _row("mse_loss_backward", "g x y n:common", "n * (x - y) * g",
                     narrow="rnd(rnd(n * rnd(x - y)) * g)"),
    "smooth_l1_loss": _row(
        "smooth_l1_loss_backward", "g x y b:common n:common",
        "d = x - y; -n * g if d < -b else n * g if d > b else n * d * g / b",
        narrow="d = rnd(x - y); -n * g if d < -b else n * g if d > b else rnd(rnd(n * d) * g) / b",
    ),
    "huber_loss": _row(
        "huber_loss_backward", "g x y d:common n:common",
        "z = x - y; -n * g * d if z < -d else n * g * d if z > d else n * z * g",
        narrow="z = rnd(x - y);"
        "rnd(-n * g) * d if z < -d else rnd(n * g) * d if z > d else rnd(n * z) * g",
    ),
}  # fmt: skip
_WEIGHTED = _row("weighted", "g w", "mul(g, w)", result=torch.float32)
_CENTRED = _row("centred", "g x m", "mul(g, sub(x, m))")


@cache
def _of_norm(name: str, weighted: bool) -> Op:
    """The gradient of the rows of a norm of n columns; s and t are its sums."""
    scaled, weight = ("mul(n, w)", "w") if weighted else ("n", "")
    centred = "sub(x, m)" if name == "layer_norm" else "x"
    whole = f"fma(g, {scaled}, -mul(t, mul(r, {centred})))"
    if name == "layer_norm":
        whole = f"sub({whole}, s)"
    params = f"g x {'m s' if name == 'layer_norm' else ''} r t n:opmath {weight}"
    return _row(f"{name}_backward", params, f"mul({whole}, mul(1 / n, r))")


def on_tape(
    op: Reduction, tape: Any, g: Any, values: Values, metas: tuple[Meta, ...], needs: Needs
) -> tuple[Any, ...]:
    """What `by_torch` computes, as values of `tape`; metas: of the operands that are tensors."""
    shape = tuple(metas[0].shape)
    if op.name in ("sum", "mean"):
        seen = tape.along(op, g, shape)
        if op.name == "mean":
            _, columns = op.count(shape)
            return (tape.apply(OPS["div"], (seen, tape.number(columns))),)
        return (seen,)
    if op.name == "vector_norm":
        g, out = (tape.along(op, y, shape) for y in (g, values["out"]))
        zero = tape.number(0)
        direction = tape.apply(OPS["div"], (values["x"], out))
        none = tape.apply(OPS["eq"], (out, zero))
        direction = tape.apply(OPS["masked_fill"], (direction, none, zero))
        return (tape.apply(OPS["mul"], (g, direction)),)
    if op.name in MOMENTS:
        return _moment_on_tape(op, tape, g, values, shape[-1]), None
    if op.name == "logsumexp":
        g, out = (tape.along(op, y, shape) for y in (g, values["out"]))
        share = tape.apply(OPS["exp"], (tape.apply(OPS["sub"], (values["x"], out)),))
        return (tape.apply(OPS["mul"], (g, share)),)
    if op.name == "nll_loss":
        return _classes_on_tape(op, tape, g, values, metas[0]), None
    if op.name in LOSSES:
        return _loss_on_tape(op, tape, tape.along(op, g, shape), values, shape, needs)
    if isinstance(g, OneOfRow) and op.name == "log_softmax":
        return (tape.apply(_OF_ONE, (g.value, g.mask, values["out"])),)
    g = tape.whole(g)  # as torch's ops make it
    if op.statistics:
        found: list[Any] = [
            _norm_on_tape(op.name, tape, g, values, shape[-1]) if needs[0] else None
        ]
        if any(needs[1:]):
            call = _norm_by_torch(op.name, (False, *needs[1:]), shape[-1])
            refs = (g, *_tensors(values))
            found += [Later(call, refs, k, meta) for k, meta in enumerate(metas[1:], 1)]
        return tuple(found)
    if op.name == "softmax":
        g = tape.apply(OPS["mul"], (g, values["out"]))
    total = tape.apply(_sum(SOFT_SUM, "x", op.axes), (g,))
    return (tape.apply(_OF_SOFT[op.name], (g, values["out"], total)),)


def _loss_on_tape(
    op: Reduction, tape: Any, g: Any, values: Values, shape: tuple[int, ...], needs: Needs
) -> tuple[Any, ...]:
    x, y, *width = values.values()
    count = _elements(op, shape)
    if op.name == LOGITS:
        first = second = None
        if needs[0]:
            apart = tape.apply(OPS["sub"], (tape.apply(OPS["sigmoid"], (x,)), y))
            first = tape.apply(OPS["mul"], (apart, g))
        if needs[1]:
            second = tape.apply(OPS["mul"], (x, tape.apply(OPS["neg"], (g,))))
        if op.reduces == ("mean",):
            first, second = (
                None if d is None else tape.apply(OPS["div"], (d, tape.number(count)))
                for d in (first, second)
            )
        return first, second
    factor = tape.number((2.0 if op.name == "mse_loss" else 1.0) / count)
    row = _OF_LOSS[op.name]
    first = tape.apply(row, (g, x, y, *width, factor)) if needs[0] else None
    second = tape.apply(row, (g, y, x, *width, factor)) if needs[1] else None
    return first, second, *(None for _ in width)


def _classes_on_tape(op: Reduction, tape: Any, g: Any, values: Values, meta: Meta) -> OneOfRow:
    """The gradient of rows of logarithms: of the element for its class, if that is not ignored."""
    how, ignored = op.of_classes
    shape, zero = tuple(meta.shape), tape.number(0)
    spread = lambda x: (x.unsqueeze(-1) if x.ndim else x).expand(shape)  # noqa: E731
    g, classes, weight = (tape.part(spread, x) for x in (g, values["t"], values["weight"]))
    place = tape.apply(PLACE, (tape.part(lambda x: x[:1].expand(shape), values["x"]),))
    if how == REDUCED["mean"]:
        g = tape.apply(OPS["div"], (g, weight))
    ignores = tape.apply(OPS["eq"], (classes, tape.number(ignored)))
    g = tape.apply(OPS["masked_fill"], (tape.apply(OPS["neg"], (g,)), ignores, zero))
    g = tape.cast(g, values["x"])
    return OneOfRow(g, tape.apply(OPS["eq"], (classes, place)), meta)


def _moment_on_tape(op: Reduction, tape: Any, g: Any, values: Values, columns: int) -> Any:
    """The same steps; numbers of rows stay that, and are made from views of Inputs alone."""
    x = values["x"]
    number = (lambda y: y) if op.keepdim else (lambda y: tape.part(_column(op), y))
    g = number(g)
    if "out" in values:
        out, zero = number(values["out"]), tape.number(0)
        twice = tape.apply(OPS["mul"], (out, tape.number(2)))
        none = tape.apply(OPS["eq"], (out, zero))
        g = tape.apply(OPS["masked_fill"], (tape.apply(OPS["div"], (g, twice)), none, zero))
    factor = tape.number(2.0) / (tape.number(columns) - values["c"])
    apart = tape.apply(OPS["sub"], (x, tape.apply(number_a_row("mean", Over(keepdim=True)), (x,))))
    return tape.apply(OPS["mul"], (tape.apply(OPS["mul"], (g, factor)), apart))


def _norm_on_tape(name: str, tape: Any, g: Any, values: Values, columns: int) -> Any:
    x, rstd = values["x"], values["rstd"]
    weight = [values["w"]] if "w" in values else []
    if weight:
        scaled = tape.apply(_WEIGHTED, (g, *weight))
    else:
        wide = tape.dtype(g) is torch.float32
        scaled = g if wide else tape.apply(CASTS[torch.float32], (g,))
    if name == "layer_norm":
        product = tape.apply(_CENTRED, (scaled, x, values["mean"]))
        own = [values["mean"], tape.apply(_NORM_SUM, (scaled,))]
    else:
        product, own = tape.apply(OPS["mul"], (scaled, x)), []
    dot = tape.apply(_NORM_DOT, (product, rstd))
    n = tape.number(float(columns))
    return tape.apply(_of_norm(name, bool(weight)), (g, x, *own, rstd, dot, n, *weight))

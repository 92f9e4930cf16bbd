"""Reductions over dimensions: what of torch is one, and its eager form.

A `Reduction` is an op of a chain as the rows of the table are, but reads a row of its first operand
for each of its results (`sum`), or for each row of them (`softmax`). A row is what lies along one
dimension, mostly the last, or along several, which may be all: then the whole tensor is one row. It
is spelled by torch functions as the rows are: a chooser names it and its operands, or None for what
only eager PyTorch does. In which order it adds stands in `kernel.division` and `kernel.row_emit`;
how it is differentiated, in `grad.reduced`, or by torch in `grad.nodes`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..layout import Ints
from ..torch_private import has_kernel, top_hooks
from .autocast import FLOAT32
from .row import METHODS, OPS, Op, registrar

DEVICES = {"cuda"}  # types on which reductions are recorded: a CPU's order is its instruction set's
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
COUNTED = 1 << 24  # up to here float32 has all whole numbers


@dataclass(frozen=True, slots=True, eq=False)
class Reduction(Op):
    """A function of rows; one object per kind, so that it is a key.

    whole: whether its results are rows, of the shape of the first operand; otherwise they are one
        number a row, and keepdim says whether dimensions of size 1 stand for the row.
    pooled: whether numbers of rows of channels_last are channels_last.
    axes: the dimensions that a row lies along, from the last one, -1, on; ascending.
    of_all: whether torch was named none, and so reduces whatever there are.
    casts: whether narrower operands are cast to float32 first; None where autocast decides.
    keeps: the operands and `out` whose values autograd's node saves.
    statistics: what that saves besides, numbers of a row that torch's op returns after its result.
    grad: as of a row, over these too; `grad.reduced` knows what is called there, which gives the
        gradients of all operands. One without rules has torch's own node.
    components: the ops that torch makes it of, the last of which gives its result; none if it is
        one.
    outside: torch's own op, where no kernel computes it: of memory for the result and statistics,
        then the operands, which are in memory, too. It ends its chain.
    of_classes: of a loss of classes, which reduction torch's op is told and which class to ignore.
    groups: of channels, of which a row has one's, so that it lies along the last dimensions once
        channels are two (`layout.grouped`); 0 for none.
    instead: what it is where it cannot be that: of rows that no kernel is known to reduce as torch
        does, the same outside; of operands that autocast casts, what casts them.
    """

    whole: bool = False
    keepdim: bool = False
    pooled: bool = False
    axes: Ints = (-1,)
    of_all: bool = False
    casts: bool | None = None
    statistics: tuple[Reduction, ...] = ()
    components: tuple[Component, ...] = ()
    outside: Callable[..., Any] | None = None
    of_classes: Ints = ()
    instead: Reduction | None = None
    groups: int = 0

    def __repr__(self) -> str:
        return f"Reduction({self.name}, {self.params})"

    @property
    def aten(self) -> str:
        """Torch's op, with its overload."""
        return NODES_OF_ALL.get(self.name, NODES[self.name]) if self.of_all else NODES[self.name]

    @property
    def reduces(self) -> tuple[str, ...]:
        """What a kernel goes through rows for, in order."""
        inner = [one.op.name for one in self.components if isinstance(one.op, Reduction)]
        return tuple(inner) if self.components or self.outside else (self.name,)

    def split(self, shape: Ints) -> tuple[Ints, Ints]:
        """The dimensions of a first operand of `shape`: those of rows, and those in a row."""
        inside = {axis % len(shape) for axis in self.axes}
        every = [*enumerate(shape)]
        rows = tuple([n for k, n in every if k not in inside])
        return rows, tuple([n for k, n in every if k in inside])

    def kept(self, shape: Ints) -> Ints:
        """The shape of numbers of rows of such an operand, with dimensions that stand for a row."""
        inside = {axis % len(shape) for axis in self.axes}
        return tuple([1 if k in inside else n for k, n in enumerate(shape)])

    @property
    def reads_places(self) -> bool:
        """Whether its second operand is the places of elements in a row; see `extremes`."""
        return self.names[1:] == ("p",)

    @property
    def has_no_order(self) -> bool:
        """Whether no order decides its bits: of what holds, how often, or where something lies. It
        has no gradient."""
        return self.result in (torch.bool, torch.int64)

    @property
    def is_plain(self) -> bool:
        """Whether a row lies along the last dimension."""
        return self.axes == (-1,)

    def count(self, shape: Ints) -> tuple[int, int]:
        """How many rows there are, and how many elements each of them has."""
        if self.groups:
            count = shape[0] * self.groups
            return count, math.prod(shape) // count
        rows, row = self.split(shape)
        return math.prod(rows), math.prod(row)

    def weights(self, shape: Ints) -> Ints:
        """The shape of weights, of a whole one over a first operand of `shape`."""
        return shape[1:2] if self.groups else shape[-1:]


class Component(NamedTuple):
    """One of the ops that torch makes a reduction of; each rounds as that torch function does."""

    op: Op
    args: tuple[str | int, ...]  # operands of the reduction by name, those before by position


# torch's ops for them, of which autograd has nodes; overloads where there are several
NODES = {
    "sum": "sum.dim_IntList", "mean": "mean.dim", "amax": "amax", "amin": "amin",
    "softmax": "_softmax", "log_softmax": "_log_softmax",
    "layer_norm": "native_layer_norm", "rms_norm": "_fused_rms_norm",
    "vector_norm": "linalg_vector_norm", "var": "var.correction", "std": "std.correction",
    "logsumexp": "logsumexp", "mse_loss": "mse_loss", "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss", "nll_loss": "nll_loss_forward",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "max": "max", "min": "min",
}  # fmt: skip
NODES_OF_ALL = {"sum": "sum", "mean": "mean"}  # where it is another one that is named no dimensions
REDUCTIONS: dict[str, Callable[..., tuple[Reduction, tuple[Any, ...]] | None]] = {}
_reduced = registrar(REDUCTIONS)
# what makes the result of functions that torch makes of these and others, or None as there
ROW_COMPOSITES: dict[str, Callable[..., Callable[[], Any] | None]] = {}


class Over(NamedTuple):
    """What a reduction to one number a row is over: fields of `Reduction`."""

    axes: Ints = (-1,)
    of_all: bool = False
    keepdim: bool = False

    @property
    def named(self) -> int | tuple[int, ...] | None:
        """The dimensions, as torch is told of them."""
        if self.of_all:
            return None
        return self.axes[0] if len(self.axes) == 1 else self.axes


@cache
def number_a_row(name: str, over: Over) -> Reduction:
    function, dim, keepdim = getattr(torch, name), over.named, over.keepdim
    keeps, grad = ("x out", "") if name in ("amax", "amin") else ("", f"{name}_backward(g)")
    if not over.of_all:
        eager = lambda x: function(x, dim, keepdim)  # noqa: E731
    elif name in NODES_OF_ALL:
        eager = lambda x: function(x)  # noqa: E731
    else:
        eager = lambda x: function(x, (), keepdim)  # noqa: E731
    return Reduction(name, "x", "", keeps=keeps, grad=grad, eager=eager, **over._asdict())


_NUMBERS = ("sum", "mean", "amax", "amin")


def components_of(text: str, over: Over, rows: Mapping[str, Op]) -> tuple[Component, ...]:
    """What `text` says that a reduction is made of: calls of reductions, of rows and of `rows`.

    As in an expression of the table, `name = value;` in front names one. Numbers of rows keep the
    dimensions of the row, but for the last.
    """
    found: list[Component] = []
    names: dict[str, int] = {}
    kept = over._replace(keepdim=True)

    def add(tree: ast.expr, over: Over = kept) -> str | int:
        if isinstance(tree, ast.Name):
            return names.get(tree.id, tree.id)
        assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name), text
        name, args = tree.func.id, tuple(map(add, tree.args))
        op = number_a_row(name, over) if name in _NUMBERS else rows.get(name) or OPS[name]
        found.append(Component(op, args))
        return len(found) - 1

    *named, last = ast.parse(text).body
    for statement in named:
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        place = add(statement.value)
        assert isinstance(place, int)
        names[statement.targets[0].id] = place
    assert isinstance(last, ast.Expr)
    add(last.value, over)
    return tuple(found)


@cache
def _length(over: Over) -> Reduction:
    """The Euclidean norm of each row."""
    dim, keepdim = over.named, over.keepdim
    eager = lambda x: torch.linalg.vector_norm(x, 2, dim, keepdim)  # noqa: E731
    return Reduction("vector_norm", "x", "", keeps="x out", grad="vector_norm_backward(g, x, out)",
                     eager=eager, **over._asdict())  # fmt: skip


@cache
def _moment(name: str, over: Over) -> Reduction:
    """The variance of each row, or its root; c is subtracted from the number of its elements."""
    function, dim, keepdim = getattr(torch, name), over.named, over.keepdim
    keeps = {"var": "x", "std": "x out"}[name]
    eager = lambda x, c: function(x, dim, correction=c, keepdim=keepdim)  # noqa: E731
    grad = f"{name}_backward(g, {', '.join(keeps.split())}, c)"
    return Reduction(name, "x c:opmath", "", keeps=keeps, grad=f"{grad}; none", eager=eager,
                     **over._asdict())  # fmt: skip


_SOFT = ("softmax", "log_softmax")


def _is_wide(dtype: torch.dtype) -> bool:
    """Whether torch casts rows of it first, where it is told to compute _SOFT in float32; those of
    float16 it casts in the reduction."""
    return dtype is not torch.float16


@cache
def soft_row(name: str, casts: bool | None = None, dim: int = -1) -> Reduction:
    function = getattr(torch, name)
    grad, eager = f"{name}_backward(g, out)", lambda x: function(x, dim)
    return Reduction(name, "x", "", keeps="out", grad=grad, whole=True, casts=casts, eager=eager,
                     axes=(dim,))  # fmt: skip


_FINITE = Op("finite", "x", "0 if abs(x) == inf else x")


@cache
def _log_of_sum(over: Over) -> Reduction:
    """The logarithm of the sum of a row's exponentials."""
    dim, keepdim = over.named, over.keepdim
    assert dim is not None
    components = components_of(
        "m = finite(amax(x)); add(log(sum(exp(sub(x, m)))), m)", over, {"finite": _FINITE}
    )
    eager = lambda x: torch.logsumexp(x, dim, keepdim)  # noqa: E731
    return Reduction("logsumexp", "x", "", keeps="x out", grad="logsumexp_backward(g, x, out)",
                     components=components, eager=eager, costs=len(components),
                     **over._asdict())  # fmt: skip


def has_node(op: Reduction, kind: str) -> bool:
    """Whether autograd has one node for `op` on devices of type `kind`.

    It has where torch does not compute it there as others that it is of.
    """
    return any(has_kernel(op.aten, key) for key in (kind.upper(), "CompositeExplicitAutograd"))


def cast_of(op: Reduction, kind: str, dtypes: list[torch.dtype]) -> torch.dtype | str | None:
    """What autocast casts the operands of `op` to, or why torch has to do that; None if nothing.

    dtypes: of its tensors.
    """
    name = op.aten if op.name in ("sum", "mean", "vector_norm") else op.name
    name = f"{name}.int" if op.name in ("softmax", "log_softmax") else name
    if set(dtypes) == {torch.float32} or not has_kernel(name, f"Autocast{kind.upper()}"):
        return None
    if op.statistics or op.name in FLOAT32[kind] or (op.name in _SOFT and _is_wide(dtypes[0])):
        return torch.float32
    return "autocast, which casts in the reduction"  # and adds in an order that was not compared


def is_recordable(x: Any, *others: torch.dtype) -> bool:
    """Whether a reduction of `x` may be recorded; others: of which dtypes besides DTYPES."""
    known = x.dtype in DTYPES or x.dtype in others
    return known and x.device.type in DEVICES and x.ndim > 0


def is_row_wise(x: Any, dim: Any) -> bool:
    """Whether `dim` is the last one of a tensor that may be recorded; one in a list counts too."""
    return _axes_of(x, dim) == (-1,)


def _axes_of(x: Any, dim: Any, *others: torch.dtype) -> Ints:
    """The dimensions of a tensor that may be recorded which `dim` names; none if it names what is
    none, or one twice."""
    named = [dim] if type(dim) is int else dim
    if not is_recordable(x, *others) or type(named) not in (tuple, list) or not named:
        return ()
    if not all(type(d) is int and -x.ndim <= d < x.ndim for d in named):
        return ()
    places = {d % x.ndim - x.ndim for d in named}
    return tuple(sorted(places)) if len(places) == len(named) else ()


def every_axis(ndim: int) -> Ints:
    return tuple(range(-ndim, 0))


ABSENT: Any = object()  # stands for an argument that was not given


def over_of(x: Any, dim: Any, keepdim: Any, *others: torch.dtype) -> Over | None:
    """What a reduction of `x` is over, of all if `dim` is absent; None if it is not recorded."""
    if type(keepdim) is not bool:
        return None
    of_all = dim is ABSENT
    axes = _axes_of(x, every_axis(x.ndim) if of_all else dim, *others)
    return Over(axes, of_all, keepdim) if axes else None


def _plain(name: str) -> None:
    @_reduced(name)
    def choose(
        input: Any, dim: Any = ABSENT, keepdim: Any = ABSENT, *, dtype: Any = None
    ) -> tuple[Reduction, tuple[Any, ...]] | None:
        if dtype is not None or (dim is ABSENT and keepdim is not ABSENT):
            return None
        over = over_of(input, dim, False if keepdim is ABSENT else keepdim)
        return None if over is None else (number_a_row(name, over), (input,))


for _name in ("sum", "mean"):
    _plain(_name)


def _extreme(name: str) -> None:
    @_reduced(name)
    def choose(
        input: Any, dim: Any = ABSENT, keepdim: bool = False
    ) -> tuple[Reduction, tuple[Any, ...]] | None:
        over = over_of(input, dim, keepdim)
        return None if over is None else (number_a_row(name, over), (input,))


for _name in ("amax", "amin"):
    _extreme(_name)


def _second_moment(name: str) -> None:
    @_reduced(name)
    def choose(
        input: Any, dim: Any = ABSENT, unbiased: Any = ABSENT, keepdim: Any = ABSENT, *,
        correction: Any = ABSENT,
    ) -> tuple[Reduction, tuple[Any, ...]] | None:  # fmt: skip
        over = over_of(input, dim, False if keepdim is ABSENT else keepdim)
        if over is None:
            return None
        if type(unbiased) is bool and correction is ABSENT:
            if over.of_all and keepdim is not ABSENT:
                return None
            correction = int(unbiased)
        elif unbiased is not ABSENT:
            return None
        elif correction is None or correction is ABSENT:
            correction = 1
        # of a row of no more elements torch warns; how many several dimensions have is no part of
        # what machine code knows a call by, but rows of less than two are refused
        fewest = input.shape[-1] if over.axes == (-1,) else 2
        if type(correction) not in (int, float) or not 0 <= correction < fewest:
            return None
        return _moment(name, over), (input, float(correction))


for _name in ("var", "std"):
    _second_moment(_name)


def _soft(name: str) -> None:
    @_reduced(name)
    def choose(
        input: Any, dim: Any = None, *more: Any, dtype: Any = None, _stacklevel: int = 3
    ) -> tuple[Reduction, tuple[Any, ...]] | None:
        # more: a dtype, or in torch.nn.functional a number that only its warning reads
        if more or type(dim) is not int:
            return None
        axes = _axes_of(input, dim)
        if not axes:
            return None
        if dtype is not None and (dtype is not torch.float32 or not _is_wide(input.dtype)):
            return None
        casts = True if dtype is not None and input.dtype is not dtype else None
        return soft_row(name, casts, *axes), (input,)


for _name in _SOFT:
    _soft(_name)


@_reduced()
def logsumexp(
    input: Any, dim: Any, keepdim: bool = False
) -> tuple[Reduction, tuple[Any, ...]] | None:
    over = over_of(input, dim, keepdim)
    return None if over is None else (_log_of_sum(over), (input,))


@_reduced()
def linalg_vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Reduction, tuple[Any, ...]] | None:
    if type(ord) not in (int, float) or ord != 2 or dtype is not None:
        return None
    over = over_of(x, ABSENT if dim is None else dim, keepdim)
    return None if over is None else (_length(over), (x,))


@_reduced()
def linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Reduction, tuple[Any, ...]] | None:
    # with an order, the one of two dimensions, or of all where there are two, is of matrices
    if type(dim) is not int and not is_row_wise(A, dim) and not (ord is None and dim is None):
        return None
    return linalg_vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@_reduced()
def norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None,
    dtype: Any = None,
) -> tuple[Reduction, tuple[Any, ...]] | None:  # fmt: skip
    if out is not None:
        return None
    if p == "fro" and isinstance(dim, (tuple, list)) and len(dim) > 2:
        return None  # of no matrix: torch's error
    return linalg_vector_norm(input, 2 if p == "fro" else p, dim, keepdim, dtype=dtype)


METHODS["norm"] = lambda input, p="fro", dim=None, keepdim=False, dtype=None: norm(
    input, p, dim, keepdim, dtype=dtype
)


@registrar(ROW_COMPOSITES)()
def normalize(
    input: Any, p: Any = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Callable[[], torch.Tensor] | None:
    if out is not None or type(eps) not in (float, int) or norm(input, p, dim) is None:
        return None
    if 0 in input.shape:  # whose strides are others without torch's `expand_as`
        return None

    def divided() -> torch.Tensor:
        length = input.norm(p, dim, keepdim=True).clamp_min(eps)
        # torch expands it first, whose gradient is the sum that a quotient's has, too; hooks are
        # told of what is expanded
        return input / (length if top_hooks() is None else length.expand_as(input))

    return divided


@cache
def _pooled() -> Reduction:
    pool: Any = torch._C._nn.adaptive_avg_pool2d  # type: ignore[attr-defined]
    over = Over((-2, -1), keepdim=True)
    return replace(number_a_row("mean", over), pooled=True, eager=lambda x: pool(x, (1, 1)))


@_reduced()
def adaptive_avg_pool2d(input: Any, output_size: Any) -> tuple[Reduction, tuple[Any, ...]] | None:
    """To one element: the mean that torch makes of it."""
    several = isinstance(output_size, (tuple, list))
    each = output_size if several else (output_size, output_size)
    if len(each) != 2 or any(type(n) is not int or n != 1 for n in each):
        return None
    return (_pooled(), (input,)) if is_recordable(input) and input.ndim in (3, 4) else None

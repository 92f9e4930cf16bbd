"""Views: ops whose results lie in the memory of their operand, by torch's own functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..layout import Ints, joined_stride
from ..torch_private import InferenceMode, NoModes, detach
from .row import Op

# torch's functions and methods that give views; whether one does may depend on the operand's layout
VIEWS = frozenset(
    "adjoint broadcast_to chunk diagonal dsplit expand expand_as flatten hsplit movedim moveaxis "
    "narrow permute ravel reshape reshape_as select split split_with_sizes squeeze swapaxes "
    "swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view view_as vsplit "
    "__getitem__".split()
)
ATTRIBUTES = ("T", "mT", "H", "mH")
SQUARE = ("T", "H")  # which torch wants to be matrices
COPYING = ("ravel",)  # give copies of tensors without memory of their own, whose strides are 0
RESHAPING = ("flatten", "reshape", "reshape_as")  # copy what is no view in memory as it lies
LIKE = {"expand_as": torch.Tensor.expand, "reshape_as": torch.Tensor.reshape,
        "view_as": torch.Tensor.view}  # take a tensor for its shape  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ViewOp(Op):
    """What one view function makes of one operand: a single use, not a row of the table."""

    dtype: torch.dtype = torch.float32
    shape: Ints = ()
    stride: Ints = ()
    offset: int = 0  # in the memory of its base
    call: Callable[..., Any] | None = None  # of the operand; the same for all of several results
    part: int | None = None  # which result of several
    parts: int = 0  # and how many these are
    dim: int | None = None  # of one of SPLITS: along which axis


# Functions that divide a tensor, by where their argument `dim` stands; its gradient is those of the
# parts side by side. For others that torch has it is a sum of tensors, each zero but for a part.
SPLITS = {"chunk": 1, "split": 1, "split_with_sizes": 1, "unbind": 0}
JOINS = ("cat", "concat", "concatenate", "stack")


@dataclass(frozen=True, slots=True, eq=False)
class JoinOp(Op):
    """Tensors side by side in new memory: a use of torch.cat or torch.stack."""

    dtype: torch.dtype = torch.float32
    shape: Ints = ()
    stride: Ints = ()
    parts: tuple[tuple[int, Ints], ...] = ()  # where each operand begins there, and its strides
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()  # the same of a result


@dataclass(frozen=True, slots=True, eq=False)
class WriteOp(Op):
    """What `copy_` makes of one operand for memory of one layout: converted and broadcast to it."""

    row: Op | None = None  # of the table, for each element
    dtype: torch.dtype = torch.float32
    shape: Ints = ()
    stride: Ints = ()


@dataclass(frozen=True, slots=True, eq=False)
class InPlaceOp(Op):
    """A row of the table on its first operand, whose memory takes the result."""

    row: Op | None = None


in_place_ops: dict[Op, InPlaceOp] = {}  # by their rows; machine code asks


def in_place_op(row: Op) -> InPlaceOp:
    """The op that is `row` in place."""
    known = in_place_ops.get(row)
    if known is None:
        made = InPlaceOp(row.name, row.params, row.expr, one_device=row.one_device, row=row)
        known = in_place_ops.setdefault(row, made)
    return known


def write_op(row: Op, dtype: torch.dtype, shape: Ints, stride: Ints) -> WriteOp:
    """The op that writes to memory of such a layout. row: converts to `dtype`."""
    return WriteOp(
        "copy_", "x", "x", accepts="fib", row=row, dtype=dtype, shape=shape, stride=stride,
        eager=lambda x: detach(x.to(dtype).expand(shape)),  # which holds nothing of x
    )  # fmt: skip


class Laid(Protocol):
    """What is known of a tensor, its Meta."""

    dtype: torch.dtype
    shape: Ints
    stride: Ints
    flat: bool


def cat_of(xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """What torch.cat makes of such tensors, without memory.

    torch's own is Python there and imports torch._dynamo the first time, 1.1 s: it is asked of what
    does not fit or is of several dtypes.
    """
    first, ndim = xs[0], xs[0].dim()
    if -ndim <= dim < ndim:
        shape = list(first.shape)
        shape[dim] = sum(x.shape[dim] for x in xs if x.dim() == ndim)
        around = [(*x.shape[: dim % ndim], *x.shape[dim % ndim + 1 :]) for x in xs]
        if all(
            x.dtype is first.dtype and x.dim() == ndim and rest == around[0]
            for x, rest in zip(xs, around, strict=True)
        ):
            layouts = [(tuple(x.shape), x.stride()) for x in xs]
            stride = joined_stride(tuple(shape), layouts)
            return torch.empty_strided(shape, stride, dtype=first.dtype, device="meta")
    return torch.cat(list(xs), dim)


def stack_of(xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """What torch.stack makes of such tensors of one shape, as torch does, by torch.cat."""
    ndim = xs[0].dim()
    dim %= ndim + 1
    if dim == ndim:
        return cat_of([x.unsqueeze(dim) for x in xs], dim)
    return cat_of(xs, dim).unflatten(dim, (len(xs), xs[0].shape[dim]))


_REFUSED = RuntimeError, IndexError, TypeError, ValueError


def join_op(name: str, dim: int, metas: Sequence[Laid]) -> JoinOp | None:
    """The op that joins such tensors; None where only torch knows what comes of it."""
    stacks, shape = name == "stack", metas[0].shape
    if stacks:  # what stands for torch.stack on stand-ins says other errors in some versions
        if not all(meta.shape == shape for meta in metas):
            return None
        if not -len(shape) <= dim + (dim < 0) <= len(shape):
            return None
    with NoModes(), InferenceMode(False):
        xs = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in metas]
        try:
            result = (stack_of if stacks else cat_of)(xs, dim)
        except _REFUSED:
            return None
        if stacks:
            views = [partial(torch.select, dim=dim, index=k) for k in range(len(xs))]
        else:
            sizes = [meta.shape[dim] for meta in metas]
            begins = itertools.accumulate(sizes, initial=0)
            views = [partial(torch.narrow, dim=dim, start=start, length=size)
                     for start, size in zip(begins, sizes, strict=False)]  # fmt: skip
        parts = [view(result) for view in views]
    join = torch.stack if stacks else torch.cat
    return JoinOp(
        name, " ".join(f"x{k}" for k in range(len(parts))), "x0", accepts="fib",
        eager=lambda *xs: join(xs, dim), dtype=result.dtype, shape=tuple(result.shape),
        stride=tuple(result.stride()),
        parts=tuple((int(x.storage_offset()), tuple(x.stride())) for x in parts),
        views=tuple(views),
    )  # fmt: skip


def side_by_side(dtype: torch.dtype, shape: Ints, stride: Ints, dim: int, sizes: Ints) -> JoinOp:
    """The join along `dim`, in memory laid out like this, of tensors of these sizes there."""
    begins = itertools.accumulate(sizes[:-1], initial=0)
    return JoinOp(
        "cat", " ".join(f"x{k}" for k in range(len(sizes))), "x0", accepts="fib",
        dtype=dtype, shape=shape, stride=stride,
        parts=tuple((start * stride[dim], stride) for start in begins),
    )  # fmt: skip


def slice_of(op: ViewOp, base: Laid) -> tuple[int, int, int] | None:
    """Along which axis of a value like `base`, from where and to where `op` takes a slice of it.

    None for any other view, and for one that is all of it. The gradient that torch has for a slice
    is zero but for that part.
    """
    if op.part is not None or op.dtype is not base.dtype or op.stride != base.stride:
        return None
    axes = [k for k, size in enumerate(op.shape) if size != base.shape[k]]
    if len(axes) != 1:
        return None
    (dim,) = axes
    step, size = base.stride[dim], op.shape[dim]
    if not step or op.offset % step:
        return None
    start = op.offset // step
    return (dim, start, start + size) if 0 < size <= base.shape[dim] - start else None


def view_op(
    name: str,
    call: Callable[..., Any],
    part: int | None,
    parts: int,
    result: torch.Tensor,
    dim: int | None,
) -> ViewOp:
    """The op that gives `result`, a view of a stand-in without values."""
    eager = call if part is None else lambda x: call(x)[part]
    return ViewOp(
        name, "x", "x", accepts="fib", eager=eager, call=call, part=part, parts=parts,
        dtype=result.dtype, shape=tuple(result.shape), stride=tuple(result.stride()),
        offset=int(result.storage_offset()), dim=dim,
    )  # fmt: skip

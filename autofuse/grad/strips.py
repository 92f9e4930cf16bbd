"""Strips: gradients of values of which a chain takes slices, as what lies side by side on one axis.

The gradient of a slice is zero but for that part. Eager makes such tensors and adds them up, with
what else the value's gradient is made of. On a Tape each op goes on strip by strip instead, and one
kernel writes strips side by side where the whole is wanted. Zeros are added too: 0.0 + -0.0 is 0.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.state import Node
from ..layout import Ints, contiguous
from ..ops.arithmetic import CASTS
from ..ops.row import OPS, Op
from ..ops.views import ViewOp, side_by_side, slice_of
from ..program.program import Ref

_ADD = OPS["add"]
_MOST = 16  # strips of one value
# and sizes of them, each of which takes a kernel; three it takes where torch differentiates a slice
_SIZES = 3


@dataclass(frozen=True, slots=True)
class Striping:
    """How the slices of a value, of which no two overlap in part, divide it along one axis."""

    dim: int
    sizes: Ints  # of all strips, those that no slice takes too

    def begin(self, k: int) -> int:
        return sum(self.sizes[:k])


@dataclass(frozen=True, slots=True)
class Strips:
    """A value of a Tape by its strips."""

    striping: Striping
    shape: Ints
    stride: Ints  # of the memory in which they are going to lie
    values: tuple[Ref | None, ...]  # None: zeros; one at least is none

    def shape_of(self, k: int) -> Ints:
        """The shape of strip k."""
        dim, size = self.striping.dim, self.striping.sizes[k]
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


def striped_of(
    nodes: list[Node], meta_of: Callable[[int], Meta]
) -> dict[int, tuple[Striping, int]]:
    """Of each step that is a slice: how those of its base divide it, and which strip it is.

    Not where slices of one value lie along several axes or overlap in part.
    """
    taken: dict[int, dict[int, tuple[int, int, int]]] = {}
    for node in nodes:
        if isinstance(node.op, ViewOp) and node.args == (node.base,):  # of no other view
            base = meta_of(node.base)
            found = slice_of(node.op, base) if base.requires_grad and base.nbytes else None
            if found is not None:
                taken.setdefault(node.base, {})[node.index] = found
    striped: dict[int, tuple[Striping, int]] = {}
    for base, slices in taken.items():
        striping = _striping(meta_of(base).shape, slices.values())
        if striping is not None:
            begins = [*itertools.accumulate(striping.sizes[:-1], initial=0)]
            for index, (_, start, _) in slices.items():
                striped[index] = striping, begins.index(start)
    return striped


def _striping(shape: Ints, slices: Collection[tuple[int, int, int]]) -> Striping | None:
    """How slices (axis, start, end) divide a value; None where they do not."""
    dims = {dim for dim, _, _ in slices}
    if len(dims) != 1:
        return None
    (dim,) = dims
    ends = sorted({0, shape[dim]}.union(*((start, end) for _, start, end in slices)))
    sizes = tuple(end - start for start, end in itertools.pairwise(ends))
    if len(sizes) > _MOST or len({*sizes}) > _SIZES:
        return None
    if any(ends[ends.index(start) + 1] != end for _, start, end in slices):
        return None
    return Striping(dim, sizes)


# --- as values of a Tape --------------------------------------------------------------------------


def padded(tape: Any, striping: Striping, k: int, g: Any, shape: Ints) -> Strips:
    """The gradient of a value of `shape` that is `g` in strip k and zero elsewhere."""
    values: list[Ref | None] = [None] * len(striping.sizes)
    values[k] = tape.step(g)
    return Strips(striping, shape, contiguous(shape), tuple(values))


def apply(tape: Any, op: Op, operands: tuple[Any, ...]) -> Ref | Strips:
    """What `op` makes of operands of which some are Strips."""
    first = next(x for x in operands if isinstance(x, Strips))
    how = first.striping, first.shape
    alike = [not isinstance(x, Strips) or (x.striping, x.shape) == how for x in operands]
    operands = tuple([x if a else tape.step(x) for x, a in zip(operands, alike, strict=True)])
    meta = tape.meta_of(op, operands) if op.__class__ is Op else None
    if meta is None or meta.shape != first.shape:
        return tape.apply(op, tuple(map(tape.step, operands)))
    values = tuple(_of_strip(tape, op, operands, first, k) for k in range(len(first.values)))
    return replace(first, stride=meta.stride, values=values)


def _of_strip(tape: Any, op: Op, operands: tuple[Any, ...], like: Strips, k: int) -> Ref | None:
    """What `op` makes of strip k of its operands; like: one of them."""
    there = [_strip(tape, x, like, k) for x in operands]
    if op is _ADD and None in there:
        one = next((x for x in there if x is not None), None)
        if one is None:
            return None
        if not tape.is_number(one) and tape.shape(one) == like.shape_of(k):
            return _added(tape, one)
    found = [
        _zeros(tape, like.shape_of(k), tape.dtype(x)) if one is None else one
        for x, one in zip(operands, there, strict=True)
    ]
    return tape.apply(op, tuple(found))


def _strip(tape: Any, x: Any, like: Strips, k: int) -> Any:
    """What of an operand goes with strip k of `like`."""
    if isinstance(x, Strips):
        return x.values[k]
    if tape.is_number(x):
        return x
    own, dim = tape.shape(x), like.striping.dim - len(like.shape)  # from the end
    if len(own) < -dim or own[dim] == 1:
        return x
    start, length = like.striping.begin(k), like.striping.sizes[k]
    return tape.part(partial(torch.narrow, dim=dim, start=start, length=length), x)


def _added(tape: Any, value: Any) -> Ref:
    """`value` and zeros, which is another one if it is -0.0; once is enough."""
    value = tape.step(value)
    if value in tape.unsigned:
        return value
    found = tape.apply(_ADD, (value, tape.number(0.0)))
    tape.unsigned.add(found)
    return found


def _zeros(tape: Any, shape: Ints, dtype: torch.dtype) -> Ref:
    """Zeros: of the shape of a view of the first Input, which nothing reads."""
    view = tape.part(partial(torch.as_strided, size=shape, stride=(0,) * len(shape)), ~0)
    zeros = tape.apply(OPS["zeros"], (view,))
    return zeros if tape.dtype(zeros) is dtype else tape.apply(CASTS[dtype], (zeros,))


def whole(tape: Any, strips: Strips) -> Ref:
    """The step in which they lie side by side."""
    if strips not in tape.known:
        striping, dtype = strips.striping, tape.dtype(strips)
        steps = [
            tape.computed(_zeros(tape, strips.shape_of(k), dtype) if value is None else value)
            for k, value in enumerate(strips.values)
        ]
        join = side_by_side(dtype, strips.shape, strips.stride, striping.dim, striping.sizes)
        tape.known[strips] = tape.apply(join, tuple(steps))
    return tape.known[strips]

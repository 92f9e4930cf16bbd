"""Shapes and strides: broadcasting, TensorIterator's output layout, and loop collapsing.

Pure integer arithmetic on tuples; strides are in elements. Knows nothing of torch or kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

Ints = tuple[int, ...]


def broadcast(shapes: list[Ints]) -> Ints | None:
    """The common shape of `shapes`, or None where they do not broadcast."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    ndim = max(map(len, shapes))
    out = [1] * ndim
    for shape in shapes:
        for axis, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                if out[axis] != 1 and out[axis] != size:
                    return None
                out[axis] = size
    return tuple(out)


def contiguous(shape: Ints) -> Ints:
    """Strides of a contiguous tensor, as torch gives them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def numel(shape: Ints) -> int:
    """Number of elements."""
    count = 1
    for size in shape:
        count *= size
    return count


def expand(shape: Ints, stride: Ints, to: Ints) -> Ints:
    """Strides of a tensor broadcast to shape `to`: 0 on every axis that repeats."""
    if shape == to:
        return stride
    lead = len(to) - len(shape)
    own = (0 if n == 1 != to[lead + i] else stride[i] for i, n in enumerate(shape))
    return (0,) * lead + tuple(own)


def _is_packed(shape: Ints, stride: Ints, axes: Iterable[int]) -> bool:
    """Whether the elements lie without a gap, `axes` naming the order, innermost first."""
    step = 1
    for axis in axes:
        if shape[axis] != 1:
            if stride[axis] != step:
                return False
            step *= shape[axis]
    return True


def is_contiguous(shape: Ints, stride: Ints) -> bool:
    """Whether torch calls it so, to which strides along axes of one element do not matter."""
    return 0 in shape or _is_packed(shape, stride, range(len(shape) - 1, -1, -1))


def is_channels_last(shape: Ints, stride: Ints) -> bool:
    """Whether it is what torch calls so, of four dimensions."""
    return len(shape) == 4 and _is_packed(shape, stride, (1, 3, 2, 0))


_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}  # axes from the innermost on


def joined_stride(shape: Ints, operands: list[tuple[Ints, Ints]]) -> Ints:
    """Strides of what torch.cat puts side by side: channels_last where all operands are like it."""
    order = _CHANNELS_LAST.get(len(shape))
    if order is None or not all(_is_like(order, *operand) for operand in operands):
        return contiguous(shape)
    stride, step = [1] * len(shape), 1
    for axis in order:
        stride[axis] = step
        step *= shape[axis]
    return tuple(stride)


def _is_like(order: Ints, shape: Ints, stride: Ints) -> bool:
    """Whether torch takes a tensor's axes to be in this order (`is_channels_last_strides_2d`)."""
    least = 0
    for axis in order:
        if not shape[axis] or stride[axis] < least or (axis == 0 and least == stride[1]):
            return False
        least = stride[axis] * shape[axis]
    return stride[1] != 0


def is_dense(shape: Ints, stride: Ints) -> bool:
    """Non-overlapping and dense: some order of the axes makes it contiguous, or it is empty."""
    if 0 in shape:
        return True
    axes = sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1)
    step = 1
    for s, n in axes:
        if s != step:
            return False
        step *= n
    return True


def reach(shape: Ints, stride: Ints) -> int:
    """Elements of memory from the first one of a tensor to past its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def is_injective(shape: Ints, stride: Ints) -> bool:
    """Whether no two elements lie in one place, for certain: each axis steps over all inside it."""
    span = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if s < span:
            return False
        span += (n - 1) * s
    return True


def grouped(shape: Ints, stride: Ints, channels: Ints, after: int) -> tuple[Ints, Ints]:
    """Shape and strides of a tensor whose dimension of channels, which `after` others follow, is
    made two: groups, and channels of a group, as many as `channels` says.

    A tensor that repeats along it has both of size 1; one without it stays as it is.
    """
    groups, each = channels
    at = len(shape) - 1 - after
    if at < 0 or shape[at] not in (1, groups * each):
        return shape, stride
    sizes, step = (channels if shape[at] != 1 else (1, 1)), stride[at]
    return (
        (*shape[:at], *sizes, *shape[at + 1 :]),
        (*stride[:at], step * sizes[1], step, *stride[at + 1 :]),
    )


def turned(shape: Ints, stride: Ints, order: Ints, dims: int, without: bool) -> tuple[Ints, Ints]:
    """Shape and strides of a tensor that is broadcast to as many dimensions as `order` has, with
    these in that order.

    without: whether the tensor has none for the last `dims` of it, and repeats along them. One of
    more dimensions is not, and stays as it is.
    """
    if len(shape) > len(order):
        return shape, stride
    axes = sorted(order[: len(order) - dims]) if without else range(len(order))
    if len(shape) > len(axes):
        axes = range(len(order))
    own = dict(zip(axes[len(axes) - len(shape) :], zip(shape, stride, strict=True), strict=True))
    found = [own.get(axis, (1, 0)) for axis in order]
    return tuple([n for n, _ in found]), tuple([s for _, s in found])


class Iteration(NamedTuple):
    """How TensorIterator goes through what it reduces; strides in elements.

    Dimensions that it walks as one are one, and those of one element none.
    """

    row: Ints  # strides of the dimensions of a row, the innermost first
    kept: Ints  # ...and of the others
    size: int  # of the innermost one of these, 1 if there are none


@lru_cache(maxsize=4096)
def iteration(shape: Ints, stride: Ints, axes: Ints) -> Iteration:
    """That of a tensor over `axes`, whose result is contiguous.

    Source: at::TensorIteratorBase::{reorder_dimensions, coalesce_dimensions}.
    """
    places = {axis % len(shape) for axis in axes}
    result = contiguous(tuple([1 if k in places else n for k, n in enumerate(shape)]))
    large = [k for k, n in enumerate(shape) if n != 1]

    def merged(axes: Iterable[int], result: Ints) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for out, own, size in sorted([(result[k], stride[k], shape[k]) for k in axes]):
            if found and tuple([s * found[-1][2] for s in found[-1][:2]]) == (out, own):
                *strides, inner = found.pop()
                out, own, size = *strides, inner * size
            found.append((out, own, size))
        return found

    row = merged([k for k in large if k in places], (0,) * len(shape))
    kept = merged([k for k in large if k not in places], result)
    size = kept[0][2] if kept else 1
    return Iteration(tuple([s for _, s, _ in row]), tuple([s for _, s, _ in kept]), size)


@lru_cache(maxsize=4096)
def order_of(shape: Ints, stride: Ints, axes: Ints) -> Ints:
    """The dimensions of a tensor as they lie in memory, those of `axes` behind the others."""
    places = {axis % len(shape) for axis in axes}
    return tuple(sorted(range(len(shape)), key=lambda k: (k in places, -stride[k], k)))


_MOST_TRIED = 4096  # partial sums


def meets(distance: int, sizes: Ints, strides: Ints, others: Ints, other_strides: Ints) -> bool:
    """Whether two tensors have an address in common; strides in bytes, an element as an axis.

    distance: from where the first begins to where the second does. Exact, unless that takes more
    sums than anybody wants to wait for: then it says yes.
    """
    ranges: dict[int, list[int]] = {}  # by stride: of the steps of the first less the second's
    for n, s in zip(sizes, strides, strict=True):
        ranges.setdefault(s, [0, 0])[1] += n - 1
    for n, s in zip(others, other_strides, strict=True):
        ranges.setdefault(s, [0, 0])[0] -= n - 1
    axes = [(s, low, high) for s, (low, high) in sorted(ranges.items(), reverse=True) if s]
    sums = {distance}  # what is left of it for the axes that follow
    for k, (s, low, high) in enumerate(axes):
        inner = axes[k + 1 :]
        least, most = (sum(axis[0] * axis[end] for axis in inner) for end in (1, 2))
        following: set[int] = set()
        for left in sums:
            first, last = max(low, -((most - left) // s)), min(high, (left - least) // s)
            if len(following) + last - first > _MOST_TRIED:
                return True
            following.update(left - s * steps for steps in range(first, last + 1))
        sums = following
    return 0 in sums


def copied_stride(shape: Ints, stride: Ints) -> Ints:
    """Strides of a copy that keeps the layout, as `to` and `empty_like` make it."""
    return stride if is_dense(shape, stride) else _ordered_stride(shape, [stride])


def result_stride(shape: Ints, operands: list[tuple[Ints, Ints]]) -> Ints:
    """Strides that TensorIterator gives to a new result of `shape`.

    operands: (shape, stride) of each operand in order, a Python scalar as ((), ()).
    Source: at::TensorIteratorBase::{reorder_dimensions, compute_fast_setup_type}.
    """
    if all(op_shape == shape for op_shape, _ in operands):
        if all(is_contiguous(*op) for op in operands):
            return contiguous(shape)
        if all(is_channels_last(*op) for op in operands):
            n, c, h, w = shape
            return (h * w * c, 1, w * c, c)
        stride = operands[0][1]
        if all(op[1] == stride for op in operands) and is_dense(shape, stride):
            return stride
    return _ordered_stride(shape, [expand(s, t, shape) for s, t in operands])


def _ordered_stride(shape: Ints, strides: list[Ints]) -> Ints:
    """Dense strides in the axis order that the operands' strides ask for, innermost first."""
    ndim = len(shape)
    order = list(range(ndim - 1, -1, -1))
    for i in range(1, ndim):  # insertion sort: the comparison is not transitive
        moving = i
        for other in range(i - 1, -1, -1):
            verdict = _compare_axes(shape, strides, order[other], order[moving])
            if verdict > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif verdict < 0:
                break
    out, step = [0] * ndim, 1
    for axis in order:
        out[axis] = step
        step *= shape[axis]
    return contiguous(shape) if order == list(range(ndim - 1, -1, -1)) else tuple(out)


def _compare_axes(shape: Ints, strides: list[Ints], inner: int, outer: int) -> int:
    """1 if the two axes should change places, -1 if not, 0 if the operands leave it open."""
    for stride in strides:
        a, b = stride[inner], stride[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def collapse(shape: Ints, strides: list[Ints]) -> tuple[Ints, list[Ints]]:
    """Merge axes that every operand walks as one; returns (sizes, strides), outermost first.

    strides: one tuple per operand, already broadcast to `shape` (`expand`), the operand that
    decides the axis order first. The result has at least one axis.
    """
    lead = strides[0]
    axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
    axes.sort(key=lambda axis: -lead[axis])  # stable: broadcast axes keep their place
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        size = shape[axis]
        if sizes and all(m[-1] == s[axis] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[axis]
        else:
            sizes.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[axis])
    if not sizes:
        return (1,), [(1,) for _ in strides]
    return tuple(sizes), [tuple(m) for m in merged]

"""Rows: what a reduction makes of its operands, and what goes into one kernel with it.

Pure, as `infer` is. All reductions of a chain are over the rows of one shape, with the same threads
for each row, and what follows from them is one number for each row or has that shape: the rest of a
program is in another chain, which begins with its values. So are those that a backward adds over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..dtypes import CODES
from ..kernel.division import MOMENTS, NORM_SUMS, SOFT_SUM, Scheme, scheme_of
from ..layout import (
    Ints,
    contiguous,
    is_channels_last,
    is_dense,
    is_injective,
    iteration,
    order_of,
    reach,
)
from ..ops.reductions import COUNTED, DEVICES, DTYPES, Reduction, cast_of, has_node
from ..program.program import CONST, Ref, RowsOf
from ..settings.config import config
from .infer import Cut, Inferred, referred
from .meta import Meta, make_meta
from .state import Node

MOST = 6  # reductions in a kernel, whose compile time grows with each


def infer_rows(
    op: Reduction,
    operands: Sequence[int | Meta | type],
    metas: Sequence[Meta],
    tip: Node,
    device: torch.device,
    processors: tuple[int, int],
) -> tuple[Inferred, RowsOf] | str | torch.dtype:
    """What `op` makes of `operands`, why it has to run as eager PyTorch, or what they are cast to.

    As `infer` says it.
    """
    reads, numbers = list(tip.inputs), list(tip.consts)
    args, kinds = referred(operands, metas, reads, numbers)
    views = [kind for kind in kinds if isinstance(kind, Meta)]
    x = views[0]
    cast: torch.dtype | str | None = None
    if op.casts and x.dtype is not torch.float32:
        cast = torch.float32
    elif tip.autocast and op.casts is None:
        cast = cast_of(op, device.type, [meta.dtype for meta in views])
    if cast is not None:
        return cast
    reason = _reason(op, kinds, device) or _ungraded(op, views, device, tip)
    if reason:
        return reason
    if op.groups and any(0 <= ref < CONST for ref in args[1:]):
        return Cut("operands of channels that are not in memory")
    found = set[Ints]()
    through = iteration(x.shape, x.stride, op.axes) if not op.groups else None
    for name in op.reduces:
        scheme = scheme_of(name, *op.count(x.shape), x.dtype.itemsize, processors, through)
        if isinstance(scheme, str):
            return f"{scheme}, as {name} takes them"
        found.add((scheme.threads, scheme.blocks, scheme.interleaved))
    if len(found) > 1:
        return "rows that torch gives other numbers of threads for each of its steps"
    ((threads, blocks, interleaved),) = found
    order = order_of(x.shape, x.stride, op.axes) if not op.groups else tuple(range(x.ndim))
    rows = RowsOf(tuple(x.shape), order, len(op.axes), threads, blocks, op.groups, interleaved)
    # of which nothing is known before all blocks are done
    apart = len(op.reduces) > 1 or (op.name in MOMENTS and _has_graph(tip, views))
    if blocks > 1 and apart:
        return "rows that several blocks share"
    shape = rows.shape
    if not op.whole:
        shape = op.kept(shape) if op.keepdim else op.split(shape)[0]
    dtype = op.result if isinstance(op.result, torch.dtype) else x.dtype
    graph = dtype.is_floating_point and _has_graph(tip, views)
    stride = contiguous(shape)
    if op.pooled and not x.flat:
        if graph or not is_channels_last(x.shape, x.stride):
            return "pooling of another layout, or its gradient"
        channels = shape[1]
        stride = (channels, 1, channels, channels)
    meta = make_meta(dtype, shape, stride, device, graph)
    made = Inferred(tuple(args), CODES[x.dtype], meta, tuple(reads), tuple(numbers), None)
    return made, rows


def infer_outside(
    op: Reduction,
    operands: Sequence[int | Meta | type],
    metas: Sequence[Meta],
    tip: Node,
    device: torch.device,
) -> tuple[Inferred, RowsOf | None] | str:
    """As `infer_rows`, of what torch computes outside of kernels; see `ops.likelihood`."""
    reads, numbers = list(tip.inputs), list(tip.consts)
    args, kinds = referred(operands, metas, reads, numbers)
    x, *others = views = [kind for kind in kinds if isinstance(kind, Meta)]
    reason = _reason(op, kinds, device) or _ungraded(op, views, device, tip)
    if not _has_graph(tip, [x]):
        reason = "a loss without a gradient"
    elif tip.told:
        reason = "saved tensor hooks"
    elif others and not reason:
        reason = _reason_of_loss(op, args, x, others[0], tip)
    if reason:
        return reason
    shape, _ = (tuple(x.shape), ()) if op.whole else op.split(tuple(x.shape))
    dtype = torch.float32 if op.casts else x.dtype
    meta = make_meta(dtype, shape, contiguous(shape), device, True)
    made = Inferred(tuple(args), CODES[x.dtype], meta, tuple(reads), tuple(numbers), None)
    return made, tip.rows


def _reason_of_loss(op: Reduction, args: list[Ref], x: Meta, classes: Meta, tip: Node) -> str:
    """Why a loss of classes is eager; empty if it is not."""
    first, second = args
    if first < 0 or second >= 0:
        return "a loss of what is in memory"
    soft = tip.path()[first].op
    if not isinstance(soft, Reduction) or soft.name != "log_softmax" or not soft.is_plain:
        return "a loss of what is no logarithm over its classes"
    if classes.dtype is not torch.int64 or classes.shape != x.shape[:1] or not classes.flat:
        return "classes of another kind"
    return "" if op.casts is (tip.autocast and x.dtype is not torch.float32) else "autocast"


def _reason(op: Reduction, kinds: Sequence[Meta | type], device: torch.device) -> str:
    for kind, role in zip(kinds, op.roles, strict=True):
        if role in ("promote", "channel") and not isinstance(kind, Meta):
            return "numbers in place of tensors"
    x, *affine = [kind for kind in kinds if isinstance(kind, Meta)]
    taken = x.dtype in DTYPES or (op.has_no_order and x.dtype is torch.bool)
    if device.type not in DEVICES or not taken or not x.ndim:
        return "a reduction of another kind"
    if any(meta.device is not device for meta in (x, *affine)):
        return "operands on several devices"
    if 0 in x.shape or not (x.flat or _is_walked(op, x)):
        return "rows that are not contiguous"
    if op.result is torch.int64 and op.count(x.shape)[1] > COUNTED:
        return "rows of more elements than float32 counts"
    if op.groups and x.shape[1] % op.groups:
        return "channels that groups do not divide"
    for meta in affine if op.components and not op.reads_places else ():
        if meta.shape != x.shape or not meta.flat or meta.dtype is not x.dtype:
            return "operands of other shapes, strides or dtypes"
    for meta in affine if op.whole else ():  # of others it is a number a row
        if meta.shape != op.weights(x.shape) or not meta.flat or meta.dtype is not x.dtype:
            return "a weight of another shape or dtype"
    return ""


def _is_walked(op: Reduction, x: Meta) -> bool:
    """Whether torch reduces a tensor as it lies in memory, at once; others it copies first."""
    if op.whole or op.outside is not None or not is_injective(x.shape, x.stride):
        return False
    if reach(x.shape, x.stride) * x.dtype.itemsize >= 1 << 31:
        return False  # it reduces parts, each divided by itself
    # of several ops the second has what the first one leaves
    return not op.components or (len(op.roles) == 1 and is_dense(x.shape, x.stride))


def _has_graph(tip: Node, metas: list[Meta]) -> bool:
    return tip.grad_mode and any(meta.requires_grad for meta in metas)


def _ungraded(op: Reduction, metas: list[Meta], device: torch.device, tip: Node) -> str:
    """Why `op` over such operands has to be differentiated by eager PyTorch alone; empty if not."""
    if op.has_no_order or not _has_graph(tip, metas):
        return ""
    if not has_node(op, device.type):
        return "a reduction that autograd takes apart"
    if config.recompute == "inputs":
        return "a reduction under grad, which is not computed again"
    if any(meta.inference for meta in metas):
        return "an inference tensor, which autograd cannot save"
    return ""


def goes_along(tip: Node, node: Node) -> bool:
    """Whether `node`, which is to follow `tip`, can be computed in one kernel with its rows."""
    assert tip.rows is not None and node.rows is not None and node.meta is not None
    following: set[int] = set()
    path = tip.path()
    for known in path:
        if isinstance(known.op, Reduction) or not following.isdisjoint(known.args):
            following.add(known.index)
    if isinstance(node.op, Reduction):
        reduced = [name for known in (*path, node) if isinstance(known.op, Reduction)
                   for name in known.op.reduces]  # fmt: skip
        if node.rows != tip.rows or tip.rows.groups or len(reduced) > MOST:
            return False
        # a number a row is no weight of columns
        return bool(node.op.components) or following.isdisjoint(node.args[1:])
    if node.meta.requires_grad and config.recompute == "inputs":
        return False  # it would be computed again from what the rows gave
    shape = tip.rows.shape
    if tip.rows.groups:  # all that has their shape is in a kernel after that of the rows
        return following.isdisjoint(node.args) or tuple(node.meta.shape) == shape
    for ref in node.args:
        if ref not in following:
            continue
        meta = path[ref].meta
        assert meta is not None
        if not meta.shape:  # one of all
            allowed = (shape, meta.shape)
        elif len(meta.shape) < len(shape):  # one number a row, and no dimension for it
            allowed = (meta.shape,)
        elif meta.shape == shape:
            allowed = (shape,)
        else:
            allowed = (shape, meta.shape)
        if tuple(node.meta.shape) not in allowed:
            return False
        if tip.rows.blocks > 1 and node.meta.shape == shape:
            return False
    follows = not following.isdisjoint(node.args)
    if follows and not tip.rows.as_they_lie and len(node.meta.shape) < len(shape):
        # what was computed in between is taken for rows, as it is read with them
        between = [path[ref].meta for ref in node.args if ref not in following and 0 <= ref < CONST]
        rows, given = tip.rows, [(meta.shape, meta.stride) for meta in between if meta is not None]
        return all(rows.seen(*meta) == rows.seen(*meta, numbers=True) for meta in given)
    return True


@dataclass(frozen=True, slots=True)
class GradientRows:
    """Over which rows the backward of reductions adds, and how often."""

    shape: Ints
    threads: int  # of each row; 0 for any
    sums: int  # 0 where a number of a row is spread over it
    axes: Ints = (-1,)  # that a row lies along
    takes_turns: str = ""  # in which of torch's kernels threads of several rows do

    def with_more(self, other: GradientRows | None) -> GradientRows | None:
        """Those of one kernel that does both; None if none can."""
        if other is None:
            return self
        sums = self.sums + other.sums
        if (self.shape, self.axes) != (other.shape, other.axes) or sums > MOST:
            return None
        if not (self.threads and other.threads):  # one of them adds nothing
            return replace(self if self.threads else other, sums=sums)
        return replace(self, sums=sums) if self == replace(other, sums=self.sums) else None


_SPREAD = GradientRows((), 0, 0)  # over rows that nothing is added over with it
# for which torch shares rows among blocks, if it does for any: on how many a chain runs is no part
# of what its backward is made of
_MOST_PROCESSORS = (1 << 20, 2048)


def gradient_rows(op: Reduction, x: Meta) -> GradientRows | None:
    """What the backward of `op` over `x` adds over; None if torch alone differentiates it."""
    if op.outside is not None or op.instead is not None:  # of one element of each row, mostly
        return _SPREAD
    if not op.grad or (op.name in MOMENTS and not (op.is_plain and x.flat)):
        return None  # torch's node takes the mean
    if op.name in MOMENTS:
        return _added("mean", x, op.axes, 1)
    if op.whole:
        name, sums = (NORM_SUMS[0], len(op.statistics)) if op.statistics else (SOFT_SUM, 1)
        return _added(name, x, op.axes, sums)
    return GradientRows(tuple(x.shape), 0, 0, op.axes) if op.keepdim else _SPREAD


def rows_added_up(x: Meta, number: Meta) -> GradientRows | None:
    """What gradients like `x` are added over for a value that was spread along its rows.

    None if that is no number of each row, or no block alone adds them up as torch does.
    """
    if not x.flat or x.ndim != number.ndim or 0 in x.shape or x.dtype not in DTYPES:
        return None
    sizes = [*zip(x.shape, number.shape, strict=True)]
    axes = tuple([k - x.ndim for k, (n, own) in enumerate(sizes) if n != own])
    return _added("sum", x, axes, 1) if axes else None


def _added(name: str, x: Meta, axes: Ints, sums: int) -> GradientRows | None:
    columns = prod([x.shape[axis] for axis in axes])
    through = iteration(x.shape, x.stride, axes)
    scheme = scheme_of(
        name, prod(x.shape) // columns, columns, x.dtype.itemsize, _MOST_PROCESSORS, through
    )
    if not isinstance(scheme, Scheme) or scheme.blocks > 1:
        return None
    takes_turns = scheme.kernel if scheme.interleaved > 1 else ""
    return GradientRows(tuple(x.shape), scheme.threads, sums, axes, takes_turns)

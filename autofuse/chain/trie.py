"""The trie of recorded ops: recording walks it, and a node of it is a whole program.

An edge is (op, operands): a pending operand as its index, a known Input as ~k, a new Input as its
Meta, a Python scalar as its class. Sizes are part of a Meta, so a node knows every shape, stride
and dtype exactly and a flush has nothing left to compute; sizes and scalar values are not part of a
kernel, so that a new size costs a few new nodes and no compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.reductions import Reduction
from ..ops.row import Op
from ..ops.views import InPlaceOp, JoinOp, ViewOp, WriteOp
from ..program.program import RowsOf
from ..settings.config import config
from ..supply.load import processors_of
from .infer import Cut, Inferred, infer
from .meta import Meta, make_meta
from .refusal import refusal_of
from .rowwise import goes_along, infer_outside, infer_rows
from .state import Node, Recorder
from .steps import channels_of
from .verified import refusal

IN_PLACE = "in place"  # why a chain ends: what follows does not go with memory that it writes to
_IN_ONE_STEP = 1 << 17  # bytes on a CPU; several threads, which may be interrupted, take more


def eager_node(recorder: Recorder, tip: Node, op: Op, reason: str) -> Node:
    """A node that says: run this op as eager PyTorch."""
    node = Node(recorder, None, op)
    node.index = tip.index
    node.reason, node.refusal = reason, refusal_of(op.name, reason) if reason else None
    return node


def is_run(node: Node) -> bool:
    """Whether eager PyTorch runs a kernel for it, of its own: torch makes the others by the way."""
    return node.base < 0 and not isinstance(node.op, (JoinOp, WriteOp))


def key_alone(node: Node, path: Sequence[Node]) -> tuple[Any, ...]:
    """The edge of the op of `node`, where a chain begins with it: its operands are in memory.

    path: the nodes of the chain that `node` stands in.
    """
    assert node.parent is not None
    known = len(node.parent.inputs)
    edge: list[Any] = [node.key[0]]
    slots: dict[int, int] = {}  # new Inputs, by what they are in the chain
    for operand in node.key[1:]:
        if isinstance(operand, type):
            edge.append(operand)
            continue
        if isinstance(operand, int):
            place, meta = operand, path[operand].meta if operand >= 0 else node.inputs[~operand]
        else:
            place, meta = ~known, operand
            known += 1
        edge.append(meta if place not in slots else ~slots[place])
        slots.setdefault(place, len(slots))
    return tuple(edge)


def extend(
    recorder: Recorder, tip: Node, op: Op, operands: Sequence[int | Meta | type], metas: list[Meta]
) -> Node:
    """The node for `op` after `tip`; not yet an edge of it. operands, metas: see `infer`."""
    if isinstance(tip.op, Reduction) and tip.op.outside is not None:
        if not isinstance(op, Reduction) or op.outside is None:
            return _cut(recorder, tip, op, "rows")
    if isinstance(op, ViewOp):
        return _extend_view(recorder, tip, op, operands[0])
    if isinstance(op, JoinOp):
        return _extend_join(recorder, tip, op, operands)
    if isinstance(op, WriteOp):
        return _extend_write(recorder, tip, op, operands[0], metas)
    if isinstance(op, InPlaceOp):
        return _extend_in_place(recorder, tip, op, operands, metas)
    if isinstance(op, Reduction) and tip.viewed and not _reads_views(tip, op, operands):
        return _cut(recorder, tip, op, "views")
    if isinstance(op, Reduction) and _writes_in_place(tip):
        return _cut(recorder, tip, op, IN_PLACE)  # rows are read by more threads than write them
    rows = tip.rows
    if isinstance(op, Reduction):
        op, reduced = _reduced(recorder, tip, op, operands, metas)
        found, rows = reduced if isinstance(reduced, tuple) else (reduced, rows)
    elif op.by_channel and (refused := refusal(recorder.device, op.name)):
        found = refused
    else:
        found = infer(
            op, operands, metas, tip.inputs, tip.consts, recorder.device, tip.grad_mode,
            tip.relaxed, tip.autocast,
        )  # fmt: skip
    if isinstance(found, Cut):
        return _cut(recorder, tip, op, found)
    if isinstance(found, str):
        return eager_node(recorder, tip, op, found)
    if isinstance(found, torch.dtype):
        node = eager_node(recorder, tip, op, "")
        node.cast = found
        return node
    if op.move is not None and tip.rows is not None:  # whose kernel reads no index maps
        return _cut(recorder, tip, op, "rows")
    node = Node(recorder, tip, op)
    node.viewed |= op.move is not None
    node.args, node.common, node.meta = found.args, found.common, found.meta
    node.inputs, node.consts, node.limits = found.inputs, found.consts, found.limits
    node.fresh_bytes = sum(meta.nbytes for meta in node.inputs[len(tip.inputs) :])
    largest = max((meta.nbytes for meta in node.inputs), default=0)
    node.pinned_limit = max(config.pinned_bytes, 2 * largest)
    node.holds_grad |= found.meta.requires_grad
    if rows is not None and node.viewed and node.holds_grad:  # derivatives go through one or other
        return _cut(recorder, tip, op, "views")
    if node.holds_grad and not tip.holds_grad and _writes_in_place(tip):
        return _cut(recorder, tip, op, IN_PLACE)  # what autograd saves is attached to no such run
    node.rows = rows
    if is_read_twice(tip, node):
        return _cut(recorder, tip, op, "an Input read in two ways")
    if tip.rows is not None and not goes_along(tip, node):
        return _cut(recorder, tip, op, "rows")
    return node


def _reads_views(tip: Node, op: Reduction, operands: Sequence[int | Meta | type]) -> bool:
    """Whether rows can be read through views of what is stored first: without a gradient, whose
    rules go through one or the other."""
    if op.groups or op.outside is not None or tip.holds_grad:
        return False
    path = tip.path()
    read = [path[ref] for ref in operands if isinstance(ref, int) and ref >= 0]
    # torch goes otherwise through rows that begin elsewhere
    return not any(node.offset * node.meta.dtype.itemsize % 16 for node in read)  # type: ignore[union-attr]


def _writes_in_place(tip: Node) -> bool:
    """Whether values of the program that ends at `tip` go to memory that it reads."""
    return any(node.into is not None for node in tip.path())


def is_read_twice(tip: Node, node: Node) -> bool:
    """Whether `node`, to follow `tip`, reads an Input by channel that others read as what it is, or
    the other way round."""
    path = tip.path()
    before, now = channels_of(path), channels_of((node,))
    if not before and not now:
        return False
    known = {ref for one in path for ref in one.args if ref < 0}
    return any(ref in known and before.get(ref) != now.get(ref) for ref in node.args if ref < 0)


def _cut(recorder: Recorder, tip: Node, op: Op, reason: str) -> Node:
    """A node that says: another chain begins with this op, for `reason`."""
    node = eager_node(recorder, tip, op, "")
    node.cuts = reason
    return node


def _reduced(
    recorder: Recorder, tip: Node, op: Reduction, operands: Sequence[int | Meta | type],
    metas: list[Meta],
) -> tuple[Reduction, tuple[Inferred, RowsOf | None] | str | torch.dtype]:  # fmt: skip
    """Which form of `op` it is, and what is inferred of that."""
    device = recorder.device
    made: tuple[Inferred, RowsOf | None] | str | torch.dtype
    if not config.reductions:
        return op, "AUTOFUSE_REDUCTIONS is 0"
    if refused := refusal(device, op.name):
        return op, refused
    if op.outside is None:
        made = infer_rows(op, operands, metas, tip, device, processors_of(device))
    else:
        made = infer_outside(op, operands, metas, tip, device)
    if op.instead is not None and isinstance(made, str):
        op = op.instead
        made = infer_outside(op, operands, metas, tip, device)
    return op, made


def _extend_view(recorder: Recorder, tip: Node, op: ViewOp, operand: int | Meta | type) -> Node:
    """The node for a view of a value of the program."""
    if not isinstance(operand, int) or operand < 0:  # it has been computed meanwhile
        return eager_node(recorder, tip, op, "a view of memory")
    viewed = tip.path()[operand]
    if viewed.into is not None:
        return _cut(recorder, tip, op, IN_PLACE)
    node = Node(recorder, tip, op)
    node.args, node.viewed = (operand,), True
    node.base, node.offset = operand if viewed.base < 0 else viewed.base, op.offset
    assert viewed.meta is not None
    graph = viewed.meta.requires_grad
    node.meta = make_meta(op.dtype, op.shape, op.stride, recorder.device, graph)
    node.pinned_limit = tip.pinned_limit
    return node


def _extend_join(
    recorder: Recorder, tip: Node, op: JoinOp, operands: Sequence[int | Meta | type]
) -> Node:
    """The node for values of the program side by side in memory."""
    if not all(isinstance(operand, int) and operand >= 0 for operand in operands):
        return eager_node(recorder, tip, op, "a join of memory")
    node = Node(recorder, tip, op)
    node.args, node.viewed = tuple(operands), True  # type: ignore[arg-type]
    path = tip.path()
    graph = any(path[index].meta.requires_grad for index in node.args)  # type: ignore[union-attr]
    node.meta = make_meta(op.dtype, op.shape, op.stride, recorder.device, graph)
    node.pinned_limit = tip.pinned_limit
    return node


def _extend_in_place(
    recorder: Recorder, tip: Node, op: InPlaceOp, operands: Sequence[int | Meta | type],
    metas: list[Meta],
) -> Node:  # fmt: skip
    """The node for an op on a tensor that alone holds its memory, or on what has come of it so."""
    first = operands[0]
    assert op.row is not None and not isinstance(first, type)
    if isinstance(first, Meta):
        into, meta = ~len(tip.inputs), first
    else:
        into = first if first < 0 else tip.path()[first].into  # type: ignore[assignment]
        meta = tip.inputs[~first] if first < 0 else metas[first]
    read = [*tip.inputs, *(x for x in operands if isinstance(x, Meta))] if tip.grad_mode else []
    if tip.rows is not None or tip.holds_grad or any(x.requires_grad for x in read):
        return eager_node(recorder, tip, op, "in place, beside rows or a gradient")
    if recorder.device.type == "cpu" and meta.nbytes > _IN_ONE_STEP:
        return eager_node(recorder, tip, op, "in place, on a CPU")
    node = extend(recorder, tip, op.row, operands, metas)
    if node.meta is meta and not (node.reason or node.cuts or node.cast):
        node.into = into
    elif not (node.reason or node.cuts):
        node = eager_node(recorder, tip, op, "in place, of another dtype or layout")
    return node


def _extend_write(
    recorder: Recorder, tip: Node, op: WriteOp, operand: int | Meta | type, metas: list[Meta]
) -> Node:
    """The node for a value of the program on its way to memory, without a gradient."""
    if not isinstance(operand, int) or operand < 0:
        return eager_node(recorder, tip, op, "a copy of memory")
    if tip.rows is not None or tip.holds_grad:
        return eager_node(recorder, tip, op, "rows that are written, or a gradient")
    assert op.row is not None
    found = infer(
        op.row, (operand,), metas, tip.inputs, tip.consts, recorder.device, False, tip.relaxed
    )
    if not isinstance(found, Inferred):
        return eager_node(recorder, tip, op, str(found))
    node = Node(recorder, tip, op)
    node.args, node.common = found.args, found.common
    node.meta = make_meta(op.dtype, op.shape, op.stride, recorder.device)
    node.pinned_limit = tip.pinned_limit
    return node

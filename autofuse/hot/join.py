"""Joins, as machine code: recorded as others of such tensors have been, or run as eager ops."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..ops.views import JoinOp
from .c import *
from .call import has_pending, passing
from .choice import known_as
from .record import tupled
from .values import (
    ask2,
    autocast_mode,
    class_of,
    grad_mode,
    is_ours,
    looked_on,
    node_of,
    recorder_of,
)


def joining(table, function, args, count, names) -> object:
    """`passing` for a function of several tensors, or of pending values `joins.record_join`.

    table: by handlers, the function, what is known of it, what torch calls it.
    """
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0 or count == 0:
        return 0
    items = 0
    size = 0
    if class_of(args[0]) is list:
        items = load(args[0] + LISTED)
        size = PyList_Size(args[0])
    elif class_of(args[0]) is tuple:
        items = args[0] + ITEMS
        size = PyTuple_Size(args[0])
    if has_pending(items, size) == 0:
        return passing(table, function, args, count, names)
    if size < 2 or size > MOST_OPERANDS or looked_on() != 0:
        return 0
    flat = room(32)  # a list may change: up to Python 3.11 to make a tuple runs finalizers
    for k in range(size):
        flat[k] = items[k]
    tensors = tupled(flat, size)
    dim = PyLong_FromLong(0)
    if names == 0 and count == 2:
        dim = kept(args[1])
    elif names != 0 and count == 1 and PyTuple_Size(names) == 1 and load(names + ITEMS) is DIM:
        dim = kept(args[1])
    elif names != 0 or count != 1:
        return 0
    if class_of(dim) is not int:
        return 0
    return joined(own + ITEMS, tensors, dim)


def joined(entry, tensors: tuple, dim) -> object:
    """`record_join` of what has been joined so before; or 0."""
    count = len(tensors)
    recorder: Recorder = recorder_of(tensors + ITEMS, count)
    if recorder == 0 or recorder is None or recorder.off is True:
        return 0
    if int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    chain: Chain = kept(recorder.chain)
    tip: Node = kept(chain.tip)
    if tip.told is not EMPTY or tip.looked_on is True or tip.rows is not None:
        return 0
    if tip.autocast is True or autocast_mode(recorder) != 0:
        return 0
    flat = room(34)
    flat[0] = entry[2]
    flat[1] = dim
    graph = 0
    for k in range(count):
        if is_ours(tensors[k]) == 0:
            return 0
        meta: Meta = known_as(tip, tensors[k])
        if meta == 0:
            return 0
        if meta.requires_grad is True:
            graph = grad_mode()
        flat[2 + k] = meta
    # gradients of one that is there twice add up in the order of operands, not of ops
    if graph != 0 and (recorder.keeps is not True or is_twice(tensors, count) != 0):
        return 0
    key = tupled(flat, 2 + count)
    found = PyDict_GetItemWithError(recorder.joins, key)
    if found == 0 or found is None:
        return 0
    op = kept(found)
    copies = PyList_New(0)
    parts = room(32)
    for k in range(count):
        parts[k] = tensors[k]
        if is_part(tensors[k]) == 0:
            one = tupled(parts + 8 * k, 1)
            copy = ask2(record_anew, CLONE, one)
            if copy == 0 or class_of(copy) is not Tensor:
                return 0
            PyList_Append(copies, copy)
            parts[k] = copy
    operands = tupled(parts, count)
    result = ask2(record_anew, op, operands)
    if result == 0 or class_of(result) is not Tensor:
        return 0
    return result


def is_twice(tensors: tuple, count):
    """Whether one of so many stands there twice."""
    for k in range(count):
        for n in range(k):
            if tensors[n] is tensors[k]:
                return 1
    return 0


def is_part(x):
    """Whether a kernel can compute it where it belongs: the result of an op that is no join."""
    node: Node = node_of(x)
    if node == 0:
        return 0
    return int(node.base) < 0 and class_of(node.op) is not JoinOp

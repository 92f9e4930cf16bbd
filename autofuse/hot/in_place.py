"""In-place ops that are recorded, as machine code: `record.in_place`."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.liveness import DEAD
from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..ops.views import in_place_ops
from ..sole import BYTES, FREES, REFERENCES
from ..torch_private import swap
from .c import *
from .inputs import lies_as, likely_meta
from .record import recorded, relieved
from .values import (
    are_others,
    autocast_mode,
    class_of,
    node_of,
    only_recorder,
    own_recorders,
    set_class,
    state_of,
)


def record_inplace(entry, op, target: Tensor, operands: tuple) -> object:
    """`record_inplace`."""
    if renamed(op, target, operands + ITEMS, len(operands)) == 0:
        return 0
    return True


def is_seen_apart(chain: Chain, node: Node):
    """Whether somebody holds another value of `chain` in the memory of `node`, and sees a write."""
    view: Node = chain.tip
    if view.viewed is not True:
        return 0
    if int(node.base) >= 0:
        return 1
    index = int(node.index)
    while view.op is not None:
        if int(view.base) == index and load32(chain[int(view.index)]) + COUNTED > DEAD:
            return 1
        view = view.parent
    return 0


def renamed(op, target, operands, count):
    """Record an op on a pending `target`, whose handle then names the result; or 0."""
    node: Node = node_of(target)
    if node == 0:
        return 0
    recorder: Recorder = node.recorder
    if recorder is None or int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    chain: Chain = kept(recorder.chain)
    tip: Node = chain.tip
    first = int(node.index)
    if tip.holds_grad is True or first >= len(chain) or is_seen_apart(chain, node) != 0:
        return 0
    if chain[first] is not target:
        return 0
    own = op
    if node.into is not None:
        own = PyDict_GetItemWithError(in_place_ops, op)
        if own == 0 or operands[0] is not target:
            return 0
    result = recorded(0, own, operands, count, node.meta)
    if result == 0:
        return 0
    new: Node = node_of(result)
    if new == 0:
        return 0
    if new.grad_mode is True:
        metas: tuple = new.inputs
        for k in range(len(metas)):
            read: Meta = metas[k]
            if read.requires_grad is True:
                return 0
    bumps = chain.bumps
    if bumps is None:
        bumps = PyDict_New()  # up to Python 3.11 this runs finalizers
    times = 1
    before = PyDict_GetItemWithError(bumps, node.index)
    if before != 0:
        times += int(before)
    number = PyLong_FromLong(times)
    if recorder.chain is not chain or chain.tip is not new or state_of(target) is not node:
        return 0
    if is_seen_apart(chain, node) != 0:
        return 0
    last = int(new.index)
    position = 0
    if node.into is not None:
        position = PyDict_GetItemWithError(chain.placed, node.index)
        if position == 0:
            return 0
        PyDict_SetItem(chain.placed, new.index, position)
        PyDict_DelItem(chain.placed, node.index)
    chain[first] = result
    chain[last] = target
    node.shell = result
    new.shell = target
    PyObject_GenericSetAttr(target, AF, new)
    PyObject_GenericSetAttr(result, AF, node)
    if before != 0:
        PyDict_DelItem(bumps, node.index)
    PyDict_SetItem(bumps, new.index, number)
    chain.bumps = bumps
    return relieved(recorder, chain, new)


def is_sole(recorder: Recorder, x):
    """Whether nobody else can reach the memory of x, as `sole` tells, and how it is freed is known.

    How much it is, is not looked at.
    """
    if OWNER_AT == 0 or class_of(x) is not Tensor:
        return 0
    inner = load(x + TENSOR_AT)
    owner = load(inner + OWNER_AT)
    if owner == 0 or load32(inner + 8 * REFERENCES) != 1 or load(inner + AUTOGRAD_AT) != 0:
        return 0
    if load(owner + KNOWN_AT) != 0:
        return 0
    return load32(owner + 8 * REFERENCES) == 1 and load(owner + 8 * FREES) == int(recorder.frees)


def taken(recorder: Recorder, op, target, operands, count):
    """Record an op on `target`, which is concrete and sole: `record_sole`.

    1 if that is done, 0 if it has to be written at once, 2 if Python has to decide.
    """
    if recorder.inference is True or operands[0] is not target or is_alone() == 0:
        return 0
    if PyDict_Size(using) != 0 or has_attributes(target) != 0:
        return 0
    shared = is_shared(recorder, target)
    if shared != 0:
        return shared - 1
    meta: Meta = state_of(target)
    if meta is UNKNOWN:
        chain: Chain = recorder.chain
        tip: Node = chain.tip
        meta = likely_meta(tip.likely, target)
        if meta == 0:
            return 2
        PyObject_GenericSetAttr(target, AF, meta)
    if class_of(meta) is not Meta or meta.dense is not True or meta.device is not recorder.device:
        return 0
    size = load(load(load(target + TENSOR_AT) + OWNER_AT) + 8 * BYTES)
    if size != int(meta.nbytes) or size == 0 or lies_as(target, meta) == 0:
        return 0
    own = PyDict_GetItemWithError(in_place_ops, op)
    if own == 0 or autocast_mode(recorder) != 0:
        return 2
    result = recorded(TELL, own, operands, count, meta)
    if result == 0:
        return 2
    if class_of(result) is Node:  # eager is better
        return 0
    return exchanged(recorder, target, meta, result)


def exchanged(recorder: Recorder, target, meta: Meta, result):
    """Let `result`, just recorded, have the memory of `target`, which is pending from then on."""
    node: Node = node_of(result)
    if node == 0 or node.into is None:
        return 0
    chain: Chain = kept(recorder.chain)
    inputs: list = kept(chain.inputs)
    position = ~int(node.into)
    bumps = chain.bumps
    places = chain.placed
    if bumps is None:
        bumps = PyDict_New()  # up to Python 3.11 this runs finalizers
    if places is None:
        places = PyDict_New()
    number = PyLong_FromLong(position)
    one = PyLong_FromLong(1)
    args: tuple = PyTuple_New(2)
    args[0] = target
    args[1] = result
    if recorder.chain is not chain or chain.tip is not node or state_of(target) is not meta:
        return 0
    if chain.inputs is not inputs or inputs[position] is not target:
        return 0
    if is_sole(recorder, target) == 0:
        return 0
    set_class(target, Plain)  # see `launch.settled`
    set_class(result, Plain)
    swapped = tried(PyObject_Call(swap, args, 0))
    set_class(target, Tensor)
    set_class(result, Tensor)
    if swapped == 0:  # C++ has a weak reference
        PyErr_Clear()
        return 0
    inputs[position] = result
    if PyDict_Size(chain.known) != 0:
        PyDict_Clear(chain.known)
    chain[int(node.index)] = target
    node.shell = target
    PyObject_GenericSetAttr(target, AF, node)
    PyObject_GenericSetAttr(result, AF, meta)
    PyDict_SetItem(bumps, node.index, one)
    PyDict_SetItem(places, node.index, number)
    chain.bumps = bumps
    chain.placed = places
    return relieved(recorder, chain, node)


def is_shared(recorder: Recorder, x):
    """Whether another thread may have it plain, for it is lent: `inside.others_wait`.

    1 if it may, 0 if not, 3 if Python has to look.
    """
    if len(loans) == 0:
        return 0
    waited = PyDict_GetItemWithError(others_waited, recorder.ident)
    if waited is True:
        return 0
    if waited == 0 and are_others() == 0:
        return 0
    key = PyLong_FromLong(x)
    if PyDict_GetItemWithError(loans, key) == 0:
        return 0
    if waited == 0:
        return 3
    return 1


def has_attributes(x):
    """Whether somebody has set some of his own, which a shell must not have."""
    own: dict = tried(PyObject_GetAttr(x, ATTRIBUTES))
    if own == 0:
        PyErr_Clear()
        return 1
    return PyDict_Size(own) > 1 or (PyDict_Size(own) == 1 and PyDict_GetItemWithError(own, AF) == 0)


def is_alone():
    """`state.is_alone`."""
    return only_recorder() != 0 or own_recorders() != 0

"""In-place ops, as machine code: `record.writes`, and what leads there."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dispatch.unrecorded import Known
from .c import (
    AF,
    COUNT,
    CURRENT,
    EQUAL,
    FAILED,
    ITEMS,
    RECORDERS,
    WRITE,
    Parameter,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_DelItem,
    PyDict_GetItemWithError,
    PyDict_New,
    PyDict_Next,
    PyDict_SetItem,
    PyDict_Size,
    PyErr_Clear,
    PyErr_Occurred,
    PyList_GetItem,
    PyList_SetItem,
    PyList_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_GenericSetAttr,
    PyObject_GetAttr,
    PyObject_RichCompareBool,
    PyObject_Vectorcall,
    PyThread_get_thread_ident,
    PyTuple_Size,
    all_recorders,
    call_pointer,
    load,
    local,
    room,
    store,
)
from .call import is_everyday, is_pending_elsewhere
from .flush import flush_into, flush_now
from .inputs import item_of, likely_meta
from .record import are_watched, called, recorded
from .values import address_of, class_of, grad_mode, is_ours, python, slot_of, state_of


def writing(entry, function, args, flags, names):
    """An in-place method or function.

    entry: the function, what is known of it, the op that it is with operands alone (or None) and
    how many there are, what else Python does.
    """
    count = flags & COUNT
    recorder: Recorder = PyObject_GetAttr(local, CURRENT)
    if recorder == 0:
        return 0
    Py_DecRef(recorder)
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if count == 0 or is_ours(load(args)) == 0 or is_free(recorder) == 0:
        if PyErr_Occurred() != 0:
            return 0
        return python(function, args, flags, names)
    target = load(args)
    known: Known = load(entry + 8)
    written = 0
    if are_settled(args, every) != 0:
        if flush_now(recorder, known.name) == 0:
            return 0
        if is_empty(recorder) != 0:
            written = write_now(recorder, load(entry), known, args, count, names)
    elif names == 0 and load(entry + 16) is not None and count == load(entry + 24):
        if class_of(state_of(target)) is Node:
            written = renamed(load(entry + 16), target, args, count)
        else:
            written = wrote(load(entry + 16), target, args, count)
    if PyErr_Occurred() != 0:
        return 0
    if written == 1:
        Py_IncRef(target)
        return target
    return PyObject_Vectorcall(load(entry + 32), args, count, names)


def setting(entry, function, args, flags, names):
    """`x[i] = value`; entry: the function, what is known of it."""
    recorder: Recorder = PyObject_GetAttr(local, CURRENT)
    if recorder == 0:
        return 0
    Py_DecRef(recorder)
    if names == 0 and flags & COUNT == 3 and class_of(load(args)) is Tensor:
        known: Known = load(entry + 8)
        if is_free(recorder) != 0 and is_everyday(recorder, known, args, 3, 0) != 0:
            if flush_now(recorder, known.name) == 0:
                return 0
            if is_empty(recorder) != 0 and write_now(recorder, load(entry), known, args, 3, 0) != 0:
                Py_IncRef(None)
                return None
        if PyErr_Occurred() != 0:
            return 0
    return python(function, args, flags, names)


def unread(entry, function, args, flags, names):
    """What `patches.memory` puts before a function that writes; entry: by those, the function."""
    own = PyDict_GetItemWithError(load(entry), function)
    if own == 0:
        return 0
    if is_quiet() != 0:
        return PyObject_Vectorcall(load(own + ITEMS), args, flags, names)
    return python(function, args, flags, names)


def placing(entry, function, args, flags, names):
    """`patches.memory`'s setter of an attribute; entry: C's setter, its closure."""
    if names == 0 and flags & COUNT == 2 and is_ours(load(args)) != 0:
        value = load(args + 8)
        if value is None or value is True or value is False or class_of(value) is Plain:
            if is_quiet() != 0:
                if call_pointer(load(entry), load(args), value, load(entry + 8)) & FAILED != 0:
                    return 0
                Py_IncRef(None)
                return None
    return python(function, args, flags, names)


def taking(entry, function, args, flags, names):
    """`patches.memory`'s getter of an attribute; entry: C's getter, its closure."""
    if names == 0 and flags & COUNT == 1 and is_ours(load(args)) != 0:
        return call_pointer(load(entry), load(args), load(entry + 8))
    return python(function, args, flags, names)


def is_quiet():
    """Whether nobody but this thread has recorded anything, and nothing is pending."""
    if PyList_Size(all_recorders) == 0:
        return 1
    recorders = PyObject_GetAttr(local, RECORDERS)
    if recorders == 0:
        PyErr_Clear()
        return 0
    Py_DecRef(recorders)
    if PyList_Size(all_recorders) != PyDict_Size(recorders):
        return 0
    place = room(3)  # the position, a key, a value
    store(place, 0)
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        recorder: Recorder = load(place + 16)
        if PyList_Size(recorder.chain) != 0 or recorder.reading is True:
            return 0
        if PyLong_AsLong(recorder.ident) == 0:
            return 0
    return 1


def is_free(recorder: Recorder):
    """Whether this thread may use it now, and may write without anybody else in its way."""
    if recorder is None or recorder == 0 or are_watched() != 0:
        return 0
    if PyLong_AsLong(recorder.ident) != PyThread_get_thread_ident():
        return 0
    return is_pending_elsewhere(recorder) == 0


def is_empty(recorder: Recorder):
    """Whether nothing reads what is to be written: a finalizer may have recorded in the flush."""
    return PyList_Size(recorder.chain) == 0 and is_pending_elsewhere(recorder) == 0


def are_settled(args, count):
    """Whether an in-place op on these can run at once."""
    k = 0
    while k < count:
        x = load(args + 8 * k)
        kind = class_of(x)
        if kind is Tensor:
            state = state_of(x)
            if class_of(state) is not Meta and state is not UNKNOWN:
                return 0
        elif kind is not float and kind is not int and kind is not bool:
            if kind is not Plain and kind is not Parameter:
                return 0
        k += 1
    return 1


def write_now(recorder: Recorder, function, known: Known, args, count, names):
    """Run an in-place op as eager PyTorch; 1, or 0 after an error."""
    result = called(function, known.reason, args, count, names)
    if result == 0:
        return 0
    Py_DecRef(result)
    if result is NotImplemented:  # of an operator's method; Python comes to the same
        return 0
    if grad_mode() != 0 and class_of(load(args)) is Tensor:  # it may require grad now
        PyObject_GenericSetAttr(load(args), AF, UNKNOWN)
    return 1


def record_inplace(entry, function, args, flags, names):
    """`record_inplace`."""
    if names == 0 and flags & COUNT == 3:
        operands = load(args + 16)
        if class_of(operands) is tuple and class_of(load(args + 8)) is Tensor:
            if renamed(load(args), load(args + 8), operands + ITEMS, PyTuple_Size(operands)) != 0:
                Py_IncRef(True)
                return True
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def renamed(op, target, operands, count):
    """Record an op on a pending `target`, whose handle then names the result; or 0."""
    node: Node = state_of(target)
    if class_of(node) is not Node:
        return 0
    recorder: Recorder = node.recorder
    if PyLong_AsLong(recorder.ident) != PyThread_get_thread_ident():
        return 0
    chain: Chain = recorder.chain
    Py_IncRef(chain)
    done = renamed_in(recorder, chain, node, op, target, operands, count)
    Py_DecRef(chain)
    return done


def renamed_in(recorder: Recorder, chain: Chain, node: Node, op, target, operands, count):
    """`renamed` in the open chain."""
    tip: Node = chain.tip
    first = PyLong_AsLong(node.index)
    if tip.holds_grad is True or first >= PyList_Size(chain):
        return 0
    if PyList_GetItem(chain, first) is not target:
        return 0
    result = recorded(0, op, operands, count, node.meta)
    if result == 0:
        return 0
    bumps = chain.bumps
    if bumps is not None:
        Py_IncRef(bumps)
    else:
        bumps = PyDict_New()  # up to Python 3.11 this runs finalizers
    times = 1
    before = 0
    if bumps != 0:
        before = PyDict_GetItemWithError(bumps, node.index)
    if before != 0:
        times += PyLong_AsLong(before)
    number = PyLong_FromLong(times)
    done = bumps != 0 and number != 0
    new: Node = state_of(result)
    if recorder.chain is not chain or chain.tip is not new or state_of(target) is not node:
        done = 0
    if done != 0:
        last = PyLong_AsLong(new.index)
        Py_IncRef(result)
        PyList_SetItem(chain, first, result)
        Py_IncRef(target)
        PyList_SetItem(chain, last, target)
        node.shell = result
        new.shell = target
        PyObject_GenericSetAttr(target, AF, new)
        PyObject_GenericSetAttr(result, AF, node)
        if before != 0:
            PyDict_DelItem(bumps, node.index)
        PyDict_SetItem(bumps, new.index, number)
        chain.bumps = bumps
    Py_DecRef(number)
    Py_DecRef(bumps)
    Py_DecRef(result)
    return done


def record_write(entry, function, args, flags, names):
    """`record_write`."""
    if names == 0 and flags & COUNT == 3:
        operands = load(args + 16)
        if class_of(operands) is tuple and is_ours(load(args + 8)) != 0:
            if wrote(load(args), load(args + 8), operands + ITEMS, PyTuple_Size(operands)) != 0:
                Py_IncRef(True)
                return True
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def wrote(op, target, operands, count):
    """Write an op to the memory of a concrete `target` with what it reads; 0 if Python has to."""
    recorder: Recorder = PyObject_GetAttr(local, CURRENT)
    if recorder == 0:
        return 0
    Py_DecRef(recorder)
    if recorder is None:
        return 0
    if grad_mode() != 0 or recorder.grad is True:
        return 0
    if PyLong_AsLong(recorder.ident) != PyThread_get_thread_ident():
        return 0
    if is_pending_elsewhere(recorder) != 0:
        return 0
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if PyList_Size(chain) == 0 or tip.holds_grad is True:
        return 0
    meta: Meta = state_of(target)  # UNKNOWN for a plain tensor
    if class_of(target) is not Tensor:
        meta = likely_meta(tip.likely, target)
    if meta == 0 or class_of(meta) is not Meta or recorder.chain is not chain:
        return 0
    if meta.inference is True or recorder.inference is True or meta.flat is not True:
        return 0
    made = meta
    if meta.requires_grad is True:
        made = meta.ungraded
        if made is None:
            return 0
    if can_write(recorder, chain, target, meta, operands, count) == 0:
        return 0
    Py_IncRef(chain)
    done = 0
    result = recorded(0, op, operands, count, made)
    if result != 0:
        apart = reads_apart(recorder, chain, target, meta)
        if recorder.chain is chain and chain.tip is state_of(result) and apart == 0:
            done = flush_into(recorder, WRITE, target, chain)
        Py_DecRef(result)
    Py_DecRef(chain)
    return done


def can_write(recorder: Recorder, chain: Chain, target, meta: Meta, operands, count):
    """Whether something pending is written, and by the thread that reads an element."""
    pending = 0
    reads = slot_of(chain, target) != 0
    k = 0
    while k < count:
        x = load(operands + 8 * k)
        if x is target:
            reads = 1
        item = item_of(recorder, chain, x)
        if item == 0:
            return 0
        if class_of(item) is int:
            if class_of(x) is Tensor:
                pending = pending | (class_of(state_of(x)) is Node)
        elif class_of(item) is Meta:
            other: Meta = item
            if other.flat is not True:
                return 0
        k += 1
    if pending == 0 or reads_apart(recorder, chain, target, meta) != 0:
        return 0
    k = PyList_Size(chain)
    while reads != 0 and k > 0:  # another shape would be another kernel
        k -= 1
        node: Node = state_of(PyList_GetItem(chain, k))
        own: Meta = node.meta
        if PyObject_RichCompareBool(own.shape, meta.shape, EQUAL) != 1:
            return 0
    return 1


def reads_apart(recorder: Recorder, chain: Chain, target, meta: Meta):
    """Whether `chain` may read memory of `target` by another tensor."""
    start = address_of(target)
    failed = start == -1
    tip: Node = chain.tip
    end = start + PyLong_AsLong(meta.nbytes)
    k = PyList_Size(chain.inputs)
    while k > 0 and failed == 0:
        k -= 1
        if PyList_GetItem(chain.inputs, k) is not target:
            other: Meta = load(tip.inputs + ITEMS + 8 * k)
            begins = PyLong_AsLong(PyList_GetItem(chain.marks, 2 * k + 1))
            if other.flat is not True:
                return 1
            if begins < end and start < begins + PyLong_AsLong(other.nbytes):
                return 1
    return failed

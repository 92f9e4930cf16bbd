"""Entering and leaving fused calls, as machine code: `lending.lend` and `restore`, and flushing."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Tensor
from ..chain.state import Recorder
from .c import (
    AF,
    COUNT,
    ITEMS,
    KEYS_AT,
    RECORDERS,
    TENSOR_AT,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_DelItem,
    PyDict_GetItemWithError,
    PyDict_Next,
    PyDict_SetItem,
    PyErr_Clear,
    PyErr_Occurred,
    PyList_Append,
    PyList_GetItem,
    PyList_New,
    PyList_SetSlice,
    PyList_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_CallOneArg,
    PyObject_GenericSetAttr,
    PyObject_GetAttr,
    PyTuple_Size,
    load,
    local,
    room,
    store,
)
from .flush import flush_now
from .values import class_of, is_simple, python, set_class, state_of


def lending(entry, function, args, flags, names):
    """`lending.lend`.

    entry: how often tensors are lent, by id; dispatch keys of such as can be; what asks Python.
    """
    values = load(args)
    if names != 0 or flags & COUNT != 2:
        return python(function, args, flags, names)
    if class_of(values) is not tuple and class_of(values) is not list:
        return python(function, args, flags, names)
    others = PyList_New(0)
    k = 0
    while others != 0:
        if class_of(values) is tuple:
            if k >= PyTuple_Size(values):
                break
            x = load(values + ITEMS + 8 * k)
        else:
            if k >= PyList_Size(values):
                break
            x = PyList_GetItem(values, k)
        k += 1
        Py_IncRef(x)
        if class_of(x) is Plain:
            if is_lendable(entry, x) != 0:
                lend_one(load(entry), x, load(args + 8))
        elif is_simple(class_of(x)) == 0:
            PyList_Append(others, x)
        Py_DecRef(x)
        if PyErr_Occurred() != 0:
            Py_DecRef(others)
            return 0
    return others


def is_lendable(entry, x):
    """Whether it can be wrapped, which its dispatch keys say once Python has."""
    keys = load(load(x + TENSOR_AT) + KEYS_AT)
    known = load(entry + 8)
    k = PyList_Size(known)
    while k > 0:
        k -= 1
        if PyLong_AsLong(PyList_GetItem(known, k)) == keys:
            return 1
    can = PyObject_CallOneArg(load(entry + 16), x)
    Py_DecRef(can)
    return can is True


def lend_one(counts_of, x, lent):
    """`lending.lend_one`: no Python runs here."""
    key = PyLong_FromLong(x)
    if key == 0:
        return
    times = 1
    before = PyDict_GetItemWithError(counts_of, key)
    if before != 0:
        times += PyLong_AsLong(before)
    number = PyLong_FromLong(times)
    if number != 0 and PyList_Append(lent, x) == 0:
        if PyDict_SetItem(counts_of, key, number) != 0:
            size = PyList_Size(lent)
            PyList_SetSlice(lent, size - 1, size, 0)
        elif class_of(x) is Plain:
            set_class(x, Tensor)
    Py_DecRef(number)
    Py_DecRef(key)


def restoring(entry, function, args, flags, names):
    """`lending.restore`; entry: how often tensors are lent, by id."""
    if names != 0 or flags & COUNT != 1:
        return python(function, args, flags, names)
    lent = load(args)
    size = PyList_Size(lent)
    while size > 0:
        x = PyList_GetItem(lent, size - 1)
        if class_of(x) is Tensor and state_of(x) is UNKNOWN:  # which may be its own or its class's
            PyObject_GenericSetAttr(x, AF, UNKNOWN)  # up to Python 3.11 this runs finalizers
        if PyErr_Occurred() != 0:
            return 0
        if restore_one(load(entry), x, lent, size) == 0:  # others have lent it, too
            if PyErr_Occurred() != 0:
                return 0
            return python(function, args, flags, names)
        size = PyList_Size(lent)
    Py_IncRef(None)
    return None


def restore_one(counts_of, x, lent, size):
    """Make the last of `lent` plain, if this call alone has lent it: no Python runs here."""
    if PyList_Size(lent) != size or class_of(x) is not Tensor:
        return 0
    key = PyLong_FromLong(x)
    if key == 0:
        return 0
    count = PyDict_GetItemWithError(counts_of, key)
    done = count != 0 and PyLong_AsLong(count) == 1
    if done != 0:
        if PyObject_GenericSetAttr(x, AF, 0) != 0:
            PyErr_Clear()  # a finalizer has done it
        PyDict_DelItem(counts_of, key)
        set_class(x, Plain)
        PyList_SetSlice(lent, size - 1, size, 0)
    Py_DecRef(key)
    return done


def flush_pending(entry, function, args, flags, names):
    """`flush_thread`, where at most one recorder has something pending."""
    if names == 0 and flags & COUNT == 1:
        recorder: Recorder = pending_recorder()
        if recorder != 0:
            Py_IncRef(recorder)
            done = flush_now(recorder, load(args))
            Py_DecRef(recorder)
            if done == 0:
                return 0
            recorder = pending_recorder()
        if PyErr_Occurred() != 0:
            return 0
        if recorder == 0:
            Py_IncRef(None)
            return None
    return python(function, args, flags, names)


def pending_recorder():
    """The first recorder of this thread that has something pending, borrowed; or 0."""
    recorders = PyObject_GetAttr(local, RECORDERS)
    if recorders == 0:
        return 0
    Py_DecRef(recorders)
    place = room(3)  # the position, a key, a value
    store(place, 0)
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        recorder: Recorder = load(place + 16)
        if PyList_Size(recorder.chain) != 0 or recorder.reading is True:
            return recorder
        if recorder.running is not None:
            return recorder
    return 0

"""Entering and leaving fused calls, as machine code: `lending.lend` and `restore`, and flushing.

And calls of which it is known which way they go.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Tensor
from ..chain.state import Recorder
from ..fused import Owner, Site
from ..record.contest import PLAIN, Contest
from .c import *
from .flush import flush_now
from .values import class_of, grad_mode, has_value, is_simple, item_at, set_class, state_of

NESTED = 5  # containers in containers that are looked into


def calling(entry, function, args, count, names) -> object:
    """What `fuse` has made, as long as it is known which way the next calls of a module go.

    entry: where its closure has the function, and what is known of modules. In Python that takes
    0.8 us, and 10 with nothing of it in the caches (H100's host).
    """
    cells = load(function + CLOSURE_AT) + ITEMS
    owners: dict = load(load(cells + 8 * entry[1]) + CELL_AT)
    key = PyLong_FromLong(first_module(args, count) + grad_mode())
    owner: Owner = PyDict_GetItemWithError(owners, key)
    if owner == 0:
        return 0
    site: Site = kept(owner.granted)  # what runs in `begins_fused` may forget it
    if class_of(site) is not Site:
        return 0
    contest: Contest = kept(site.contest)
    if class_of(contest) is not Contest:
        return 0
    free = int(contest.free)
    if free <= 0:
        return 0
    own = kept(load(load(cells + 8 * entry[0]) + CELL_AT))
    if int(contest.way) != PLAIN:
        if begins_fused() == 0:
            return 0
        contest.free = PyLong_FromLong(free - 1)
        return fused(own, args, count, names, site)
    if len(measuring) == 0 or len(loans) != 0:
        return 0
    if PyDict_GetItemWithError(hook_names, OBSERVER) is not None:
        return 0
    values = count
    if names != 0:
        values += PyTuple_Size(names)
    if values > 7:
        return 0
    for k in range(values):
        kind = class_of(args[k])
        if is_simple(kind) == 0 and PyType_IsSubtype(kind, Module) == 0:
            if is_quick(args[k], 0, NESTED) == 0:
                return 0
    contest.free = PyLong_FromLong(free - 1)
    result = PyObject_Vectorcall(own, args, count, names)
    if result == 0 or is_quick(result, 1, NESTED) != 0:
        return result
    given = room(8)
    given[0] = result
    for k in range(values):
        given[k + 1] = args[k]
    return PyObject_Vectorcall(left_plain, given, count + 1, names)


def begins_fused():
    """Whether a call that begins now is an outermost one and records, and nothing is compiled."""
    if PyObject_CallNoArgs(is_outermost) is not True:  # signal handlers may run, and raise
        return 0
    return PyObject_CallNoArgs(is_compiling) is False


def fused(own, args, count, names, site) -> object:
    """`fused.call_fused`."""
    ordered: tuple = PyTuple_New(count)
    for k in range(count):
        ordered[k] = args[k]
    named: dict = PyDict_New()
    if names != 0:
        for k in range(PyTuple_Size(names)):
            PyDict_SetItem(named, load(names + ITEMS + 8 * k), args[count + k])
    given = room(4)
    given[0] = own
    given[1] = ordered
    given[2] = named
    given[3] = site
    return PyObject_Vectorcall(call_fused, given, 4, 0)


def first_module(args, count):
    """The first one before a tensor, or 0."""
    for k in range(count):
        kind = class_of(args[k])
        if kind is Plain:
            return 0
        if PyType_IsSubtype(kind, Module) != 0:
            return args[k]
    return 0


def is_quick(x, lists, depth):
    """Whether no tensor in it is wrapped, at a glance: it is simple, or a tuple of such, of any
    class; or a list, with `lists`, for others may put something in one of these."""
    kind = class_of(x)
    if is_simple(kind) != 0:
        return 1
    if depth == 0:  # a list may hold itself
        return 0
    if PyType_IsSubtype(kind, tuple) != 0:
        for k in range(PyTuple_Size(x)):
            if is_quick(load(x + ITEMS + 8 * k), lists, depth - 1) == 0:
                return 0
        return 1
    if kind is list and lists != 0:
        for k in range(PyList_Size(x)):
            if is_quick(PyList_GetItem(x, k), lists, depth - 1) == 0:
                return 0
        return 1
    return 0


def lending(entry, values, lent: list) -> object:
    """`lending.lend`.

    entry: how often tensors are lent, by id; dispatch keys of such as can be; what asks Python.
    """
    if class_of(values) is not tuple and class_of(values) is not list:
        return 0
    others = PyList_New(0)
    k = 0
    while 1:
        x = kept(item_at(values, k))
        if x == 0:
            return others
        k += 1
        if class_of(x) is Plain:
            if is_lendable(entry, x) != 0:
                lend_one(entry[0], x, lent)
        elif is_simple(class_of(x)) == 0 and is_bare_module(class_of(x)) == 0:
            PyList_Append(others, x)
        if PyErr_Occurred() != 0:
            return 0


def is_bare_module(kind):
    """Whether it is a class of modules, and of no tuples."""
    return PyType_IsSubtype(kind, Module) != 0 and PyType_IsSubtype(kind, tuple) == 0


def is_lendable(entry, x):
    """Whether it can be wrapped, which its dispatch keys say once Python has."""
    keys = load(load(x + TENSOR_AT) + KEYS_AT)
    known: list = entry[1]
    for k in range(len(known)):
        if int(known[k]) == keys:
            return 1
    return borrowed(PyObject_CallOneArg(entry[2], x)) is True


def lend_one(loans: dict, x, lent: list):
    """`lending.lend_one`: no Python runs here."""
    key = PyLong_FromLong(x)
    times = 1
    before = PyDict_GetItemWithError(loans, key)
    if before != 0:
        times += int(before)
    elif class_of(x) is not Plain:  # its user's, which somebody had made plain for a while
        return
    number = PyLong_FromLong(times)
    if PyList_Append(lent, x) == 0:
        if PyDict_SetItem(loans, key, number) != 0:
            PyList_SetSlice(lent, len(lent) - 1, len(lent), 0)
        elif class_of(x) is Plain:
            set_class(x, Tensor)
    if PyDict_Size(others_waited) != 0:
        PyDict_Clear(others_waited)


def restoring(entry, lent: list) -> object:
    """`lending.restore`; entry: how often tensors are lent, by id."""
    while len(lent) != 0:
        size = len(lent)
        x = lent[size - 1]
        if class_of(x) is Tensor and state_of(x) is UNKNOWN:  # which may be its own or its class's
            PyObject_GenericSetAttr(x, AF, UNKNOWN)  # up to Python 3.11 this runs finalizers
        if PyErr_Occurred() != 0:
            return 0
        if restore_one(entry[0], x, lent, size) == 0:  # others have lent it, too
            return 0
    return None


def restore_one(loans: dict, x, lent: list, size):
    """Make the last of `lent` plain, if this call alone has lent it: no Python runs here."""
    if len(lent) != size or class_of(x) is not Tensor:
        return 0
    state = state_of(x)
    if has_value(state) == 0:
        return 0
    key = PyLong_FromLong(x)
    count = PyDict_GetItemWithError(loans, key)
    if count == 0 or int(count) != 1:
        return 0
    if PyObject_GenericSetAttr(x, AF, 0) != 0:
        PyErr_Clear()  # a finalizer has done it
    PyDict_DelItem(loans, key)
    set_class(x, Plain)
    PyList_SetSlice(lent, size - 1, size, 0)
    return 1


def becoming_plain(entry, x: Tensor) -> object:
    """`lending.become_plain`, of one that is not pending and does not stand beside its value."""
    if class_of(x) is not Tensor:
        return 0
    state = state_of(x)
    if has_value(state) == 0:
        return 0
    if state is UNKNOWN:  # which may be its own or its class's
        PyObject_GenericSetAttr(x, AF, UNKNOWN)  # up to Python 3.11 this runs finalizers
        if state_of(x) is not UNKNOWN or PyErr_Occurred() != 0:
            return 0
    if PyObject_GenericSetAttr(x, AF, 0) != 0:
        PyErr_Clear()  # a finalizer has done it
    set_class(x, Plain)
    return kept(x)


def flush_pending(entry, reason) -> object:
    """`flush_thread`, where at most one recorder has something pending."""
    recorder = kept(pending_recorder())
    if recorder != 0 and flush_now(recorder, reason) != 0:
        recorder = pending_recorder()
    if recorder != 0 or PyErr_Occurred() != 0:
        return 0
    return None


def pending_recorder():
    """The first recorder of this thread that has something pending or untold, borrowed; or 0."""
    recorders = PyObject_GetAttr(local, RECORDERS)
    place = room(3)  # the position, a key, a value
    place[0] = 0
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        recorder: Recorder = place[2]
        if PyList_Size(recorder.chain) != 0 or recorder.reading is True:
            return recorder
        if recorder.running is not None or PyList_Size(recorder.untold) != 0:
            return recorder
    return 0

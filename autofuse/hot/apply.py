"""The `apply` of a Function, as machine code: nothing is recorded while it runs."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..chain.state import Node, Recorder
from .c import *
from .call import wrapped
from .flush import flush_now
from .lend import pending_recorder
from .values import class_of, current_recorder, ended, has_value, is_simple, state_of

UNWRAPPED, VALUES = 1, 2  # among the arguments of an `apply`


def applying(entry, function, args, count, names) -> object:
    """`patches.calls.apply` where this thread records; entry: torch's."""
    recorder: Recorder = current_recorder()
    if names != 0 or recorder == 0 or recorder is None:
        return 0
    given = given_to(recorder, args, count)
    if given == 0:
        return 0
    mine: dict = PyObject_GetAttr(local, ATTRIBUTES)
    own = PyDict_GetItemWithError(mine, RECORDERS)
    if own == 0 or is_set(mine, CLOSED) != 0 or is_set(mine, APPLIES) != 0:
        return 0
    recorders: dict = kept(own)
    if pending_recorder() != 0:  # of another device
        return 0
    one = PyLong_FromLong(1)
    zero = PyLong_FromLong(0)
    # what is there already can be set without memory
    if PyDict_SetItem(mine, CLOSED, zero) != 0 or PyDict_SetItem(mine, APPLIES, one) != 0:
        return 0
    PyDict_SetItem(mine, CLOSED, one)
    place = room(3)  # the position, a key, a value
    place[0] = 0
    done = 1
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        if done != 0:
            done = shut(place[2])
    result = 0
    if done != 0:
        result = tried(PyObject_Vectorcall(entry[0], args, count, 0))
    error = room(3)
    PyErr_Fetch(error, error + 8, error + 16)
    PyDict_SetItem(mine, CLOSED, zero)
    PyDict_SetItem(mine, APPLIES, zero)
    if PyDict_GetItemWithError(mine, RECORDERS) is not recorders:
        done = 0
    place[0] = 0
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        if done != 0:
            done = reopened(place[2])
    if done == 0:  # something has come in the middle
        if borrowed(tried(PyObject_CallNoArgs(end_closed))) == 0:
            ended(end_closed)  # it may not have begun
            for k in range(3):  # as in a `finally`, the last error counts
                Py_DecRef(error[k])
            return 0
    PyErr_Restore(error[0], error[1], error[2])
    if result == 0:
        return 0
    if given == UNWRAPPED:
        return result
    return wrapped(recorder, result)


def giving(entry, function, args, count, names) -> object:
    """What `patches.calls` puts before C++, in a thread that records nothing; entry: torch's.

    So it is inside of every `apply`.
    """
    recorder: Recorder = current_recorder()
    if names != 0 or recorder == 0 or recorder is None or recorder.off is not True:
        return 0
    if are_values(args, count) == 0:
        return 0
    return PyObject_Vectorcall(entry[0], args, count, 0)


def are_values(items, count):
    """Whether C++ may have these, and what is in tuples among them, as they are."""
    for k in range(count):
        x = items[k]
        kind = class_of(x)
        if kind is Tensor:
            state = state_of(x)
            if has_value(state) == 0:
                return 0
        elif kind is tuple:
            if are_values(x + ITEMS, PyTuple_Size(x)) == 0:
                return 0
        elif holds_none(x) == 0:
            return 0
    return 1


def holds_none(x):
    """Whether there is nothing to look into in what is not wrapped."""
    if class_of(x) is dict:
        return PyDict_Size(x) == 0
    return is_simple(class_of(x))


def given_to(recorder: Recorder, args, count):
    """UNWRAPPED where there is nothing to look into among the arguments, VALUES where wrapped ones
    have theirs now, 0 where Python has to look."""
    given = UNWRAPPED
    for k in range(1, count):
        x = args[k]
        if class_of(x) is Tensor:
            state: Node = state_of(x)
            if class_of(state) is Node:
                if state.recorder is not recorder or flush_now(recorder, APPLY) == 0:
                    return 0
                state = state_of(x)
            if has_value(state) == 0:
                return 0
            given = VALUES
        elif holds_none(x) == 0:
            return 0
    if PyList_Size(recorder.chain) != 0 and flush_now(recorder, APPLY) == 0:
        return 0
    return given


def is_set(mine: dict, name):
    """Whether this thread's number of that name is another than 0."""
    number = PyDict_GetItemWithError(mine, name)
    return number != 0 and int(number) != 0


def shut(recorder: Recorder):
    """`Recorder.close`."""
    own: Recorder = kept(recorder)
    before: tuple = (own.chain, own.home)  # up to Python 3.11 this runs finalizers
    ident = PyThread_get_thread_ident()
    if int(own.ident) != ident or int(own.thread) != ident:
        return 0
    if own.off is True or own.reading is True or PyList_Size(own.chain) != 0:
        return 0
    if own.chain is not before[0] or own.home is not before[1]:
        return 0
    nowhere: Node = own.nowhere
    nowhere.likely = ()
    own.off = True
    own.shut = before
    own.home = nowhere
    own.chain = own.closed
    return 1


def reopened(recorder: Recorder):
    """`Recorder.reopen`."""
    before: tuple = recorder.shut
    if before is None or recorder.chain is not recorder.closed or recorder.reading is True:
        return 0
    recorder.off = False
    recorder.chain = before[0]
    recorder.home = before[1]
    recorder.shut = None
    return 1

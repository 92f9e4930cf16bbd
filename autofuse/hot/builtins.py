"""Before torch, as machine code: what is called without asking torch for overrides.

That is builtins, methods of plain tensors, what indexes these, and functions in Python.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Tensor
from ..chain.state import Recorder
from ..dispatch.unrecorded import Known
from .c import *
from .c import _PyObject_MakeTpCall
from .call import is_quiet, is_unread
from .eager import called_lending
from .overrides import overriding
from .values import (
    class_of,
    current_recorder,
    has_target,
    has_wrapped,
    is_number,
    is_ours,
    is_simple,
    looked_on,
    python,
)
from .write import are_settled, is_empty, is_free


def builtin(function, args, flags, names) -> object:
    """A builtin of torch: its vectorcall.

    Torch itself would ask for overrides, 0.7 to 1.1 us, and find `Tensor.__torch_function__`; of
    `out` among plain tensors it would ask nobody.
    """
    count = flags & COUNT
    values = count
    if names != 0:
        values += load(names + SIZED)
        for k in range(count, values):
            kind = class_of(args[k])
            if kind is not int and kind is not float:  # nor is it what is written to
                return builtin_beside(function, args, count, names)
    for k in range(values):
        kind = class_of(args[k])
        if kind is Tensor or kind is list or kind is tuple:
            return builtin_beside(function, args, count, names)
    return _PyObject_MakeTpCall(PyThreadState_Get(), function, args, count, names)


def builtin_beside(function, args, count, names) -> object:
    """The same where one of the arguments may be wrapped, or written to."""
    known = 0
    if count != 0 and is_number(args[0]) == 0:  # else torch's parser knows who takes that
        values = count
        if names != 0:
            values += PyTuple_Size(names)
        if has_target(TARGETS, names, args + 8 * count) == 0:
            if has_wrapped(args, values) != 0:
                known = override(function, args, values, names)
        elif is_quiet() != 0:
            result = targeted(function, args, count, names)
            if result != 0 or PyErr_Occurred() != 0:
                return result
        elif has_wrapped(args, values) == 0 and is_in_write() != 0:
            known = 0  # `run_any` calls it, under a mode of dispatch: nobody reads anything now
        elif has_wrapped(args, count) == 0 or is_written(function, args, values) != 0:
            # of plain tensors alone, too, what is pending may have yet to read `out`
            known = override(function, args, values, names)
    if known != 0:
        return PyObject_Vectorcall(known, args, count, names)
    return _PyObject_MakeTpCall(PyThreadState_Get(), function, args, count, names)


def in_python(function, args, flags, names) -> object:
    """A function of torch's in Python: its vectorcall.

    By itself it asks for overrides halfway, and is called once more where nothing is recorded:
    `torch.autograd.grad` takes 7 us less.
    """
    count = flags & COUNT
    values = count
    if names != 0:
        values += load(names + SIZED)
    for k in range(values):
        kind = class_of(args[k])
        if kind is Tensor or kind is list or kind is tuple:
            result = in_python_beside(function, args, count, names)
            if result != 0 or PyErr_Occurred() != 0:
                return result
            break
    return python(function, args, flags, names)


def in_python_beside(function, args, count, names) -> object:
    """The same where one of the arguments may be wrapped; 0 if nothing is done.

    What says by its place that something is written is left to torch, which names it.
    """
    own: tuple = PyDict_GetItemWithError(asking, function)
    if own == 0 or count == 0:
        return 0
    most = int(own[0])
    values = count
    if names != 0:
        values += PyTuple_Size(names)
        if are_among(names, own[2]) == 0:
            return 0
    elif own[1] is True and count == most + 1 and args[most] is False:  # as modules say it
        count -= 1
    if count > most or has_wrapped(args, values) == 0 or are_ours_alone(args, values) == 0:
        return 0
    return overriding(function, args, count, names)


def are_among(names: tuple, known):
    """Whether these keywords are known."""
    for k in range(len(names)):
        if PySet_Contains(known, names[k]) != 1:
            PyErr_Clear()
            return 0
    return 1


def is_in_write():
    """Whether this thread is in the middle of a write that is announced."""
    if PyDict_Size(others_writing) == 0:
        return 0
    ident = PyLong_FromLong(PyThread_get_thread_ident())
    return PyDict_GetItemWithError(others_writing, ident) != 0


def is_written(function, values, count):
    """Whether a kernel has written where `out` says: or else torch's parser knows who takes it."""
    known: Known = PyDict_GetItemWithError(known_functions, function)
    if known == 0 or known.to_out is not True:
        return 0
    if known.out_of_tensors is True:
        for k in range(count):
            if is_number(values[k]) != 0:
                return 0
    return 1


def targeted(function, args, count, names: tuple) -> object:
    """What a builtin returns that writes where a keyword says, beside something wrapped.

    0 if Python has to do it. Nothing is pending.
    """
    values = count + len(names)
    recorder: Recorder = current_recorder()
    known: Known = PyDict_GetItemWithError(known_functions, function)
    if known == 0 or has_wrapped(args, values) == 0 or are_ours_alone(args, values) == 0:
        return 0
    if is_free(recorder) == 0 or are_settled(args, values) == 0 or is_empty(recorder) == 0:
        return 0
    for k in range(count, values):
        if class_of(args[k]) is Tensor:  # it may have another size then
            PyObject_GenericSetAttr(args[k], AF, UNKNOWN)
    BEGUN[0] = BEGUN[0] + 1
    result = tried(called_lending(recorder, function, known.refusal, args, 0, count, names))
    BEGUN[0] = BEGUN[0] - 1
    return result


def unread(table, function, args, count, names) -> object:
    """What `patches.memory` puts before a function that writes; table: by those, the function.

    Beside what is wrapped torch would look for its handler, 0.8 us of operators, 5 of an item.
    """
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    run = load(own + ITEMS)
    values = count
    if names != 0:
        values += PyTuple_Size(names)
    known = 0
    if count != 0 and class_of(args[0]) is Tensor:  # which may be recorded
        known = override(run, args, values, names)
        if known != 0:
            return PyObject_Vectorcall(known, args, count, names)
    for k in range(1, values):
        kind = class_of(args[k])
        if kind is Tensor or kind is list or kind is tuple:
            if count != 0:  # else a keyword says what is written
                known = handler_beside(run, args, values, names)
            break
    if is_quiet() == 0 and (known != 0 or count == 0 or is_unread(args[0]) == 0):
        recorder: Recorder = current_recorder()
        if known == 0 or recorder == 0 or PyList_Size(recorder.chain) == 0:
            return 0
        return PyObject_Vectorcall(known, args, count, names)  # which flushes what reads
    if known != 0:
        run = known
    return announced(run, args, count, names)


def announced(function, args, count, names) -> object:
    """`claims.announced`: what a function returns, in the middle of whose write nobody records."""
    BEGUN[0] = BEGUN[0] + 1
    result = tried(PyObject_Vectorcall(function, args, count, names))
    BEGUN[0] = BEGUN[0] - 1
    return result


def announcing(table, function, args, count, names) -> object:
    """What `patches.memory` puts before a function that writes to arguments after the first.

    table: by those, the function, and the place of the argument that says whether it does, or -1.
    """
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    entry = own + ITEMS
    place = int(entry[1])
    if place >= 0 and count > place and args[place] is False:
        return PyObject_Vectorcall(entry[0], args, count, names)
    if is_quiet() == 0:
        return 0
    return announced(entry[0], args, count, names)


def handler_beside(function, args, count, names):
    """`override` of what writes to a plain tensor, if an argument or an index is wrapped; or 0."""
    if is_ours(args[0]) == 0:
        return 0
    for k in range(1, count):
        if has_wrapped(args + 8 * k, 1) != 0 or is_index_wrapped(args[k]) != 0:
            return override(function, args, count, names)
    return 0


def is_index_wrapped(index):
    """Whether one of several indices is."""
    if class_of(index) is tuple:
        for k in range(PyTuple_Size(index)):
            if class_of(load(index + ITEMS + 8 * k)) is Tensor:
                return 1
    return 0


def method(function, args, flags, names) -> object:
    """A method of torch's tensors in C, mostly of a plain one: its vectorcall.

    A wrapped one has its own, but beside a plain one torch looks for it: 2.5 us.
    """
    values = flags & COUNT
    if names != 0:
        values += load(names + SIZED)
    for k in range(1, values):
        kind = class_of(args[k])
        if kind is Tensor or kind is list or kind is tuple:
            return method_beside(function, args, flags, names)
    return call_object(METHOD, function, args, flags, names)


def method_beside(function, args, flags, names) -> object:
    """The same where one of the arguments may be wrapped."""
    count = flags & COUNT
    values = count
    if names != 0:
        values += PyTuple_Size(names)
    # of what is no tensor CPython says that it has no such method
    if count != 0 and is_ours(args[0]) != 0 and has_wrapped(args, values) != 0:
        known = override(function, args, values, names)
        if known != 0:
            return PyObject_Vectorcall(known, args, count, names)
    return call_object(METHOD, function, args, flags, names)


def subscript(x, index) -> object:
    """`x[index]` of a plain tensor: the slot of its class. Of a wrapped index torch asks."""
    kind = class_of(index)
    if kind is Tensor:
        return subscript_beside(x, index)
    if kind is tuple:
        for k in range(load(index + SIZED)):
            if class_of(load(index + ITEMS + 8 * k)) is Tensor:
                return subscript_beside(x, index)
    return call_object(GETITEM, x, index)


def subscript_beside(x, index) -> object:
    """The same of a wrapped index, or several with one among them."""
    args = room(2)
    args[0] = x
    args[1] = index
    if are_ours_alone(args, 2) != 0:
        return PyObject_Vectorcall(indexed, args, 2, 0)
    return call_object(GETITEM, x, index)


def override(function, args, count, names):
    """The handler that torch would come to if it looked for overrides, borrowed; or 0."""
    if are_ours_alone(args, count) == 0:
        return 0
    table = HANDLERS
    if names != 0:
        table = OPTIONS
    known = PyDict_GetItemWithError(table, function)
    if known == 0:
        PyErr_Clear()
    return known


def are_ours_alone(values, count):
    """Whether torch would ask autofuse about a function of these, and nobody else."""
    if call_pointer(FUNCTIONS_OFF) & 255 != 0 or looked_on() != 0:
        return 0
    if SKIPS_NEXT != 0:
        if call_pointer(SKIPS_NEXT) & 255 != 0:
            return 0
    for k in range(count):
        x = values[k]
        kind = class_of(x)
        if kind is tuple:
            if are_known(x + ITEMS, PyTuple_Size(x)) == 0:
                return 0
        elif kind is list:
            if are_known(load(x + LISTED), PyList_Size(x)) == 0:
                return 0
        elif is_known(x) == 0:
            return 0
    return 1


def are_known(items, count):
    for k in range(count):
        if is_known(items[k]) == 0:
            return 0
    return 1


def is_known(x):
    """Whether it is a wrapped tensor, or of a class that has no say about any function."""
    kind = class_of(x)
    if kind is Tensor or kind is Plain or kind is float or kind is int:
        return 1
    return is_simple(kind)

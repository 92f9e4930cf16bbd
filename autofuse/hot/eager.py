"""Running an eager op, as machine code: torch functions off, wrapped arguments plain meanwhile."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.refusal import Refusal
from ..chain.shell import Tensor
from ..chain.state import Recorder
from .c import *
from .c import _PyObject_MakeTpCall
from .inputs import is_as
from .values import (
    are_others,
    class_of,
    functions_off,
    grad_mode,
    has_wrapped,
    is_ours,
    looked_on,
    node_of,
    set_class,
    state_of,
    switch_back,
)


def called(function, refusal, args, count, names) -> object:
    """What an eager function returns, with torch functions off; 0 after an error."""
    before = functions_off()
    result = result_of(function, args, count, names)
    switch_back(before)
    if result != 0:
        count_eager(refusal)
    return result


def result_of(function, args, count, names) -> object:
    """What a function of torch's returns, as `called`, of what torch asks nobody about."""
    if class_of(function) is Builtin:  # what stands before it would find torch functions off
        return _PyObject_MakeTpCall(PyThreadState_Get(), function, args, count, names)
    if function is getitem and count == 2 and names == 0 and is_ours(args[0]) != 0:
        return call_object(GETITEM, args[0], args[1])  # 60 ns less than by a tuple
    if function is setitem and count == 3 and names == 0 and is_ours(args[0]) != 0:
        if call_pointer(SETITEM, args[0], args[1], args[2]) & FAILED != 0:
            return 0
        return None
    return PyObject_Vectorcall(function, args, count, names)


def count_eager(refusal: Refusal):
    """Count an op that has run eagerly."""
    times = int(refusal.address)
    times[0] = times[0] + 1


def are_watched():
    """Whether somebody is told of every eager op: Python does that."""
    return PyList_Size(watchers) != 0


def called_on_plain(recorder: Recorder, function, refusal, args, count, names) -> object:
    """`called`, for which wrapped arguments are plain where nobody can meet them.

    Of what a method is of torch does not ask. A function in Python is one that passes on to C.
    """
    kind = class_of(function)
    if kind is not Builtin and kind is not Function:
        if count < 2 or has_wrapped(args + 8, count - 1) == 0:
            return called(function, refusal, args, count, names)
    plain = room(4)
    lent = 0
    if may_lend(recorder) != 0:
        lent = lend(plain, 0, args, count, 4)
    if lent == 0:
        return called(function, refusal, args, count, names)
    if lent < 4 and names == 0 and kind is not Function:
        result = called_plain(function, refusal, args, count)
    else:
        result = called(function, refusal, args, count, names)
    take_back(plain, lent)
    look_again(args, count, result)
    return result


def called_plain(function, refusal, args, count) -> object:
    """`called` of plain tensors alone: torch finds nobody to ask; 30 ns less."""
    if call_pointer(FUNCTION_MODES) != 0:  # for a default device it would ask that
        return called(function, refusal, args, count, 0)
    result = result_of(function, args, count, 0)
    if result != 0:
        count_eager(refusal)
    return result


def called_lending(recorder: Recorder, function, refusal, args, first, count, names) -> object:
    """`called`, for which wrapped arguments from `first` on are lent where nobody can meet them."""
    every = count - first
    if names != 0:
        every += PyTuple_Size(names)
    plain = room(4)
    lent = 0
    if has_wrapped(args + 8 * first, every) != 0 and may_lend(recorder) != 0:
        lent = lend(plain, 0, args + 8 * first, every, 4)
    result = called(function, refusal, args, count, names)
    take_back(plain, lent)
    look_again(args + 8 * first, every, result)
    return result


def are_modes_off():
    """Whether no mode has torch run Python in the middle of an op."""
    return looked_on() == 0 and call_pointer(DISPATCH_MODES) == 0


def may_lend(recorder: Recorder):
    """Whether nobody can meet a wrapped tensor that is plain meanwhile; modes are off."""
    if grad_mode() != 0 and recorder.hooks is not None:  # of saved tensors
        return 0
    return are_others() == 0


def lend(place, lent, args, count, most):
    """Let up to `most` wrapped tensors be plain, put there; returns how many these are now.

    Of each that is not torch asks Python whether it is a tensor, 0.12 us. For that alone, see
    `may_lend`, what may run in the middle must not meet them: a hook under grad, another thread. A
    function in Python has to find them plain, see `call.run`, and so do those then.
    """
    for k in range(count):
        x = args[k]
        kind = class_of(x)
        if kind is Tensor and lent < most:
            set_class(x, Plain)
            place[lent] = kept(x)
            lent += 1
        elif kind is list:
            lent = lend(place, lent, load(x + LISTED), PyList_Size(x), most)
        elif kind is tuple:
            lent = lend(place, lent, x + ITEMS, PyTuple_Size(x), most)
    return lent


def take_back(place, lent):
    """End what `lend` has begun."""
    for k in range(lent):
        set_class(place[k], Tensor)
        Py_DecRef(place[k])
    if lent != 0 and PyDict_Size(others_waited) != 0:  # threads that began meanwhile may have them
        PyDict_Clear(others_waited)


def look_again(values, count, result):
    """Forget what is known of wrapped tensors that Python has changed in the middle of an op."""
    for k in range(count):
        x = values[k]
        if class_of(x) is Tensor:
            if result == 0:  # an error is at hand, which a look would forget
                if node_of(x) == 0:
                    PyObject_GenericSetAttr(x, AF, UNKNOWN)
            else:
                state = state_of(x)
                if class_of(state) is Meta:
                    if is_as(x, state) == 0:
                        PyObject_GenericSetAttr(x, AF, UNKNOWN)

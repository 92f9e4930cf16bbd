"""Eager ops between two chains, as machine code: torch functions, what begins chains, writes."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dispatch.unrecorded import Known
from .c import (
    COUNT,
    CURRENT,
    DISPATCH_MODES,
    FUNCTION_MODES,
    INPLACE,
    ITEMS,
    LAYOUT_CLOSURE,
    LAYOUT_GETTER,
    LISTED,
    PEEK,
    RECORDERS,
    TARGETS,
    Builtin,
    Function,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_GetItemWithError,
    PyDict_Next,
    PyDict_Size,
    PyErr_Clear,
    PyErr_Occurred,
    PyInterpreterState_ThreadHead,
    PyList_GetItem,
    PyList_Size,
    PyLong_AsLong,
    PyObject_Call,
    PyObject_CallOneArg,
    PyObject_GetAttr,
    PyObject_Vectorcall,
    PyThread_get_thread_ident,
    PyThreadState_Get,
    PyThreadState_GetInterpreter,
    PyThreadState_Next,
    PyTuple_Size,
    all_recorders,
    call_pointer,
    lifted,
    load,
    load32,
    local,
    room,
    store,
    strided,
)
from .flush import flush_now
from .record import are_watched, called, number_chain
from .values import (
    class_of,
    grad_mode,
    has_target,
    is_ours,
    is_simple,
    python,
    set_class,
    slot_of,
    state_of,
    switch_back,
    switch_off,
    told,
)


def torch_function(entry, function, args, flags, names):
    """`Tensor.__torch_function__`; entry: the handlers by torch function."""
    count = flags & COUNT
    if names == 0 and (count == 3 or count == 4):
        options = None
        if count == 4:
            options = load(args + 24)
        types = load(args + 8)
        operands = load(args + 16)
        if options is None or are_none(options) != 0:
            if (
                class_of(operands) is tuple
                and class_of(types) is tuple
                and PyTuple_Size(types) == 1
                and load(types + ITEMS) is Tensor
            ):
                known = PyDict_GetItemWithError(load(entry), load(args))
                if known != 0:
                    return PyObject_Call(known, operands, 0)
                if PyErr_Occurred() != 0:
                    return 0
    return python(function, args, flags, names)


def ask_overrides(entry, function, args, flags, names):
    """`dispatch.protocol.ask_overrides`; entry: handlers by torch function, those for keywords."""
    count = flags & COUNT
    if count > 2:
        relevant = load(args + 8)
        if class_of(relevant) is tuple and are_alone(relevant) != 0:
            table = load(entry)
            given = 0
            if names != 0 and is_silent(names, args + 8 * count) == 0:
                table = load(entry + 8)
                given = names
            known = PyDict_GetItemWithError(table, load(args))
            if known != 0:
                return PyObject_Vectorcall(known, args + 16, count - 2, given)
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def are_alone(tensors):
    """Whether nobody but autofuse has a say about a function of these."""
    if call_pointer(FUNCTION_MODES) != 0:
        return 0
    k = PyTuple_Size(tensors)
    while k > 0:
        k -= 1
        x = load(tensors + ITEMS + 8 * k)
        if x is not None and is_ours(x) == 0:  # an option that was not given
            return 0
    return 1


def is_silent(names, values):
    """Whether keywords say nothing, as `are_none`."""
    return PyTuple_Size(names) == 1 and load(names + ITEMS) is INPLACE and load(values) is False


def are_none(options):
    """Whether keywords say nothing; torch.nn.functional always passes `inplace` on."""
    if class_of(options) is not dict:
        return 0
    size = PyDict_Size(options)
    if size != 1:
        return size == 0
    value = PyDict_GetItemWithError(options, INPLACE)
    if value == 0:
        PyErr_Clear()  # of a key that is no ordinary string
    return value is False


def getting(entry, function, args, flags, names):
    """A property of `dispatch.metadata`; entry: C's getter, its closure, whether gradients count.

    A shell says of itself what its value will say, but for those.
    """
    x = load(args)
    if names != 0 or flags & COUNT != 1 or class_of(x) is not Tensor:
        return python(function, args, flags, names)
    if load(entry + 16) is True and class_of(state_of(x)) is Node:
        return python(function, args, flags, names)
    before = switch_off(1)
    result = call_pointer(load(entry), x, load(entry + 8))
    switch_back(before)
    return result


def asking(entry, function, args, flags, names):
    """A method of `dispatch.metadata`; entry: the method of torch's."""
    if call_pointer(FUNCTION_MODES) != 0:
        return python(function, args, flags, names)
    before = switch_off(1)
    result = PyObject_Vectorcall(load(entry), args, flags, names)
    switch_back(before)
    return result


def passing(entry, function, args, flags, names):
    """`run_eager` for a function of torch in C that writes nothing.

    entry: by handlers, each one's function, what is known of that.
    """
    count = flags & COUNT
    own = PyDict_GetItemWithError(load(entry), function)
    if own == 0:
        return 0
    entry = own + ITEMS
    recorder: Recorder = PyObject_GetAttr(local, CURRENT)
    if recorder == 0:
        return 0
    Py_DecRef(recorder)
    if recorder is not None and is_everyday(recorder, load(entry + 8), args, count, names) != 0:
        return passed(recorder, entry, load(entry + 8), args, count, names)
    if PyErr_Occurred() != 0:
        return 0
    return python(function, args, flags, names)


def is_everyday(recorder: Recorder, known: Known, args, count, names):
    """Whether Python has nothing to do for these arguments; pending ones are flushed."""
    if are_watched() != 0:
        return 0
    if PyLong_AsLong(recorder.ident) != PyThread_get_thread_ident():
        return 0
    if names != 0:
        if has_target(TARGETS, names, args + 8 * count) != 0:
            return 0
        if known.targets is not TARGETS and has_target(known.targets, names, args + 8 * count) != 0:
            if is_pending_elsewhere(recorder) != 0 or flush_now(recorder, known.name) == 0:
                return 0
        count += PyTuple_Size(names)
    k = 0
    while k < count:
        x = load(args + 8 * k)
        kind = class_of(x)
        if kind is tuple or kind is list:
            if are_concrete(recorder, known, x) == 0:
                return 0
        elif is_concrete(recorder, known, x) == 0:
            return 0
        k += 1
    return 1


def is_pending_elsewhere(recorder: Recorder):
    """Whether another device has something pending, or another thread may have."""
    recorders = PyObject_GetAttr(local, RECORDERS)
    if recorders == 0:
        return 1
    Py_DecRef(recorders)
    if PyList_Size(all_recorders) != PyDict_Size(recorders):
        return 1
    place = room(3)  # the position, a key, a value
    store(place, 0)
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        other: Recorder = load(place + 16)
        if other is not recorder and PyList_Size(other.chain) != 0:
            return 1
    return 0


def are_concrete(recorder: Recorder, known: Known, items):
    """`is_concrete` for what is in a tuple or a list, which a flush may change."""
    k = 0
    while 1:
        if class_of(items) is tuple:
            if k >= PyTuple_Size(items):
                return 1
            x = load(items + ITEMS + 8 * k)
        else:
            if k >= PyList_Size(items):
                return 1
            x = PyList_GetItem(items, k)
        if is_concrete(recorder, known, x) == 0:
            return 0
        k += 1


def is_concrete(recorder: Recorder, known: Known, x):
    """Whether `x` is concrete now, and no Input of a chain whose order of uses counts."""
    kind = class_of(x)
    if kind is not Tensor:
        if kind is float or kind is int or kind is bool or x is None:
            return 1
        if is_simple(kind) == 0:
            return 0
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if tip.holds_grad is True and slot_of(chain, x) != 0:
        return 0  # the engine adds up gradients in the order of uses
    if kind is not Tensor:
        return 1
    state: Node = state_of(x)
    if class_of(state) is Node:
        return state.recorder is recorder and flush_now(recorder, known.name) != 0
    return class_of(state) is Meta or state is UNKNOWN


def passed(recorder: Recorder, entry, known: Known, args, count, names):
    """What the function returns, wrapped; what is pending reads none of its arguments."""
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    Py_IncRef(chain)
    pending = 0
    if tip.holds_grad is True:
        pending = call_pointer(PEEK) == PyLong_AsLong(chain.first) + PyList_Size(chain)
    plain = room(4)
    lent = 0
    kind = class_of(load(entry))
    if kind is Builtin or kind is Function or (count > 1 and class_of(load(args + 8)) is Tensor):
        if grad_mode() == 0 and are_modes_off() != 0 and is_only_thread() != 0:
            lent = lend(plain, 0, args, count)
    result = called(load(entry), known.reason, args, count, names)
    while lent > 0:
        lent -= 1
        set_class(load(plain + 8 * lent), Tensor)
        Py_DecRef(load(plain + 8 * lent))
    if pending != 0 and recorder.chain is chain:  # `numbers.pass_over`
        number_chain(chain, call_pointer(PEEK) - PyList_Size(chain))
    Py_DecRef(chain)
    if result == 0:
        return 0
    kind = class_of(result)
    if kind is Plain:
        if load32(result) == 1 and is_strided(result) != 0:
            set_class(result, Tensor)
    elif kind is tuple or kind is list:
        if kind is tuple:
            k = PyTuple_Size(result)
            items = result + ITEMS
        else:
            k = PyList_Size(result)
            items = load(result + LISTED)
        while k > 0:
            k -= 1
            x = load(items + 8 * k)
            if class_of(x) is Plain and load32(x) == 1:
                set_class(x, Tensor)
    elif kind is not Tensor and is_simple(kind) == 0:
        wrapped = PyObject_CallOneArg(lifted, result)
        Py_DecRef(result)
        return wrapped
    return result


def are_modes_off():
    """Whether no mode has torch run Python in the middle of an op."""
    return call_pointer(FUNCTION_MODES) == 0 and call_pointer(DISPATCH_MODES) == 0


def is_only_thread():
    """Whether Python knows no other thread.

    That none records is not enough: who copies or saves a tensor would see its class change.
    """
    interpreter = PyThreadState_GetInterpreter(PyThreadState_Get())
    return PyThreadState_Next(PyInterpreterState_ThreadHead(interpreter)) == 0


def lend(place, lent, args, count):
    """Let up to four wrapped tensors be plain, put there; returns how many these are now.

    Of each that is not torch asks Python whether it is a tensor, 0.12 us. What may run in the
    middle must not meet them: a mode, a hook under grad, another thread.
    """
    k = 0
    while k < count and lent < 4:
        x = load(args + 8 * k)
        kind = class_of(x)
        if kind is Tensor:
            set_class(x, Plain)
            Py_IncRef(x)
            store(place + 8 * lent, x)
            lent += 1
        elif kind is list:
            lent = lend(place, lent, load(x + LISTED), PyList_Size(x))
        elif kind is tuple:
            lent = lend(place, lent, x + ITEMS, PyTuple_Size(x))
        k += 1
    return lent


def is_strided(tensor):
    """Whether its memory is laid out by strides."""
    layout = told(LAYOUT_GETTER, LAYOUT_CLOSURE, tensor)
    Py_DecRef(layout)
    return layout is strided

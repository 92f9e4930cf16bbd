"""What the machine functions ask of objects: classes, states, numbers, errors."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from .c import *


def python(function, args, flags, names) -> object:
    """What the function itself does."""
    return call_object(PYTHON, function, args, flags, names)


def grad_mode():
    """Whether grad mode is on: 2 ns, against 30 for torch's Python function."""
    return call_pointer(GRAD_MODE) & 255


def autocast_mode(recorder: Recorder):
    """Whether autocast is on for the device of `recorder`."""
    return call_pointer(AUTOCAST, int(recorder.kind)) & 255


def switch_off(state):
    """Switch torch functions off for classes (1) or for modes too (2); what was before.

    As the context managers of torch do it: 5 ns, theirs 100. `switch_back` takes what was before.
    """
    before = call_pointer(FUNCTIONS_OFF) & 255
    if before < state:
        call_pointer(SWITCH_OFF, state)
    return before


def switch_back(before):
    """Let torch functions be off for whom they were off."""
    call_pointer(SWITCH_OFF, before)


def looked_on():
    """Whether a mode is told of torch functions: `torch_private.looked_on`."""
    if call_pointer(FUNCTION_MODES) == 0:
        return 0
    return looked_on_beside()


def looked_on_beside():
    """The same where there are modes."""
    if call_pointer(FUNCTIONS_OFF) & 255 == 2:
        return 0
    for k in range(call_pointer(FUNCTION_MODES)):
        number = PyLong_FromLong(k)
        mode = tried(PyObject_CallOneArg(function_mode_at, number))
        if mode == 0:
            PyErr_Clear()
            return 1
        if class_of(mode) is not DeviceContext:
            return 1
    return 0


def functions_off():
    """Switch torch functions off around an op: `torch_private.functions_off`."""
    if call_pointer(FUNCTION_MODES) == 0 or call_pointer(DISPATCH_MODES) != 0:
        return switch_off(1)
    recorder: Recorder = current_recorder()
    if recorder == 0 or recorder.hooks is not None or looked_on() != 0:
        return switch_off(1)
    return switch_off(2)


def told(getter, closure, tensor) -> object:
    """What a getter of torch's says of a tensor, without a word to modes; 0 if it fails."""
    before = switch_off(2)
    value = tried(call_object(getter, tensor, closure))
    switch_back(before)
    if value == 0:
        PyErr_Clear()
    return value


def class_of(x):
    return x[1]


def set_class(x, kind):
    """`x.__class__ = kind` between classes of tensors, of one layout: 60 ns less."""
    before = class_of(x)
    Py_IncRef(kind)
    x[1] = kind
    Py_DecRef(before)


def is_ours(x):
    """Whether it is a tensor of a class that autofuse reads and writes."""
    kind = class_of(x)
    return kind is Tensor or kind is Plain or kind is Parameter


def address_of(tensor):
    """The address of a tensor's memory, -1 if it has none: 4 ns, against 45 for its method."""
    place = room(1)
    if call_pointer(ADDRESS_OF, tensor + TENSOR_AT, place) & FAILED != 0:
        return -1
    return place[0]


def version_of(tensor):
    """The version of a tensor, -1 if it has none: 3 ns, against 45 for its getter."""
    counter = load(call_pointer(COUNTER_OF, tensor + TENSOR_AT))
    if counter == 0:  # of an inference tensor
        return -1
    return load32(counter + VERSION_AT)


def item_at(items, k):
    """Item k of a tuple or a list, borrowed; 0 where it has fewer by now."""
    if class_of(items) is tuple:
        if k < PyTuple_Size(items):
            return load(items + ITEMS + 8 * k)
    elif k < PyList_Size(items):
        return PyList_GetItem(items, k)
    return 0


def has_wrapped(values, count):
    """Whether one is a wrapped tensor, or a list or tuple that begins with tensors, one of these.

    Few plain tensors stand before it: what begins with something else is not gone through.
    """
    for k in range(count):
        x = values[k]
        kind = class_of(x)
        if kind is Tensor:
            return 1
        if kind is list:
            if leads_to_wrapped(load(x + LISTED), PyList_Size(x)) != 0:
                return 1
        elif kind is tuple:
            if leads_to_wrapped(x + ITEMS, PyTuple_Size(x)) != 0:
                return 1
    return 0


def leads_to_wrapped(items, count):
    for k in range(count):
        kind = class_of(items[k])
        if kind is Tensor:
            return 1
        if kind is not Plain and kind is not Parameter:
            return 0
    return 0


def is_lent(x):
    """Whether a fused call lends it: no Python runs here."""
    if len(loans) == 0:
        return 0
    key = tried(PyLong_FromLong(x))
    if key == 0:  # no memory
        PyErr_Clear()
        return 1
    return PyDict_GetItemWithError(loans, key) != 0


def has_lent(values, count):
    """Whether fused calls have lent one of these, or of what lists and tuples among them have."""
    for k in range(count):
        x = values[k]
        kind = class_of(x)
        if kind is Tensor:
            if is_lent(x) != 0:
                return 1
        elif kind is list:
            if has_lent(load(x + LISTED), PyList_Size(x)) != 0:
                return 1
        elif kind is tuple:
            if has_lent(x + ITEMS, PyTuple_Size(x)) != 0:
                return 1
    return 0


def is_number(x):
    """Whether it is one of Python."""
    kind = class_of(x)
    return kind is int or kind is float or kind is bool


def is_simple(kind):
    """Whether no walk over arguments looks into what is of this class; nobody is asked."""
    for simple in SIMPLE:
        if simple is kind:
            return 1
    return 0


def state_of(x):
    """What `x._af` is, borrowed from x."""
    state = tried(PyObject_GetAttr(x, AF))
    if state == 0:
        PyErr_Clear()
        return None
    return borrowed(state)


def has_value(state):
    """Whether that is the state of a tensor whose value is in its own memory."""
    return class_of(state) is Meta or state is UNKNOWN


def has_target(targets, names: tuple, values):
    """Whether a keyword of `targets` says that something is written, or where."""
    if names == 0:
        return 0
    for k in range(len(names)):
        value = values[k]
        if value is not None and value is not False:
            if PySet_Contains(targets, names[k]) != 0:
                PyErr_Clear()  # of a name that is no ordinary string
                return 1
    return 0


def slot_of(chain: Chain, x):
    """~position of the Input x, or 0: 2 ns for few, against 40 by `chain.slots`."""
    inputs = load(chain.inputs + LISTED)
    for k in range(PyList_Size(chain.inputs)):
        if inputs[k] is x:
            if k < len(SLOTS):
                return SLOTS[k]
            return EMPTY  # no edge has this, so that Python decides
    return 0


def node_of(x):
    """The Node of a tensor of ours that is pending; 0 if it is computed."""
    state: Node = state_of(x)
    if class_of(state) is Node:
        return state
    return 0


def recorder_of(operands, count):
    """The recorder of the first pending operand, or the thread's current one; 0 if none."""
    for k in range(count):
        if class_of(operands[k]) is Tensor:
            state: Node = state_of(operands[k])
            if class_of(state) is Node:
                return state.recorder
    return current_recorder()


def current_recorder():
    """The recorder that this thread used last, or 0: `state.make_current`."""
    own = PyThreadState_GetDict()
    if own == 0:
        return 0
    return PyDict_GetItemWithError(own, CURRENT)


def only_recorder():
    """This thread's recorder if no thread has another one, borrowed; or 0.

    To look into `local` for all of this thread's takes 0.1 us more (CPython 3.12).
    """
    if len(all_recorders) != 1:
        return 0
    return current_recorder()


def own_recorders():
    """This thread's recorders if no other thread has any, borrowed; or 0."""
    recorders: dict = tried(PyObject_GetAttr(local, RECORDERS))
    if recorders == 0:
        PyErr_Clear()
        return 0
    if len(all_recorders) != len(recorders):
        return 0
    return borrowed(recorders)


def are_others():
    """Whether Python knows a thread but this and those that serve, with those that C has begun.

    That none of them records is not enough: who copies or saves a tensor sees its class change.
    """
    left = PyDict_Size(serving)
    if left != 0:
        recorder: Recorder = current_recorder()
        if recorder == 0 or PyDict_GetItemWithError(serving, recorder.thread) != 0:
            return 1  # a finalizer runs in one of those
    left += 1
    thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(PyThreadState_Get()))
    while thread != 0:
        thread = PyThreadState_Next(thread)
        left -= 1
    return left != 0


def count_one(counter, key):
    """`counter[key] += 1`, for a dict of ints."""
    number = 1
    before = PyDict_GetItemWithError(counter, key)
    if before != 0:
        number += int(before)
    counted = tried(PyLong_FromLong(number))
    if counted == 0:  # no memory: it goes uncounted
        PyErr_Clear()
    else:
        PyDict_SetItem(counter, key, counted)


def ended(function):
    """Call what ends something, with the exception at hand, if any, set aside."""
    error = room(3)
    PyErr_Fetch(error, error + 8, error + 16)
    tried(PyObject_CallNoArgs(function))
    PyErr_Restore(error[0], error[1], error[2])


def forget_error():
    """Forget the exception at hand, if any, unless it is of what has interrupted us."""
    if PyErr_Occurred() == 0:
        return
    error = room(3)
    take_error(error)
    foreign = tried(PyObject_CallOneArg(is_foreign, error[1]))
    if foreign is True:
        PyErr_Restore(error[0], error[1], error[2])
    else:
        for k in range(3):
            Py_DecRef(error[k])


def take_error(error):
    """Put the exception at hand there, as Python catches it: its class, itself and its trace."""
    PyErr_Fetch(error, error + 8, error + 16)
    PyErr_NormalizeException(error, error + 8, error + 16)
    if error[2] != 0:
        PyException_SetTraceback(error[1], error[2])


def number_of(function):
    """The number, 0 or more, that a function without arguments gives; -1 after an error."""
    result = tried(PyObject_CallNoArgs(function))
    if result == 0:
        PyErr_Clear()
        return -1
    return int(result)


def ask2(function, a, b) -> object:
    """What a Python function returns."""
    args = room(2)
    args[0] = a
    args[1] = b
    return PyObject_Vectorcall(function, args, 2, 0)

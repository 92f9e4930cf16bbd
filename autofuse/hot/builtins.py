"""Before torch's builtins, as machine code: what is called without asking torch for overrides."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from .c import (
    FUNCTIONS_OFF,
    ITEMS,
    LISTED,
    SKIPS_NEXT,
    TARGETS,
    Plain,
    PyDict_GetItemWithError,
    PyErr_Occurred,
    PyList_GetItem,
    PyList_Size,
    PyObject_Vectorcall,
    PyThreadState_Get,
    PyTuple_Size,
    _PyObject_MakeTpCall,
    call_pointer,
    load,
)
from .values import class_of, has_target, is_number, is_simple, looked_on
from .write import is_quiet


def builtin(entry, function, args, count, names) -> object:
    """A builtin of torch; entry: handlers by torch function, and those that take keywords.

    Torch itself would ask for overrides, 0.7 to 1.1 us, and find `Tensor.__torch_function__`; of
    `out` among plain tensors it would ask nobody.
    """
    asks = count != 0 and is_number(args[0]) == 0  # else torch's parser knows who takes that
    if asks != 0:
        k = 0
        while k < count and has_wrapped(args[k]) == 0:
            k += 1
        asks = k < count
        if has_target(TARGETS, names, args + 8 * count) != 0:
            # plain tensors alone: what is pending may have yet to read `out`
            asks = k == count and is_quiet() == 0
    if asks != 0:
        table = entry[0]
        values = count
        if names != 0:
            table = entry[1]
            values += PyTuple_Size(names)
        if are_ours_alone(args, values) != 0:
            known = PyDict_GetItemWithError(table, function)
            if known != 0:
                return PyObject_Vectorcall(known, args, count, names)
            if PyErr_Occurred() != 0:
                return 0
    return _PyObject_MakeTpCall(PyThreadState_Get(), function, args, count, names)


def has_wrapped(x):
    """Whether it is a wrapped tensor, or a list or tuple that begins with one."""
    kind = class_of(x)
    if kind is list:
        return PyList_Size(x) != 0 and class_of(PyList_GetItem(x, 0)) is Tensor
    if kind is tuple:
        return PyTuple_Size(x) != 0 and class_of(load(x + ITEMS)) is Tensor
    return kind is Tensor


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

"""Where torch asks for overrides, as machine code: what Python's functions of `protocol` do."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..dispatch.unrecorded import Known
from .c import *
from .call import run
from .values import class_of, is_simple, looked_on


def torch_function(entry, function, args, count, names) -> object:
    """`Tensor.__torch_function__`; entry: the handlers by torch function."""
    if names != 0 or count != 3 and (count != 4 or are_none(args[3]) == 0):
        return 0
    types: tuple = args[1]
    if class_of(args[2]) is tuple and class_of(types) is tuple:
        if len(types) == 1 and types[0] is Tensor and looked_on() == 0:  # or a mode has declined
            known = PyDict_GetItemWithError(entry[0], args[0])
            if known != 0:
                return PyObject_Call(known, args[2], 0)
    return 0


def ask_overrides(entry, function, args, count, names) -> object:
    """`dispatch.protocol.ask_overrides`.

    What is no function in Python, which torch would name, is somebody's patch.
    """
    if count < 3 or class_of(args[0]) is not Function:
        return 0
    if args[0] is L1_LOSS and has_weight(args[1]) != 0:
        return 0
    if class_of(args[1]) is tuple and are_alone(args[1]) != 0:
        return overriding(args[0], args + 16, count - 2, names)
    return 0


def overriding(function, args, count, names) -> object:
    """What a function of torch's in Python gives where autofuse has a say: what its handler does,
    or itself for plain tensors; 0 if Python has to."""
    table = HANDLERS
    given = 0
    if names != 0 and is_silent(names, args + 8 * count) == 0:
        table = OPTIONS
        given = names
    handler = PyDict_GetItemWithError(table, function)
    if handler != 0:
        return PyObject_Vectorcall(handler, args, count, given)
    if PyErr_Occurred() == 0:
        known: Known = PyDict_GetItemWithError(known_functions, function)
        if known != 0:
            return run(function, known, known.refusal, args, count, given)
    return 0


def has_weight(tensors):
    """Whether `l1_loss` has been given a weight, which torch names nowhere else."""
    if class_of(tensors) is not tuple:
        return 1
    return PyTuple_Size(tensors) > 2 and load(tensors + ITEMS + 16) is not None


def are_alone(tensors: tuple):
    """Whether autofuse, and nobody else, has a say about a function of these."""
    if call_pointer(FUNCTIONS_OFF) & 255 != 0 or looked_on() != 0:
        return 0
    wrapped = 0
    for x in tensors:
        if class_of(x) is Tensor:
            wrapped = 1
        elif is_simple(class_of(x)) == 0:
            return 0
    return wrapped


def is_silent(names: tuple, values):
    """Whether keywords say nothing, as `are_none`."""
    return len(names) == 1 and names[0] is INPLACE and values[0] is False


def are_none(options: dict):
    """Whether keywords say nothing; torch.nn.functional always passes `inplace` on."""
    if options is None:
        return 1
    if class_of(options) is not dict:
        return 0
    if len(options) != 1:
        return len(options) == 0
    value = PyDict_GetItemWithError(options, INPLACE)
    if value == 0:
        PyErr_Clear()  # of a key that is no ordinary string
    return value is False

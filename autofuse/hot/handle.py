"""The handlers of ops in front of recording, as machine code.

What no kernel reads is not looked at any further, nor any more than what is not recorded at all.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Tensor
from ..chain.state import Recorder
from ..dispatch.unrecorded import Known
from ..ops.row import Op
from ..record.record import OFF
from .c import *
from .call import left_eager
from .record import recorded
from .values import class_of, current_recorder, is_number, is_ours, looked_on, state_of


def handler(entry, function, args, count, names) -> object:
    """A handler of `dispatch`.

    entry: the torch function, what is known of it, its op, and how many operands there are.
    """
    if names == 0 and count == entry[3]:
        for k in range(count):
            if class_of(args[k]) is Tensor:
                return recorded_or_passed(entry, entry[2], args, count)
    return 0


def reflected(entry, function, args, count, names) -> object:
    """A reflected operator of `dispatch`.

    entry: the torch function of two tensors, what is known of it, and its op; those of a tensor and
    a number, the op None where there is none.
    """
    if names != 0 or count != 2 or class_of(args[0]) is not Tensor:
        return 0
    if is_number(args[1]) != 0 or class_of(args[1]) is complex:
        if entry[5] is None:
            return divided(args[1], args[0])
        of_numbers = entry + 24  # behind three others
        return recorded_or_passed(of_numbers, entry[5], args, 2)
    if is_ours(args[1]) == 0:
        return 0
    operands = room(2)
    operands[0] = args[1]
    operands[1] = args[0]
    return recorded_or_passed(entry, entry[2], operands, 2)


def divided(number, x) -> object:
    """`number / x`, of a wrapped tensor, as torch has it."""
    recorder: Recorder = current_recorder()
    if recorder == 0 or recorder.off is True or looked_on() != 0:
        return 0
    args = room(1)
    args[0] = x
    inverse = PyObject_Vectorcall(reciprocal_of, args, 1, 0)
    return PyNumber_Multiply(inverse, number)  # which stays plain where that does


def recorded_or_passed(entry, op, operands, count) -> object:
    """`recorded`; or, of operands that are never recorded, what `call.passing` gives.

    entry: begins with the function, and what is known of it.
    """
    result = recorded(entry[0], op, operands, count, ANEW)
    if result != 0 or PyErr_Occurred() != 0:
        return result
    known: Known = entry[1]
    recorder: Recorder = current_recorder()
    if recorder == 0:
        return 0
    if recorder.off is True:
        own: Op = op
        why = (own.name, OFF)
        refusal = PyDict_GetItemWithError(refusals, why)
        if refusal == 0:
            return 0
        return left_eager(entry, refusal, operands, count, 0)
    if is_read(operands, count) != 0:
        return 0
    recorder.reading = False
    return left_eager(entry, known.refusal, operands, count, 0)


def is_read(operands, count):
    """Whether kernels read all operands, as far as their dtypes say: complex ones they do not."""
    for k in range(count):
        x = operands[k]
        if class_of(x) is complex:
            return 0
        if is_ours(x) != 0 and (class_of(x) is not Tensor or state_of(x) is UNKNOWN):
            if has_code(x) == 0:
                return 0
    return 1


def has_code(tensor):
    """Whether the dtype of a tensor in memory has a code in kernels."""
    place = room(1)
    place[0] = 0
    if call_pointer(DTYPE_OF, tensor + TENSOR_AT, place) & FAILED != 0:
        return 1
    number = load32(place) & 255
    for dtype in CODED:
        if load32(dtype + NUMBER_AT) & 255 == number:
            return 1
    return 0

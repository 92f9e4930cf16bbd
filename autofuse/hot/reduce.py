"""Reductions, as machine code: recorded as calls like them have been, or run as eager ops."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Node
from ..dispatch.unrecorded import Known
from .c import *
from .call import left_eager, looking
from .choice import known_choice
from .record import recorded_as, tupled
from .values import class_of, is_ours, looked_on, state_of
from .view import flattened


def reducing(table, function, args, count, names) -> object:
    """A reduction, recorded as calls like it have been; or as `passing`."""
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    entry = own + ITEMS
    known: Known = entry[1]
    refusal = known.refusal
    if len(wanted) != 0:
        if count == 0 or class_of(args[0]) is not Tensor or looked_on() != 0:
            return 0
        if is_never_reduced(args[0]) == 0:
            found = choice_of(entry, args, count, names)
            if found == 0 or found is None:
                return 0
            if class_of(found) is tuple:
                result = recorded_as(TELL, found, args)
                if result == 0 or class_of(result) is not Node:
                    return result
                node: Node = result
                refusal = node.refusal
    return left_eager(entry, refusal, args, count, names)


def composing(table, function, args, count, names) -> object:
    """A function in Python that torch makes of reductions and more, run at once where none are."""
    if len(wanted) != 0:
        if count == 0 or class_of(args[0]) is not Tensor or is_never_reduced(args[0]) == 0:
            return 0
    return looking(table, function, args, count, names)


def choice_of(entry, args, count, names) -> object:
    """What a chooser says of a reduction with such arguments, as `choice.choice_for`.

    The key has the first tensor's dtype, device, number of dimensions and columns, and the options.
    """
    about = about_rows(args[0])
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if about == 0 or every > 8:
        return 0
    flat = room(40)
    flat[0] = about
    size = 1
    if names != 0:
        flat[1] = names
        size = 2
    for k in range(1, every):
        size = argument(flat, size, args[k])
        if size == 0:
            return 0
        for earlier in range(k):
            if args[earlier] is args[k] and is_ours(args[k]) != 0:
                flat[size] = Meta  # it is there twice
                flat[size + 1] = SLOTS[earlier]
                size += 2
                break
    key = tupled(flat, size)
    found = known_choice(entry[2], key)
    if found is not Ellipsis:
        return kept(found)
    made = PyObject_Vectorcall(entry[2], args, count, names)
    if made == 0:
        return 0
    again = about_rows(args[0])
    if again == 0 or int(again) != int(about) or PyDict_SetItem(entry[2], key, made) != 0:
        return 0
    return made


def about_rows(tensor) -> object:
    """A number for the dtype, device, number of dimensions and columns of a tensor; 0 for none."""
    x = tensor + TENSOR_AT
    place = room(1)
    place[0] = 0
    failed = call_pointer(DTYPE_OF, x, place)
    number = load32(place) & 255
    failed = failed | call_pointer(INDEX_OF, x, place)
    number = number * 256 + (load32(place) & 255)
    failed = failed | call_pointer(DIM_OF, x, place)
    ndim = place[0]
    failed = failed | call_pointer(SIZES_OF, x, place)
    if failed & FAILED != 0 or ndim == 0 or ndim > 255:
        return 0
    columns = load(place[0] + 8 * ndim - 8)
    if columns >= 1 << 32:
        return 0
    return PyLong_FromLong((number * 256 + ndim) * (1 << 32) + columns)


def argument(flat, size, x):
    """As `flattened`, for what functions of rows get besides: tensors, floats, bools and names."""
    kind = class_of(x)
    if size > 20:
        return 0
    if is_ours(x) != 0:
        flat[size] = Tensor
        return size + 1
    if kind is bool or kind is float or kind is str:
        flat[size] = kind
        flat[size + 1] = x
        return size + 2
    if kind is list:
        return numbers_of(flat, size, load(x + LISTED), PyList_Size(x))
    if kind is Size:
        return numbers_of(flat, size, x + ITEMS, PyTuple_Size(x))
    return flattened(flat, size, x, 1)


def numbers_of(flat, size, items, count):
    """Put ints at `flat[size]`, as those of a tuple; as `flattened`."""
    if count > 4:
        return 0
    flat[size] = tuple
    for k in range(count):
        if class_of(items[k]) is not int:
            return 0
        flat[size + 1 + k] = items[k]
    flat[size + 1 + count] = tuple
    return size + 2 + count


def is_never_reduced(x):
    """`shapes.is_never_reduced` of a wrapped tensor; known here of a CPU's before anybody reads it.

    Each time that `call.run` lends one it is to be read anew.
    """
    state = state_of(x)
    if state is UNKNOWN:
        place = room(1)
        place[0] = 0
        failed = call_pointer(INDEX_OF, x + TENSOR_AT, place)
        if failed & FAILED != 0 or load32(place) & 255 != 255:  # a GPU has a number
            return 0
        return PyDict_GetItemWithError(wanted, CPU) == 0
    if class_of(state) is Node:
        node: Node = state
        state = node.meta
    if class_of(state) is not Meta:
        return 0
    meta: Meta = state
    return PyDict_GetItemWithError(wanted, meta.device) == 0

"""Functions with options, as machine code: recorded as calls like them have been."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.state import Node
from ..dispatch.unrecorded import Known
from .c import *
from .call import left_eager
from .choice import choice_for
from .record import placed, recorded_as, tupled
from .values import class_of, current_recorder, has_target, is_ours, looked_on
from .write import is_free, wrote


def spelling(table, function, args, count, names) -> object:
    """A function with options, recorded as calls like it have been, or run where it is better off.

    table: by handlers, the function, what is known of it, its `Choices`, and what stands for it
    where it works in place, or None.
    """
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    entry = own + ITEMS
    if names != 0:
        for k in range(PyTuple_Size(names)):
            if load(names + ITEMS + 8 * k) is INPLACE and args[count + k] is True:
                if entry[3] is None:
                    return 0
                return PyObject_Vectorcall(entry[3], args, count, names)
        if has_target(TARGETS, names, args + 8 * count) != 0:
            return written(entry, args, count, names)
    if looked_on() != 0:
        return 0
    found = choice_for(entry[2], args, count, names)
    if found == 0 or found is None:
        return 0
    if class_of(found) is int:
        return kept(args[int(found)])
    if class_of(found) is list:
        return several(entry, kept(found), args, count, names)
    known: Known = entry[1]
    refusal = known.refusal
    if found is not False:
        result = recorded_as(TELL, kept(found), args)
        if result == 0 or class_of(result) is not Node:
            return result
        node: Node = result
        refusal = node.refusal
    return left_eager(entry, refusal, args, count, names)


def several(entry, found: list, args, count, names) -> object:
    """Two results of a class that a chooser has found, as `chosen.recorded`."""
    results = room(2)
    first = recorded_as(TELL, found[1], args)
    if first == 0:
        return 0
    if class_of(first) is Node:
        node: Node = first
        return left_eager(entry, node.refusal, args, count, names)
    second = recorded_as(TELL, found[2], args)
    if second == 0:
        return 0
    if class_of(second) is Node:
        other: Node = second
        return left_eager(entry, other.refusal, args, count, names)
    results[0] = first
    results[1] = second
    both = tupled(results, 2)
    results[0] = both
    return PyObject_Vectorcall(found[0], results, 1, 0)


def written(entry, args, count, names: tuple) -> object:
    """`out`, if that is the last keyword, written by the kernel of what is read; or 0."""
    more = len(names) - 1
    known: Known = entry[1]
    if names[more] is not OUT or known.to_out is not True:  # torch may say that it takes none
        return 0
    target = args[count + more]
    if is_ours(target) == 0 or is_free(current_recorder()) == 0:
        return 0
    if more == 0:
        found = choice_for(entry[2], args, count, 0)
    else:
        found = choice_for(entry[2], args, count, kept(PyTuple_GetSlice(names, 0, more)))
    if found == 0 or class_of(found) is not tuple:
        return 0
    own: tuple = found
    operands = room(8)
    if wrote(own[0], target, operands, placed(operands, own, args)) != 1:
        return 0
    return target

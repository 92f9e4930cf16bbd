"""Views of pending values, as machine code: as they have been asked of them before."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.state import Chain, Node, Recorder
from .c import *
from .choice import known_as
from .record import recorded, tupled
from .values import class_of, is_ours, looked_on, state_of


def recorded_views(function, args, count, names) -> object:
    """Views of the pending args[0] that have been recorded before; 0 where Python has to decide.

    function: what was called; with its arguments it makes the key of `views.key_of`.
    """
    if looked_on() != 0:
        return 0
    node: Node = kept(state_of(args[0]))
    recorder: Recorder = node.recorder
    if recorder is None:
        return 0
    chain: Chain = kept(recorder.chain)
    flat = room(24)
    flat[0] = function
    size = 1
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    for k in range(1, every):
        if k == count:
            flat[size] = names
            size += 1
        if is_ours(args[k]) != 0:  # taken for its shape
            meta = known_as(chain.tip, args[k])
            if meta == 0:
                return 0
            flat[size] = meta
            size += 1
        else:
            size = flattened(flat, size, args[k], 1)
        if size == 0 or size > 20:
            return 0
    key = tupled(flat, size)
    found = PyDict_GetItemWithError(node.known_views, key)
    if found == 0:
        return 0
    if class_of(found) is not tuple:
        return recorded(0, found, args, 1, 0)
    ops: tuple = kept(found)
    views: tuple = PyTuple_New(len(ops))
    for k in range(len(ops)):
        view = recorded(0, ops[k], args, 1, 0)
        if view == 0:
            return 0
        views[k] = view
    return views


def flattened(flat, size, x, outer):
    """Put what stands for `x`, a number, a slice or several of these, at `flat[size]`.

    Where it goes on, 0 for something else: True would be equal to 1. outer: it may be several.
    """
    kind = class_of(x)
    if size > 16:
        return 0
    if kind is int or x is None or x is Ellipsis:
        flat[size] = x
        return size + 1
    if kind is slice:
        flat[size] = slice
        for k in range(3):  # where it starts, stops, and its step
            end = load(x + SLICED + 8 * k)
            if class_of(end) is not int and end is not None:
                return 0
            flat[size + 1 + k] = end
        return size + 4
    if outer == 0:
        return 0
    if kind is tuple or kind is Size:
        kind = tuple
        items = x + ITEMS
        count = PyTuple_Size(x)
    elif kind is list:  # which is another index
        items = load(x + LISTED)
        count = PyList_Size(x)
    else:
        return 0
    flat[size] = kind
    size += 1
    for k in range(count):
        size = flattened(flat, size, items[k], 0)
        if size == 0:
            return 0
    flat[size] = kind
    return size + 1


def makes_view(index):
    """Whether it is an int, a slice of ints, None, Ellipsis, or a tuple of these."""
    if class_of(index) is not tuple:
        return is_basic(index)
    for k in range(PyTuple_Size(index)):
        if is_basic(load(index + ITEMS + 8 * k)) == 0:
            return 0
    return 1


def is_basic(index):
    if class_of(index) is slice:
        for k in range(3):  # where it starts, stops, and its step
            end = load(index + SLICED + 8 * k)
            if class_of(end) is not int and end is not None:
                return 0
        return 1
    return class_of(index) is int or index is None or index is Ellipsis

"""What choosers of `ops` say of a call, as machine code: as they have said of calls like it."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from .c import *
from .inputs import lies_as, likely_meta
from .record import tupled
from .values import class_of, grad_mode, has_value, is_ours, is_simple, recorder_of, state_of


def choice_for(choices, args, count, names) -> object:
    """What a chooser says of such a call, as it has said before; 0 where Python has to ask it.

    The key has grad mode, the Metas of tensors, or of which argument one is that is there twice,
    and the classes and values of all else.
    """
    values = count
    if names != 0:
        values += PyTuple_Size(names)
    if values > 8:
        return 0
    recorder: Recorder = recorder_of(args, values)
    if recorder == 0 or recorder is None or recorder.off is True:
        return 0
    chain: Chain = kept(recorder.chain)
    tip: Node = kept(chain.tip)
    metas = room(8)
    flat = room(24)
    flat[0] = False
    if grad_mode() != 0:
        flat[0] = True
    size = 1
    for k in range(values):
        x = args[k]
        kind = class_of(x)
        metas[k] = 0
        if is_ours(x) != 0:
            metas[k] = known_as(tip, x)
            if metas[k] == 0:
                return 0
            flat[size] = metas[k]
            for earlier in range(k):
                if args[earlier] is x:
                    flat[size] = SLOTS[earlier]
            size += 1
        elif (is_simple(kind) != 0 and kind is not slice) or are_ints(x) != 0:  # that has no hash
            flat[size] = kind
            flat[size + 1] = x
            size += 2
        else:
            return 0
    if names != 0:
        flat[size] = names
        size += 1
    key = tupled(flat, size)
    found = known_choice(choices, key)
    if found is not Ellipsis:
        return kept(found)
    made = PyObject_Vectorcall(choices, args, count, names)
    if made == 0:
        return 0
    for k in range(values):  # a handler of signals, say, may have changed one meanwhile
        if metas[k] != 0 and known_as(tip, args[k]) != metas[k]:
            return 0
    if PyDict_SetItem(choices, key, made) != 0:
        return 0
    return made


def are_ints(x):
    """Whether it is a tuple of ints alone, which equals no tuple of others that is met here."""
    if class_of(x) is not tuple:
        return 0
    for k in range(PyTuple_Size(x)):
        if class_of(load(x + ITEMS + 8 * k)) is not int:
            return 0
    return 1


def known_choice(choices, key):
    """What is kept of calls with this key, borrowed; Ellipsis where it is to be asked for; or 0.

    Only of what is met again: numbers that are others each time would have it asked, and all else
    forgotten, and never found.
    """
    found = PyDict_GetItemWithError(choices, key)
    if found == 0 and PyErr_Occurred() == 0:
        if PyDict_Size(choices) >= MOST_CHOICES:
            PyDict_Clear(choices)
        PyDict_SetItem(choices, key, Ellipsis)
    return found


def known_as(tip: Node, x):
    """The Meta of a tensor, borrowed, if it has one or `tip` knows it; or 0."""
    if class_of(x) is Tensor:
        state = state_of(x)
        if class_of(state) is Node:
            node: Node = state
            state = node.meta
            if class_of(state) is not Meta:
                return 0
            return state
        if class_of(state) is Meta and lies_as(x, state) != 0:
            return state
        if has_value(state) == 0:
            return 0
    return likely_meta(tip.likely, x)

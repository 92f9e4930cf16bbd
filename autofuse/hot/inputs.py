"""Operands and new Inputs of a recorded op, as machine code."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import sys

from ..chain.meta import BUCKETS, EACH, MASK, MIXED, UNKNOWN, Meta, by_size
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dtypes import EXACT
from .c import *
from .values import (
    address_of,
    class_of,
    forget_error,
    has_value,
    slot_of,
    state_of,
    switch_back,
    switch_off,
    version_of,
)

HIGHEST = sys.float_info.max
LOWEST = -HIGHEST


def fits(node: Node, operands, key, count):
    """Whether all Consts are within the limits that their op has here, or not finite."""
    limits: tuple = node.limits
    for k in range(count):
        if class_of(key[k + 1]) is type:
            const = operands[k]
            inside = float(limits[0]) <= float(const) and float(const) <= float(limits[1])
            if not inside and float(LOWEST) <= float(const) and float(const) <= float(HIGHEST):
                return 0
    return 1


def item_of(recorder: Recorder, chain: Chain, x):
    """What stands for the operand x in an edge, borrowed; 0 where Python has to decide."""
    kind = class_of(x)
    tip: Node = chain.tip
    if kind is float or kind is bool:
        return kind
    if kind is int:
        value = int(x)
        if value == -1 and PyErr_Occurred() != 0:
            PyErr_Clear()
            return 0
        if value > EXACT or value < -EXACT:
            return 0
        return kind
    if kind is Tensor:
        state: Node = state_of(x)
        if class_of(state) is Node:
            if state.recorder is not recorder:
                return 0
            return state.index
        if has_value(state) == 0:
            return 0
        slot = slot_of(chain, x)
        if slot != 0:
            return as_before(tip, slot, x)
        recorder.reading = True
        if state is UNKNOWN:
            return on_device(recorder, likely_meta(tip.likely, x))
        return on_device(recorder, state)
    if kind is not Plain and kind is not Parameter:
        return 0
    slot = slot_of(chain, x)
    if slot != 0:
        return as_before(tip, slot, x)
    recorder.reading = True
    return on_device(recorder, likely_meta(tip.likely, x))


def as_before(tip: Node, slot, x):
    """`slot`, of the Input x, if x is still as it was when it became one; or 0."""
    inputs: tuple = tip.inputs
    if slot is not EMPTY and lies_as(x, inputs[~int(slot)]) == 0:
        return 0
    return slot


def likely_meta(likely: tuple, x):
    """The Meta of a concrete tensor, borrowed, if Python has met such a one anywhere; or 0.

    likely: of a place where one of its kind has come. In torch.vmap it is empty, for there a test
    would meet what has no sizes.
    """
    keys = load(load(x + TENSOR_AT) + KEYS_AT)
    k = 1  # before each Meta is its check, which Python calls
    while k < len(likely):
        meta: Meta = likely[k]
        if int(meta.keys) == keys:  # and so x has sizes and strides
            return of_size(x)
        k += 2
    return 0


def of_size(x):
    """The Meta in `by_size` that x is as; or 0."""
    place = room(1)
    place[0] = 0
    failed = call_pointer(DIM_OF, x + TENSOR_AT, place)
    count = place[0]
    failed = failed | call_pointer(SIZES_OF, x + TENSOR_AT, place)
    sizes = place[0]
    failed = failed | call_pointer(STRIDES_OF, x + TENSOR_AT, place)
    strides = place[0]
    if failed & FAILED != 0:
        return 0
    mixed = count
    for k in range(count):
        mixed = (mixed * 31 + sizes[k]) & MASK
    for k in range(count):
        mixed = (mixed * 31 + strides[k]) & MASK
    first = ((mixed * MIXED >> 20) & (BUCKETS - 1)) * EACH
    for k in range(first, first + EACH):
        meta: Meta = PyList_GetItem(by_size, k)
        if meta is not None and is_as(x, meta) != 0:
            return meta
    return 0


def is_as(x, meta: Meta):
    """Whether a concrete tensor is what `meta` says: 20 ns, against 200 of torch's guards.

    Its dispatch keys say what kind of tensor it is, inference tensors and other layouts included.
    """
    inner = load(x + TENSOR_AT)
    if load(inner + KEYS_AT) != int(meta.keys):
        return 0
    if (call_pointer(REQUIRES_GRAD, inner) & 255 != 0) != (meta.requires_grad is True):
        return 0
    return lies_as(x, meta)


def lies_as(x, meta: Meta):
    """Whether the memory of a concrete tensor is laid out as `meta` says, and of its dtype.

    Tensors of ours are asked, too: C's functions can change them without a word to anybody.
    """
    place = room(1)
    place[0] = 0
    failed = call_pointer(DTYPE_OF, x + TENSOR_AT, place)
    if load32(place) & 255 != load32(meta.dtype + NUMBER_AT) & 255:
        return 0
    failed = failed | call_pointer(INDEX_OF, x + TENSOR_AT, place)
    if load32(place) & 255 != load32(meta.device + NUMBER_AT + 1) & 255:
        return 0
    failed = failed | call_pointer(DIM_OF, x + TENSOR_AT, place)
    if failed & FAILED != 0 or place[0] != PyTuple_Size(meta.shape):
        return 0
    failed = call_pointer(SIZES_OF, x + TENSOR_AT, place)
    if failed & FAILED != 0 or are_words(place[0], meta.shape) == 0:
        return 0
    failed = call_pointer(STRIDES_OF, x + TENSOR_AT, place)
    return failed & FAILED == 0 and are_words(place[0], meta.stride) != 0


def are_words(words, numbers: tuple):
    """Whether the first words there are the numbers in a tuple."""
    for k in range(len(numbers)):
        if words[k] != int(numbers[k]):
            return 0
    return 1


def on_device(recorder: Recorder, meta: Meta):
    if meta != 0 and meta.device is recorder.device:
        return meta
    return 0


def added(recorder: Recorder, chain: Chain, tip: Node, operands, key, count):
    """Make the operands that are Metas in `key` Inputs; 0, having done nothing, if it cannot."""
    if PyDict_Size(others_writing) != 0 or BEGUN[0] > 0:
        return 0
    inputs: tuple = tip.inputs
    if len(inputs) == 0:
        chain.stream = PyObject_CallNoArgs(recorder.stream)
    before = switch_off(2)
    marks = room(64)  # of each the version and the address
    known = 0
    done = 1
    for k in range(count):
        if class_of(key[k + 1]) is Meta and done != 0:
            done = marked(recorder, operands[k], key[k + 1], marks + 16 * known)
            known += done
    if done == 0:
        forget_error()
    switch_back(before)
    if recorder.reading is not True or recorder.chain is not chain or chain.tip is not tip:
        done = 0
    if done != 0:
        recorder.reading = False
        at = marks
        for k in range(count):
            if class_of(key[k + 1]) is Meta:
                PyList_Append(chain.inputs, operands[k])
                PyList_Append(chain.marks, at[0])
                PyList_Append(chain.marks, at[1])
                at += 16
    for k in range(2 * known):
        Py_DecRef(marks[k])
    return done


def marked(recorder: Recorder, x, meta: Meta, place):
    """Put what is known of the next Input x there, new references; 0 if x is not as its Meta."""
    if lies_as(x, meta) == 0:
        return 0
    if class_of(x) is Tensor and state_of(x) is UNKNOWN:  # of ops that are not recorded it stays so
        PyObject_GenericSetAttr(x, AF, meta)
    if recorder.grad is True:
        if borrowed(call_object(GRAD_GETTER, x, GRAD_CLOSURE)) is not meta.requires_grad:
            return 0
    now = version_of(x)
    pointer = address_of(x)
    if (now == -1) != (meta.inference is True) or pointer == -1:
        return 0
    version = PyLong_FromLong(now)
    address = PyLong_FromLong(pointer)
    place[0] = kept(version)
    place[1] = kept(address)
    return 1

"""Operands and new Inputs of a recorded op, as machine code."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dtypes import EXACT
from .c import (
    GRAD_CLOSURE,
    GRAD_GETTER,
    ITEMS,
    NESTED_CLOSURE,
    NESTED_GETTER,
    Parameter,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_Size,
    PyErr_Clear,
    PyErr_Occurred,
    PyFloat_AsDouble,
    PyList_Append,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_CallNoArgs,
    PyObject_CallOneArg,
    PyTuple_Size,
    call_pointer,
    load,
    others_writing,
    room,
    store,
)
from .values import (
    address_of,
    class_of,
    forget_error,
    slot_of,
    state_of,
    switch_back,
    switch_off,
    told,
    version_of,
)


def fits(node: Node, operands, key, count):
    """Whether all Consts are within the limits that their op has here."""
    low = load(node.limits + ITEMS)
    high = load(node.limits + ITEMS + 8)
    k = count
    while k > 0:
        if class_of(load(key + 8 * k)) is type:
            const = load(operands + 8 * k - 8)
            if not (
                PyFloat_AsDouble(low) <= PyFloat_AsDouble(const)
                and PyFloat_AsDouble(const) <= PyFloat_AsDouble(high)
            ):
                return 0
        k -= 1
    return 1


def item_of(recorder: Recorder, chain: Chain, x):
    """What stands for the operand x in an edge, borrowed; 0 where Python has to decide."""
    kind = class_of(x)
    if kind is float or kind is bool:
        return kind
    if kind is int:
        value = PyLong_AsLong(x)
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
        if class_of(state) is not Meta:
            return 0
        slot = slot_of(chain, x)
        if slot != 0:
            return slot
        recorder.reading = True
        return on_device(recorder, state)
    if kind is not Plain and kind is not Parameter:
        return 0
    slot = slot_of(chain, x)
    if slot != 0:
        return slot
    recorder.reading = True
    tip: Node = chain.tip
    return on_device(recorder, likely_meta(tip.likely, x))


def likely_meta(likely, x):
    """The Meta of a plain tensor that meets a check of its place, borrowed; or 0."""
    size = PyTuple_Size(likely)
    if size != 0 and is_nested(x) != 0:
        return 0
    Py_IncRef(likely)
    meta = 0
    k = 0
    while k < size and meta == 0:
        same = PyObject_CallOneArg(load(likely + ITEMS + 8 * k), x)
        if same == 0:
            k = size
        else:
            Py_DecRef(same)
            if same is True:
                meta = load(likely + ITEMS + 8 * k + 8)
        k += 2
    Py_DecRef(likely)
    return meta


def is_nested(tensor):
    """Whether it is a nested tensor, on which a check would end the process."""
    nested = told(NESTED_GETTER, NESTED_CLOSURE, tensor)
    Py_DecRef(nested)
    return nested == 0 or nested is True


def on_device(recorder: Recorder, meta: Meta):
    if meta != 0 and meta.device is recorder.device:
        return meta
    return 0


def added(recorder: Recorder, chain: Chain, tip: Node, operands, key, count):
    """Make the operands that are Metas in `key` Inputs; 0, having done nothing, if it cannot."""
    if PyDict_Size(others_writing) != 0:
        return 0
    if PyTuple_Size(tip.inputs) == 0:
        stream = PyObject_CallNoArgs(recorder.stream)
        if stream == 0:
            return 0
        chain.stream = stream
        Py_DecRef(stream)
    before = switch_off(2)
    marks = room(14)  # of each the version and the address
    known = 0
    done = 1
    k = 0
    while k < count and done != 0:
        meta = load(key + 8 * k + 8)
        if class_of(meta) is Meta:
            done = marked(recorder, load(operands + 8 * k), meta, marks + 16 * known)
            known += done
        k += 1
    if done == 0:
        forget_error()
    switch_back(before)
    if recorder.reading is not True or recorder.chain is not chain or chain.tip is not tip:
        done = 0
    if done != 0:
        recorder.reading = False
        k = 0
        position = 0
        while k < count:
            if class_of(load(key + 8 * k + 8)) is Meta:
                place = marks + 16 * position
                PyList_Append(chain.inputs, load(operands + 8 * k))
                PyList_Append(chain.marks, load(place))
                PyList_Append(chain.marks, load(place + 8))
                position += 1
            k += 1
    while known > 0:
        known -= 1
        Py_DecRef(load(marks + 16 * known))
        Py_DecRef(load(marks + 16 * known + 8))
    return done


def marked(recorder: Recorder, x, meta: Meta, place):
    """Put what is known of the next Input x there, new references; 0 if x is not as its Meta."""
    if meta.inference is True:
        return 0
    if recorder.grad is True:
        requires = call_pointer(GRAD_GETTER, x, GRAD_CLOSURE)
        if requires == 0:
            return 0
        Py_DecRef(requires)
        if requires is not meta.requires_grad:
            return 0
    now = version_of(x)
    pointer = address_of(x)
    if now == -1 or pointer == -1:
        return 0
    version = PyLong_FromLong(now)
    address = PyLong_FromLong(pointer)
    if version == 0 or address == 0:
        Py_DecRef(version)
        Py_DecRef(address)
        return 0
    store(place, version)
    store(place + 8, address)
    return 1

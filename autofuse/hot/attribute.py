"""Attributes of tensors that change what is known of them, as machine code."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN
from ..chain.shell import Tensor
from ..chain.state import Recorder
from ..dispatch.unrecorded import Known
from .c import *
from .call import is_everyday
from .eager import called
from .flush import flush_now
from .values import (
    class_of,
    current_recorder,
    functions_off,
    has_value,
    node_of,
    state_of,
    switch_back,
)
from .write import is_empty, is_free, write_now


def altering(entry, function, args, count, names) -> object:
    """`dispatch.handlers.altering`; entry: the function, what is known of it, whether it returns
    its tensor."""
    recorder: Recorder = current_recorder()
    known: Known = entry[1]
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if count == 0 or class_of(args[0]) is not Tensor or is_free(recorder) == 0:
        return 0
    if is_everyday(recorder, known, args, count, names) == 0:
        return 0
    if flush_now(recorder, known.name) == 0 or is_empty(recorder) == 0:
        return 0
    if write_now(recorder, entry[0], known, args, count, names) == 0:
        return 0
    for k in range(every):
        if class_of(args[k]) is Tensor and node_of(args[k]) == 0:
            PyObject_GenericSetAttr(args[k], AF, UNKNOWN)
    if entry[2] is True:
        return args[0]
    return None


def granting(entry, function, args, count, names) -> object:
    """`dispatch.methods._granting`; entry: the setter, what is known of it, getters of the gradient
    and of whether the tensor is a leaf."""
    recorder: Recorder = current_recorder()
    known: Known = entry[1]
    if names != 0 or count == 0 or class_of(args[0]) is not Tensor or recorder == 0:
        return 0
    if is_everyday(recorder, known, args, count, names) == 0:
        return 0
    off = functions_off()
    leaf = tried(PyObject_Vectorcall(entry[3], args, 1, 0))
    before = 0
    if leaf is True:
        before = tried(PyObject_Vectorcall(entry[2], args, 1, 0))
    switch_back(off)
    if before == 0:
        return 0
    if called(entry[0], known.refusal, args, count, 0) == 0:
        return 0
    return None


def setting_attribute(entry, x, name, value) -> object:
    """`Tensor.__setattr__`, of a tensor with its value."""
    if class_of(x) is not Tensor or has_value(state_of(x)) == 0:
        return 0
    if PyObject_GenericSetAttr(x, name, value) & FAILED != 0:
        return 0
    return None

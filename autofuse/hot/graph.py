"""Autograd nodes, as machine code: what they keep, and the gradients of roots by a kernel."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..grad.backward import Backward
from .c import *
from .inputs import lies_as
from .record import tupled
from .values import autocast_mode, class_of, grad_mode, take_error


def keeping(entry, function, args, count, names) -> object:
    """`grad.backward.Fused.forward`."""
    if names != 0 or count < 2 or class_of(args[1]) is not tuple:
        return 0
    node = args[0]
    holder: tuple = args[1]  # outs, what the node saves, whose backward it is and Consts
    if len(holder) != 3:
        return 0
    PyObject_GenericSetAttr(node, TO_SAVE, holder[1])
    PyObject_GenericSetAttr(node, WORK, holder[2])
    PyObject_GenericSetAttr(node, MATERIALIZES, False)
    if PyErr_Occurred() != 0:
        return 0
    return kept(holder[0])


def differentiating(entry, function, args, count, names) -> object:
    """`grad.backward.apply_backward`, of a gradient for the root alone that lies as others have.

    Once it has asked for what is saved, which hooks may give, Python is not asked to do it all.
    """
    if names != 0 or count < 2 or class_of(args[1]) is not Plain or grad_mode() != 0:
        return 0
    for k in range(2, count):
        if args[k] is not None:
            return 0
    work: tuple = PyObject_GetAttr(args[0], WORK)
    if class_of(work) is not tuple or len(work) != 2 or class_of(work[0]) is not Backward:
        return 0  # somebody has set it
    backward: Backward = work[0]
    usual: tuple = kept(backward.usual)
    if usual is None or backward.told is True:
        return 0
    if backward.is_cast is True and autocast_mode(backward.recorder) != 0:
        return 0
    if call_pointer(DISPATCH_MODES) != 0 or borrowed(PyObject_CallNoArgs(in_functorch)) is True:
        return 0
    if PyDict_GetItemWithError(hook_names, DIFFERENTIATED) is not None:
        return 0
    meta: Meta = usual[1]
    if load(load(args[1] + TENSOR_AT) + KEYS_AT) != int(usual[0]) or lies_as(args[1], meta) == 0:
        return 0
    answer = kept(PyDict_GetItemWithError(backward.direct, meta.stride))
    if answer == 0:
        return 0
    given = room(5)
    saved = PyTuple_New(0)
    if backward.frees is True:
        saved = PyObject_GetAttr(args[0], SAVED)  # raises if they are freed or were written
    incoming = tupled(args + 8, 1)
    grads = kept(incoming)
    if count != 2:
        grads = tupled(args + 8, count - 1)
    given[0] = incoming
    given[1] = saved
    given[2] = work[1]
    result = tried(PyObject_Vectorcall(answer, given, 3, 0))
    if result != 0:
        return result
    error = room(3)
    take_error(error)
    given[0] = error[1]
    given[1] = backward
    given[2] = grads
    given[3] = saved
    given[4] = work[1]
    result = tried(PyObject_Vectorcall(after_error, given, 5, 0))
    for k in range(3):
        Py_DecRef(error[k])
    return result

"""Autograd nodes, as machine code: what they keep, and the gradients of roots by a kernel."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..grad.backward import Backward
from .c import *
from .inputs import lies_as
from .record import tupled
from .values import autocast_mode, class_of, grad_mode, has_value, state_of, take_error


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
    """`grad.backward.apply_backward`, of gradients that lie as some of the last ones did.

    Once it has asked for what is saved, which hooks may give, Python is not asked to do it all.
    """
    if names != 0 or count < 2 or grad_mode() != 0:
        return 0
    work: tuple = PyObject_GetAttr(args[0], WORK)
    if class_of(work) is not tuple or len(work) != 2 or class_of(work[0]) is not Backward:
        return 0  # somebody has set it
    backward: Backward = work[0]
    layouts: tuple = kept(backward.usual)
    if class_of(layouts) is not tuple or backward.told is True:
        return 0
    if backward.is_cast is True and autocast_mode(backward.recorder) != 0:
        return 0
    if call_pointer(DISPATCH_MODES) != 0 or borrowed(PyObject_CallNoArgs(in_functorch)) is True:
        return 0
    if PyDict_GetItemWithError(hook_names, DIFFERENTIATED) is not None:
        return 0
    usual: tuple = layouts
    present = 0
    k = 0
    while present == 0:
        if k == len(layouts):
            return 0
        usual = layouts[k]
        if class_of(usual) is not tuple or len(usual) != 3:
            return 0
        present = lie_as_usual(usual[1], args + 8, count - 1, 0)
        k += 1
    given = room(5)
    saved: tuple = PyTuple_New(0)
    if backward.frees is True:
        saved = PyObject_GetAttr(args[0], SAVED)  # raises if they are freed or were written
    grads = tupled(args + 8, count - 1)
    if len(saved) != 0 and lie_as_usual(usual[2], saved + ITEMS, len(saved), 1) != len(saved):
        given[0] = backward  # a hook on one of them may have made another
        given[1] = grads
        given[2] = saved
        given[3] = work[1]
        return PyObject_Vectorcall(gradients_of, given, 4, 0)
    incoming = kept(grads)
    if present != count - 1:
        incoming = without_none(grads, present)
    given[0] = incoming
    given[1] = saved
    given[2] = work[1]
    result = tried(PyObject_Vectorcall(usual[0], given, 3, 0))
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


def lie_as_usual(laid: tuple, tensors, count, saved):
    """How many tensors there are, if each lies as `laid` says of it; or 0.

    saved: they are no gradients, and may be parameters or wrapped.
    """
    if class_of(laid) is not tuple or len(laid) != count:
        return 0
    present = 0
    for k in range(count):
        one: tuple = laid[k]
        x = tensors[k]
        if one is None or x is None:
            if one is not None or x is not None:
                return 0
        else:
            if class_of(one) is not tuple or len(one) != 2 or class_of(one[1]) is not Meta:
                return 0
            kind = class_of(x)
            if kind is not Plain:
                if saved == 0 or (kind is not Parameter and kind is not Tensor):
                    return 0
                if kind is Tensor and has_value(state_of(x)) == 0:
                    return 0
            if load(load(x + TENSOR_AT) + KEYS_AT) != int(one[0]) or lies_as(x, one[1]) == 0:
                return 0
            present += 1
    return present


def without_none(grads: tuple, size) -> object:
    """Those of `grads` that are there, `size` of them."""
    made: tuple = PyTuple_New(size)
    k = 0
    for n in range(len(grads)):
        if grads[n] is not None:
            made[k] = grads[n]
            k += 1
    return made

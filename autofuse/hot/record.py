"""Recording an op, as machine code: `record.record`, and the handlers in front of it."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from collections import Counter

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..record.policy import SKIPS
from .c import (
    AF,
    COUNT,
    EAGER,
    EMPTY,
    GETITEM,
    ITEMS,
    TAKE,
    Builtin,
    Py_DecRef,
    Py_IncRef,
    PyDict_GetItemWithError,
    PyErr_Clear,
    PyErr_Occurred,
    PyList_Append,
    PyList_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_GenericSetAttr,
    PyObject_GetAttr,
    PyObject_Vectorcall,
    PyThread_get_thread_ident,
    PyThreadState_Get,
    PyTuple_New,
    PyTuple_Size,
    _PyObject_MakeTpCall,
    call_pointer,
    counts,
    getitem,
    load,
    relieve,
    room,
    store,
)
from .inputs import added, fits, item_of
from .values import (
    ask2,
    class_of,
    count_one,
    grad_mode,
    is_ours,
    python,
    recorder_of,
    set_class,
    switch_back,
    switch_off,
)


def handler(entry, function, args, flags, names):
    """A handler of `dispatch`; entry: its op, how many operands there are, the torch function."""
    count = flags & COUNT
    if names == 0 and count == load(entry + 8):
        if class_of(load(args)) is Tensor:
            shell = recorded(load(entry + 16), load(entry), args, count, 0)
            if shell != 0:
                return shell
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def record(entry, function, args, flags, names):
    """`record.record`."""
    if names == 0 and flags & COUNT == 2:
        operands = load(args + 8)
        if class_of(operands) is tuple:
            shell = recorded(0, load(args), operands + ITEMS, PyTuple_Size(operands), 0)
            if shell != 0:
                return shell
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def recorded(func, op, operands, count, wanted):
    """A new reference to the result of `op` over `operands`; 0 where Python has to decide.

    func: the torch function, by which an op is run that is better off eager, or 0. wanted: the Meta
    that the result has to have, or 0.
    """
    recorder: Recorder = recorder_of(operands, count)
    if recorder == 0 or recorder is None or count > 7:
        return 0
    if PyLong_AsLong(recorder.ident) != PyThread_get_thread_ident():
        return 0
    chain: Chain = recorder.chain
    Py_IncRef(chain)  # one that is flushed in the middle must not be used again
    shell = recorded_in(recorder, chain, func, op, operands, count, wanted)
    Py_DecRef(chain)
    return shell


def recorded_in(recorder: Recorder, chain: Chain, func, op, operands, count, wanted):
    """`recorded` in the open chain; see `record.flush` for what may happen in the middle."""
    tip: Node = chain.tip
    key = room(8)
    store(key, op)
    consts = 0
    fresh = 0
    k = 0
    while k < count:
        x = load(operands + 8 * k)
        item = item_of(recorder, chain, x)
        if item == 0:
            return 0
        if class_of(item) is Meta:
            earlier = 0
            while earlier < k:  # the same tensor twice is one Input
                if load(operands + 8 * earlier) is x:
                    return 0
                earlier += 1
            fresh += 1
        elif class_of(item) is type:
            consts += 1
        k += 1
        store(key + 8 * k, item)
    node: Node = next_of(recorder, chain, tip, key, count + 1)
    if node == 0:
        return 0
    if grad_mode() != (recorder.grad is True):
        return 0
    shell = node.shell
    if shell is None:
        if func == 0 or node.reason is EMPTY or PyList_Size(chain) != 0:
            return 0
        return run_short(recorder, func, node, operands, count)
    if wanted != 0 and node.meta is not wanted:
        return 0
    key = node.key + ITEMS
    if consts != 0 and node.limits is not None and fits(node, operands, key, count) == 0:
        return 0
    if node.holds_grad is True and numbered(chain, tip) == 0:
        return 0
    if fresh != 0:
        pinned = PyLong_FromLong(PyLong_AsLong(chain.pinned) + PyLong_AsLong(node.fresh_bytes))
        if pinned == 0:
            return 0
        done = added(recorder, chain, tip, operands, key, count)
        if done != 0:
            chain.pinned = pinned
        Py_DecRef(pinned)
        if done == 0:
            return 0
    elif recorder.chain is not chain or chain.tip is not tip:
        return 0
    k = 0
    while consts != 0:
        k += 1
        if class_of(load(key + 8 * k)) is type:
            PyList_Append(chain.consts, load(operands + 8 * k - 8))
            consts -= 1
    chain.tip = node
    PyList_Append(chain, shell)
    Py_IncRef(shell)
    if fresh != 0:
        if PyLong_AsLong(chain.pinned) > PyLong_AsLong(node.pinned_limit):
            done = ask2(relieve, recorder, chain)
            if done == 0:
                Py_DecRef(shell)
                return 0
            Py_DecRef(done)
    return shell


def follows(entry, function, args, flags, names):
    """`numbers.follows`."""
    if names != 0 or flags & COUNT != 1:
        return python(function, args, flags, names)
    chain: Chain = load(args)
    result = False
    if numbered(chain, chain.tip) != 0:
        result = True
    Py_IncRef(result)
    return result


def numbered(chain: Chain, tip: Node):
    """Whether the next op, which has a number now, follows the last one of `chain`."""
    first = call_pointer(TAKE) - PyList_Size(chain)
    if tip.holds_grad is True:
        return first == PyLong_AsLong(chain.first)
    number_chain(chain, first)
    return 1


def number_chain(chain: Chain, first):
    """Set the number of the first op of `chain`."""
    number = PyLong_FromLong(first)
    if number != 0:
        chain.first = number
        Py_DecRef(number)


def next_of(recorder: Recorder, chain: Chain, tip: Node, key, size):
    """The node that the edge `key` leads to, 0 if none: mostly the one that followed last time."""
    node: Node = tip.recent
    if node is not None:
        if PyTuple_Size(node.key) == size:
            k = 0
            while k < size and load(node.key + ITEMS + 8 * k) == load(key + 8 * k):
                k += 1
            if k == size:
                return node
    k = 0
    while k < size:
        Py_IncRef(load(key + 8 * k))
        k += 1
    edge = PyTuple_New(size)  # up to Python 3.11 this runs finalizers, which may record and flush
    same = recorder.chain is chain and chain.tip is tip
    if edge == 0:
        return 0
    k = 0
    while k < size:
        store(edge + ITEMS + 8 * k, load(key + 8 * k))
        k += 1
    node = 0
    if same != 0:
        node = PyDict_GetItemWithError(tip.next, edge)
        if node != 0:
            tip.recent = node
    Py_DecRef(edge)
    return node


def run_short(recorder: Recorder, func, node: Node, operands, count):
    """Run an op that the trie has found better off eager: `dispatch.eager.run_short`."""
    if are_watched() != 0:
        return 0
    if node.returns is not None and PyLong_AsLong(node.skips) >= SKIPS:
        return 0
    recorder.reading = False
    skips = PyLong_FromLong(PyLong_AsLong(node.skips) + 1)
    if skips == 0:
        return 0
    node.skips = skips
    Py_DecRef(skips)
    Py_IncRef(node)  # a finalizer may let the op be recorded again
    result = called(func, node.counted, operands, count, 0)
    if result != 0:
        set_class(result, Tensor)
        if node.meta is not None:
            PyObject_GenericSetAttr(result, AF, node.meta)
    Py_DecRef(node)
    return result


def are_watched():
    """Whether somebody is told of every eager op: Python does that."""
    eager = PyObject_GetAttr(counts, EAGER)
    if eager == 0:
        return 1
    Py_DecRef(eager)
    return class_of(eager) is not Counter


def called(function, reason, args, count, names):
    """What an eager function returns, with torch functions off; 0 after an error."""
    before = switch_off(1)
    if class_of(function) is Builtin:  # what stands before it would find torch functions off
        result = _PyObject_MakeTpCall(PyThreadState_Get(), function, args, count, names)
    elif function is getitem and count == 2 and names == 0 and is_ours(load(args)) != 0:
        # 60 ns less than by a tuple
        result = call_pointer(GETITEM, load(args), load(args + 8))
    else:
        result = PyObject_Vectorcall(function, args, count, names)
    switch_back(before)
    if result != 0:
        eager = PyObject_GetAttr(counts, EAGER)
        if eager == 0:
            PyErr_Clear()
        else:
            count_one(eager, reason)
            Py_DecRef(eager)
    return result

"""Recording an op, as machine code: `record.record`, and the handlers in front of it."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Node
from ..dtypes import EXACT
from .c import (
    ADDRESS_METHOD,
    AF,
    CLASS,
    COUNT,
    CURRENT,
    EAGER,
    EMPTY,
    GRAD_CLOSURE,
    GRAD_GETTER,
    GRAD_MODE,
    ITEMS,
    PYTHON,
    TAKE,
    VERSION_CLOSURE,
    VERSION_GETTER,
    Parameter,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_GetItemWithError,
    PyDict_SetItem,
    PyDict_Size,
    PyErr_Clear,
    PyErr_Fetch,
    PyErr_NormalizeException,
    PyErr_Occurred,
    PyErr_Restore,
    PyException_SetTraceback,
    PyFloat_AsDouble,
    PyList_Append,
    PyList_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyLong_FromVoidPtr,
    PyObject_CallNoArgs,
    PyObject_CallOneArg,
    PyObject_GenericSetAttr,
    PyObject_GetAttr,
    PyObject_Vectorcall,
    PyThread_get_thread_ident,
    PyTuple_New,
    PyTuple_Size,
    call_pointer,
    counts,
    is_foreign,
    load,
    local,
    others_writing,
    relieve,
    room,
    store,
)

if TYPE_CHECKING:
    from ..chain.state import Chain, Recorder


def python(function, args, flags, names):
    """What the function itself does."""
    return call_pointer(PYTHON, function, args, flags, names)


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


def grad_mode():
    """Whether grad mode is on: 2 ns, against 30 for torch's Python function."""
    return call_pointer(GRAD_MODE) & 255


def class_of(x):
    return load(x + 8)


def is_ours(x):
    """Whether it is a tensor of a class that autofuse reads and writes."""
    kind = class_of(x)
    return kind is Tensor or kind is Plain or kind is Parameter


def state_of(x):
    """What `x._af` is, borrowed from x."""
    state = PyObject_GetAttr(x, AF)
    if state == 0:
        PyErr_Clear()
        return None
    Py_DecRef(state)
    return state


def slot_of(chain: Chain, x):
    """~position of the Input x, or 0."""
    number = PyLong_FromVoidPtr(x)
    if number == 0:  # no memory: no edge has this, so that Python decides
        PyErr_Clear()
        return EMPTY
    slot = PyDict_GetItemWithError(chain.slots, number)
    Py_DecRef(number)
    return slot


def recorder_of(operands, count):
    """The recorder of the first pending operand, or the thread's current one; 0 or None if none."""
    k = 0
    while k < count:
        x = load(operands + 8 * k)
        if class_of(x) is Tensor:
            state: Node = state_of(x)
            if class_of(state) is Node:
                return state.recorder
        k += 1
    recorder = PyObject_GetAttr(local, CURRENT)
    if recorder != 0:
        Py_DecRef(recorder)
    return recorder


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
    """`record.follows`."""
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
    if recorder.guarded is True or are_watched() != 0:
        return 0
    if node.returns is not None and PyLong_AsLong(node.skips) >= 100:
        return 0
    recorder.reading = False
    skips = PyLong_FromLong(PyLong_AsLong(node.skips) + 1)
    if skips == 0:
        return 0
    node.skips = skips
    Py_DecRef(skips)
    Py_IncRef(node)  # a finalizer may let the op be recorded again
    result = called(recorder, func, node.counted, operands, count, 0)
    if result != 0:
        PyObject_GenericSetAttr(result, CLASS, Tensor)
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


def called(recorder: Recorder, function, reason, args, count, names):
    """What an eager function returns, with torch functions off; 0 after an error."""
    eager = PyObject_GetAttr(counts, EAGER)
    if eager == 0:
        return 0
    count_one(eager, reason)
    Py_DecRef(eager)
    begun = PyObject_CallNoArgs(recorder.enter)
    if begun == 0:
        return 0
    Py_DecRef(begun)
    recorder.guarded = True
    result = PyObject_Vectorcall(function, args, count, names)
    recorder.guarded = False
    ended(recorder.exit)
    return result


def count_one(counter, key):
    """`counter[key] += 1`, for a dict of ints."""
    number = 1
    before = PyDict_GetItemWithError(counter, key)
    if before != 0:
        number += PyLong_AsLong(before)
    counted = PyLong_FromLong(number)
    if counted == 0:  # no memory: it goes uncounted
        PyErr_Clear()
    else:
        PyDict_SetItem(counter, key, counted)
        Py_DecRef(counted)


def ended(function):
    """Call what ends something, with the exception at hand, if any, set aside."""
    error = room(3)
    PyErr_Fetch(error, error + 8, error + 16)
    Py_DecRef(PyObject_CallNoArgs(function))
    PyErr_Restore(load(error), load(error + 8), load(error + 16))


def forget_error():
    """Forget the exception at hand, if any, unless it is of what has interrupted us."""
    if PyErr_Occurred() == 0:
        return
    error = room(3)
    PyErr_Fetch(error, error + 8, error + 16)
    PyErr_NormalizeException(error, error + 8, error + 16)
    if load(error + 16) != 0:
        PyException_SetTraceback(load(error + 8), load(error + 16))
    foreign = PyObject_CallOneArg(is_foreign, load(error + 8))
    if foreign is True:
        PyErr_Restore(load(error), load(error + 8), load(error + 16))
    else:
        Py_DecRef(load(error))
        Py_DecRef(load(error + 8))
        Py_DecRef(load(error + 16))
    Py_DecRef(foreign)


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
    Py_IncRef(likely)
    size = PyTuple_Size(likely)
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


def on_device(recorder: Recorder, meta: Meta):
    if meta != 0 and meta.device is recorder.device:
        return meta
    return 0


def number_of(function):
    """The number, 0 or more, that a function without arguments gives; -1 after an error."""
    result = PyObject_CallNoArgs(function)
    if result == 0:
        PyErr_Clear()
        return -1
    number = PyLong_AsLong(result)
    Py_DecRef(result)
    return number


def ask2(function, a, b):
    """What a Python function returns."""
    args = room(2)
    store(args, a)
    store(args + 8, b)
    return PyObject_Vectorcall(function, args, 2, 0)


def added(recorder: Recorder, chain: Chain, tip: Node, operands, key, count):
    """Make the operands that are Metas in `key` Inputs; 0, having done nothing, if it cannot."""
    if recorder.guarded is True or PyDict_Size(others_writing) != 0:
        return 0
    if PyTuple_Size(tip.inputs) == 0:
        stream = PyObject_CallNoArgs(recorder.stream)
        if stream == 0:
            return 0
        chain.stream = stream
        Py_DecRef(stream)
    begun = PyObject_CallNoArgs(recorder.hide)
    if begun == 0:
        return 0
    Py_DecRef(begun)
    marks = room(28)  # of each the version, the address, its own as a number, its slot
    known = 0
    done = 1
    k = 0
    while k < count and done != 0:
        meta = load(key + 8 * k + 8)
        if class_of(meta) is Meta:
            slot = ~(PyTuple_Size(tip.inputs) + known)
            done = marked(recorder, load(operands + 8 * k), meta, slot, marks + 32 * known)
            known += done
        k += 1
    if done == 0:
        forget_error()
    ended(recorder.show)
    if recorder.reading is not True or recorder.chain is not chain or chain.tip is not tip:
        done = 0
    if done != 0:
        recorder.reading = False
        k = 0
        position = 0
        while k < count:
            if class_of(load(key + 8 * k + 8)) is Meta:
                place = marks + 32 * position
                PyList_Append(chain.inputs, load(operands + 8 * k))
                PyList_Append(chain.marks, load(place))
                PyList_Append(chain.marks, load(place + 8))
                PyDict_SetItem(chain.slots, load(place + 16), load(place + 24))
                position += 1
            k += 1
    while known > 0:
        known -= 1
        k = 0
        while k < 32:
            Py_DecRef(load(marks + 32 * known + k))
            k += 8
    return done


def marked(recorder: Recorder, x, meta: Meta, slot, place):
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
    version = call_pointer(VERSION_GETTER, x, VERSION_CLOSURE)
    address = call_pointer(ADDRESS_METHOD, x, 0)
    number = PyLong_FromVoidPtr(x)
    position = PyLong_FromLong(slot)
    if version == 0 or address == 0 or number == 0 or position == 0:
        Py_DecRef(version)
        Py_DecRef(address)
        Py_DecRef(number)
        Py_DecRef(position)
        return 0
    store(place, version)
    store(place + 8, address)
    store(place + 16, number)
    store(place + 24, position)
    return 1

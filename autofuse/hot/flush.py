"""Flushing a chain, as machine code: `flush` of `record.flush`, where its kernels are there."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..run.words import Words
from .c import (
    AT_ONCE,
    COUNT,
    COUNTED,
    ITEMS,
    MATERIALIZE,
    OBSERVER,
    PEEK,
    PYTHON,
    WEAKREFS,
    WORDS,
    Py_DecRef,
    Py_IncRef,
    PyDict_Clear,
    PyDict_DelItem,
    PyDict_GetItemWithError,
    PyDict_SetItem,
    PyDict_Size,
    PyErr_Clear,
    PyErr_Occurred,
    PyList_GetItem,
    PyList_New,
    PyList_SetSlice,
    PyList_Size,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_Call,
    PyObject_CallOneArg,
    PyObject_GetAttr,
    PyThread_get_thread_ident,
    PyTuple_New,
    call_pointer,
    chain_flush,
    flushes,
    hook_names,
    inside,
    load,
    load32,
    ranges,
    room,
    store,
)
from .launch import launched
from .values import class_of, count_one, ended, python, state_of, switch_back, switch_off


def flush(entry, function, args, flags, names):
    """`flush`."""
    count = flags & COUNT
    if names == 0 and (count == 2 or count == 5):
        recorder: Recorder = load(args)
        target = 0
        expected = 0
        last = 0
        if count == 5:
            target = load(args + 16)
            last = load(args + 24)
            expected = PyLong_AsLong(load(args + 32))
        done = flushed(recorder, load(args + 8), target, expected, last)
        if done > 0:
            Py_IncRef(True)
            return True
        if done < 0:
            return 0
    return python(function, args, flags, names)


def materialize(entry, function, args, flags, names):
    """`api.materialize`, of one tensor."""
    if names == 0 and flags & COUNT == 1 and class_of(load(args)) is Tensor:
        x = load(args)
        state: Node = state_of(x)
        if class_of(state) is Node:
            recorder: Recorder = state.recorder
            Py_IncRef(recorder)
            done = flush_now(recorder, MATERIALIZE)
            Py_DecRef(recorder)
            if done == 0:
                return 0
            Py_IncRef(x)
            return x
    return python(function, args, flags, names)


def flush_now(recorder: Recorder, reason):
    """Flush one way or the other; 0 after an error."""
    done = flushed(recorder, reason, 0, 0, 0)
    if done == 0:  # Python sees the same counts, and so knows them next time
        done = flushed_by_python(recorder, reason)
    return done > 0


def flushed_by_python(recorder: Recorder, reason):
    """1, or -1 after an error."""
    args = room(2)
    store(args, recorder)
    store(args + 8, reason)
    result = call_pointer(PYTHON, chain_flush, args, 2, 0)
    if result == 0:
        return -1
    Py_DecRef(result)
    return 1


def flush_into(recorder: Recorder, reason, target, chain: Chain):
    """Flush `chain` with `target` as the memory of the last value; 0 if that is not done."""
    last = chain.tip  # before Python runs
    Py_IncRef(last)
    done = flushed(recorder, reason, target, chain, last)
    number = 0
    if done == 0:
        number = PyLong_FromLong(chain)
    if number != 0:
        args = room(5)
        store(args, recorder)
        store(args + 8, reason)
        store(args + 16, target)
        store(args + 24, last)
        store(args + 32, number)
        result = call_pointer(PYTHON, chain_flush, args, 5, 0)
        Py_DecRef(number)
        done = result is True
        Py_DecRef(result)
    Py_DecRef(last)
    return done > 0


def flushed(recorder: Recorder, reason, target, expected, last):
    """1 or 2 if it is done, 0 if Python has to do it, -1 after an interrupt.

    target: the memory that takes the last value, or 0; expected, last: the chain then and its tip.
    """
    ident = PyThread_get_thread_ident()
    if PyLong_AsLong(recorder.ident) != ident or PyLong_AsLong(recorder.thread) != ident:
        return 0  # another thread's, or that of one that ends
    if PyDict_GetItemWithError(inside, recorder.ident) != 0:
        return 0
    if recorder.reading is True or recorder.running is not None:
        return 0
    if PyList_Size(recorder.chain) == 0:
        return target == 0
    if PyDict_GetItemWithError(hook_names, OBSERVER) is not None or PyList_Size(ranges) != 0:
        return 0  # somebody looks
    if recorder.spare is None:  # what may run Python comes before anything is looked at
        spare = PyObject_CallOneArg(Chain, recorder.home)
        if spare == 0:
            return -1
        recorder.spare = spare
        Py_DecRef(spare)
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if target != 0 and (chain is not expected or tip is not last):
        return 0
    size = PyList_Size(chain)
    refcounts = tip.usual  # 60 ns less than to make them anew
    if refcounts is not None and are_counts(chain, size, refcounts) != 0:
        Py_IncRef(refcounts)
    else:
        Py_IncRef(chain)
        refcounts = PyTuple_New(size)  # up to Python 3.11 this runs finalizers, which may flush
        same = recorder.chain is chain and chain.tip is tip and recorder.spare is not None
        Py_DecRef(chain)
        if refcounts == 0:
            return -1
        if same == 0:
            Py_DecRef(refcounts)
            return 0
        k = 0
        while k < size:
            number = PyLong_FromLong(load32(PyList_GetItem(chain, k)) + COUNTED)
            if number == 0:
                Py_DecRef(refcounts)
                return -1
            store(refcounts + ITEMS + 8 * k, number)
            k += 1
        tip.usual = refcounts
    if target == 0:
        runner = PyDict_GetItemWithError(tip.runners, refcounts)
    else:
        runner = PyDict_GetItemWithError(tip.writers, refcounts)
    Py_DecRef(refcounts)
    if runner == 0:
        return 0
    program = PyObject_GetAttr(runner, WORDS)
    if program == 0:
        return -1
    if program is None:
        Py_DecRef(program)
        return 0
    done = 0
    Py_IncRef(chain)
    taken = PyObject_Call(recorder.acquire, AT_ONCE, 0)  # waiting, the counts would grow stale
    if taken is True:
        if recorder.chain is chain and chain.tip is tip and recorder.spare is not None:
            if tip.holds_grad is True:
                chain.late = None
                if call_pointer(PEEK) != PyLong_AsLong(chain.first) + size:
                    chain.late = chain.first
            done = ran(recorder, chain, size, program, reason, target)
        ended(recorder.release)
    Py_DecRef(taken)
    Py_DecRef(chain)
    Py_DecRef(program)
    if PyErr_Occurred() != 0:
        return -1
    if done < 0:  # an interrupt may come, and the next flush then does it
        return flushed_by_python(recorder, reason)
    return done


def are_counts(chain: Chain, size, refcounts):
    """Whether the shells of `chain` have these reference counts."""
    k = 0
    while k < size:
        count = PyLong_AsLong(load(refcounts + ITEMS + 8 * k))
        if load32(PyList_GetItem(chain, k)) + COUNTED != count:
            return 0
        k += 1
    return 1


def ran(recorder: Recorder, chain: Chain, size, program: Words, reason, target):
    """Run the chain with the lock held: as `launched`; -1 where its values are to be given away."""
    spare: Chain = recorder.spare
    Py_IncRef(spare)
    spare.tip = recorder.home
    zero = PyLong_FromLong(0)
    PyDict_SetItem(inside, recorder.ident, True)
    recorder.ident = zero  # a finalizer must not record now
    home = recorder.home
    Py_IncRef(home)
    grad = recorder.grad
    inference = recorder.inference
    recorder.running = chain
    recorder.chain = spare
    recorder.spare = None
    if target != 0:
        chain.into = target
    done = 0
    before = switch_off(2)
    done = launched(recorder, chain, program)
    switch_back(before)
    PyDict_DelItem(inside, recorder.thread)
    if done == 0 and chain.values is not None:
        done = -1
        counted(recorder, reason, 1)
    elif done == 0:
        chain.into = None
        recorder.running = None
        recorder.grad = grad  # somebody may have opened another chain, under other modes
        recorder.inference = inference
        recorder.home = home
        recorder.chain = chain
        recorder.spare = spare
        recorder.ident = recorder.thread
    else:
        recorder.running = None
        counted(recorder, reason, done > 1)
        k = 0
        while k < size:
            shell = PyList_GetItem(chain, k)
            if shell is not None:
                if load(shell + WEAKREFS) != 0:
                    state: Node = state_of(shell)
                    state.shell = None  # the weak reference dies with the shell
            k += 1
        recorder.ident = recorder.thread
        PyList_SetSlice(chain, 0, size, 0)
        if load32(chain) == 1 + (target != 0):  # `flushed` holds it, and so does who writes
            chain.inputs = emptied(chain.inputs)
            Py_DecRef(chain.inputs)
            chain.consts = emptied(chain.consts)
            Py_DecRef(chain.consts)
            chain.values = None
            chain.bumps = None
            PyList_SetSlice(chain.marks, 0, PyList_Size(chain.marks), 0)
            if PyDict_Size(chain.known) != 0:
                PyDict_Clear(chain.known)
            chain.pinned = zero
            recorder.spare = chain
    Py_DecRef(zero)
    Py_DecRef(home)
    Py_DecRef(spare)
    return done


def counted(recorder: Recorder, reason, launches):
    """Count a flush and its launches, 0 or 1."""
    count_one(flushes, reason)
    number = PyLong_FromLong(PyLong_AsLong(recorder.launches) + launches)
    if number == 0:  # no memory: it goes uncounted
        PyErr_Clear()
        return 0
    recorder.launches = number
    Py_DecRef(number)
    return 1


def emptied(items):
    """A new reference to a list without items: this one if nobody else has it."""
    if load32(items) == 1:
        PyList_SetSlice(items, 0, PyList_Size(items), 0)
        Py_IncRef(items)
        return items
    return PyList_New(0)

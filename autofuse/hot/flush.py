"""Flushing a chain, as machine code: `flush` of `record.flush`, where its kernels are there."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..run.words import Words
from .c import *
from .launch import launched
from .values import class_of, count_one, ended, has_value, python, state_of, switch_back, switch_off


def flush(entry, function, args, count, names) -> object:
    """`flush`."""
    done = 0
    if names == 0 and count == 2:
        done = flushed(args[0], args[1], 0, 0, 0)
    elif names == 0 and count == 5:
        done = flushed(args[0], args[1], args[2], int(args[4]), args[3])
    if done == 0:
        return 0
    return True


def materialize(entry, x) -> object:
    """`api.materialize`, of one tensor."""
    if class_of(x) is Plain:
        return x
    if class_of(x) is not Tensor:
        return 0
    state: Node = state_of(x)
    if class_of(state) is not Node:
        if has_value(state) != 0:
            return x
        return 0
    recorder = kept(state.recorder)
    if flush_now(recorder, MATERIALIZE) == 0:
        return 0
    return x


def flush_now(recorder: Recorder, reason):
    """Flush one way or the other; 0 after an error."""
    done = flushed(recorder, reason, 0, 0, 0)
    if done == 0 and PyErr_Occurred() == 0:
        # Python sees the same counts, and so knows them next time
        done = flushed_by_python(recorder, reason)
    return done


def flushed_by_python(recorder: Recorder, reason):
    """1, or 0 after an error."""
    args = room(2)
    args[0] = recorder
    args[1] = reason
    return borrowed(python(chain_flush, args, 2, 0)) != 0


def flush_into(recorder: Recorder, reason, target, chain: Chain):
    """Flush `chain` with `target` as the memory of the last value; 0 if that is not done."""
    last = kept(chain.tip)  # before Python runs
    if flushed(recorder, reason, target, chain, last) != 0:
        return 1
    if PyErr_Occurred() != 0:
        return 0
    number = PyLong_FromLong(chain)
    args = room(5)
    args[0] = recorder
    args[1] = reason
    args[2] = target
    args[3] = last
    args[4] = number
    return borrowed(python(chain_flush, args, 5, 0)) is True


def flushed(recorder: Recorder, reason, target, expected, last):
    """1 or 2 if it is done, 0 if Python has to do it or after an interrupt.

    target: the memory that takes the last value, or 0; expected, last: the chain then and its tip.
    """
    ident = PyThread_get_thread_ident()
    if int(recorder.ident) != ident or int(recorder.thread) != ident:
        return 0  # another thread's, or that of one that ends
    if PyDict_GetItemWithError(inside, recorder.ident) != 0:
        return 0
    if recorder.reading is True or recorder.running is not None:
        return 0
    if PyList_Size(recorder.chain) == 0:
        return target == 0
    if PyList_Size(recorder.untold) != 0:  # what an interrupt has left
        return 0
    if PyDict_GetItemWithError(hook_names, OBSERVER) is not None or len(ranges) != 0:
        return 0  # somebody looks
    if recorder.spare is None:  # what may run Python comes before anything is looked at
        recorder.spare = PyObject_CallOneArg(Chain, recorder.home)
    chain: Chain = kept(recorder.chain)
    tip: Node = chain.tip
    if target != 0 and (chain is not expected or tip is not last):
        return 0
    if chain.tried is not None or chain.start is not None:  # on trial, which is told
        return 0
    size = len(chain)
    refcounts: tuple = tip.usual  # 60 ns less than to make them anew
    if refcounts is None or are_counts(chain, size, refcounts) == 0:
        refcounts = PyTuple_New(size)  # up to Python 3.11 this runs finalizers, which may flush
        if recorder.chain is not chain or chain.tip is not tip or recorder.spare is None:
            return 0
        for k in range(size):
            refcounts[k] = PyLong_FromLong(load32(chain[k]) + COUNTED)
        tip.usual = refcounts
    if target == 0:
        runner = PyDict_GetItemWithError(tip.runners, refcounts)
    else:
        runner = PyDict_GetItemWithError(tip.writers, refcounts)
    if runner == 0:
        return 0
    program = PyObject_GetAttr(runner, WORDS)
    if program is None:
        return 0
    done = 0
    # waiting, the counts would grow stale
    if borrowed(PyObject_Call(recorder.acquire, AT_ONCE, 0)) is True:
        if recorder.chain is chain and chain.tip is tip and recorder.spare is not None:
            if tip.holds_grad is True:
                chain.late = None
                if call_pointer(PEEK) != int(chain.first) + size:
                    chain.late = chain.first
            done = ran(recorder, chain, size, program, reason, target)
        ended(recorder.release)
    if done > 0 and PyList_Size(recorder.untold) != 0:
        PyObject_CallOneArg(tell, recorder)
    if PyErr_Occurred() != 0:
        return 0
    if done < 0:  # an interrupt may come, and the next flush then does it
        return flushed_by_python(recorder, reason)
    return done


def are_counts(chain: Chain, size, refcounts: tuple):
    """Whether the shells of `chain` have these reference counts."""
    for k in range(size):
        if load32(chain[k]) + COUNTED != int(refcounts[k]):
            return 0
    return 1


def ran(recorder: Recorder, chain: Chain, size, program: Words, reason, target):
    """Run the chain with the lock held: as `launched`; -1 where its values are to be given away."""
    spare: Chain = kept(recorder.spare)
    spare.tip = recorder.home
    zero = PyLong_FromLong(0)
    PyDict_SetItem(inside, recorder.ident, True)
    recorder.ident = zero  # a finalizer must not record now
    home = kept(recorder.home)
    grad = recorder.grad
    inference = recorder.inference
    autocast = recorder.autocast
    hooks = kept(recorder.hooks)
    recorder.running = chain
    recorder.chain = spare
    recorder.spare = None
    chain.hooks = hooks
    if target != 0:
        chain.into = target
    before = switch_off(2)
    done = launched(chain, program)
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
        recorder.autocast = autocast
        recorder.hooks = hooks
        recorder.home = home
        recorder.chain = chain
        recorder.spare = spare
        recorder.ident = recorder.thread
    else:
        recorder.running = None
        counted(recorder, reason, done > 1)
        for k in range(size):
            shell = chain[k]
            if shell is not None:
                if load(shell + WEAKREFS) != 0:
                    state: Node = state_of(shell)
                    state.shell = None  # the weak reference dies with the shell
        recorder.ident = recorder.thread
        PyList_SetSlice(chain, 0, size, 0)
        if load32(chain) == 1 + (target != 0):  # `flushed` holds it, and so does who writes
            chain.inputs = emptied(chain.inputs)
            chain.consts = emptied(chain.consts)
            chain.values = None
            chain.bumps = None
            chain.placed = None
            chain.hooks = None
            PyList_SetSlice(chain.marks, 0, PyList_Size(chain.marks), 0)
            if PyDict_Size(chain.known) != 0:
                PyDict_Clear(chain.known)
            chain.pinned = zero
            recorder.spare = chain
    return done


def counted(recorder: Recorder, reason, launches):
    """Count a flush and its launches, 0 or 1."""
    count_one(flushes, reason)
    number = tried(PyLong_FromLong(int(recorder.launches) + launches))
    if number == 0:  # no memory: it goes uncounted
        PyErr_Clear()
    else:
        recorder.launches = number


def emptied(items: list) -> object:
    """A list without items: this one if nobody else has it."""
    if load32(items) == 1:
        PyList_SetSlice(items, 0, len(items), 0)
        return items
    return PyList_New(0)

"""Launching a chain's kernels and settling its shells, as machine code."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..chain.state import Chain, Node
from ..run.settle import WRITING
from ..run.words import (
    ALONE,
    ARGUMENTS,
    BUSY,
    DEVICE,
    FIRST,
    HOST,
    INPUTS,
    LAUNCH,
    MADE,
    OUTPUTS,
    OWNED,
    PLACED,
    PLACED_AT,
    PLACES,
    POINTERS,
    READY,
    RUNS,
    Words,
)
from ..torch_private import copy_to, swap
from .c import *
from .values import (
    address_of,
    forget_error,
    grad_mode,
    number_of,
    set_class,
    switch_back,
    switch_off,
    version_of,
)


def allocated(words, at, place):
    """Make the outputs and put their pointers at `place`; where the words go on, 0 if it fails."""
    outputs = words[OUTPUTS]
    further = at[0]
    at += 8
    for made in range(further):  # what allocates, its arguments, for how many values of which bytes
        outputs[made] = PyObject_Call(at[0], at[1], 0)
        words[MADE] = made + 1
        pointer = address_of(outputs[made])
        if pointer == -1:
            return 0
        for _ in range(at[2]):
            place[0] = pointer
            place += 8
            pointer += at[3]
        at += 32
    return at


def viewed(program: Words, words):
    """Make the views that somebody holds, and put them after the outputs; 0 if that fails."""
    outputs = words[OUTPUTS]
    args = words[ARGUMENTS]
    bases: tuple = program.bases
    for k in range(len(bases)):
        args[k] = outputs[int(bases[k])]
    views = tried(PyObject_Vectorcall(program.viewer, args, len(bases), 0))
    if views == 0:
        return 0
    put_after(words, views)
    return 1


def put_after(words, views: tuple):
    """Put the views that somebody holds after the outputs."""
    outputs = words[OUTPUTS]
    for k in range(len(views)):
        outputs[words[MADE]] = kept(views[k])
        words[MADE] = words[MADE] + 1


def sent(words, at, consts, stream):
    """Launch the pieces, with `consts` as items; 1 if all are, -1 if some are, 0 if none is."""
    pieces = at[0]
    ready = words[READY]
    if are_ready(words, at, consts, ready) == 0:
        return 0
    for k in range(pieces):
        # the launch may wait for room in the device's queue, and on a CPU is all of the kernel
        thread = PyEval_SaveThread()
        error = call_pointer(words[LAUNCH], ready[0], ready[1], 1, 1, ready[2], 1, 1, 0,
                             stream, ready[3], 0)  # fmt: skip
        PyEval_RestoreThread(thread)
        if error & 0xFFFFFFFF != 0:
            if k == 0:
                return 0
            return -1
        ready += 32
    return 1


def are_ready(words, at, consts, ready):
    """Write the parameters of the pieces, and what is to be launched; whether that went well."""
    pointers = words[POINTERS]
    pieces = at[0]
    at += 8
    for _ in range(pieces):
        entry = at[0]
        blocks = at[1]
        threads = at[2]
        parameters = at[3]
        slot = at[4]
        addresses = slot
        other = at + 40  # the same of the kernel for what is not aligned, but for its threads
        bits = 0
        operands = at[9]
        at += 80
        for _ in range(operands):
            # pointers: which, how many bytes on, and 15 if the kernel moves 16 bytes at a time
            pointer = pointers[at[0]] + at[1]
            bits = bits | (pointer & at[2])
            slot[0] = pointer
            slot += 8
            at += 24
        if bits != 0:
            entry = other[0]
            if entry == 0:
                return 0
            blocks = other[1]
            parameters = other[2]
            slot = other[3]
            for k in range(operands):
                slot[k] = addresses[k]
            slot += 8 * operands
        operands = at[0]
        at += 8
        for _ in range(operands):  # Consts: which, and as what
            const = consts[at[0]]
            kind = at[1]
            if kind == 0:
                store_float(slot, float(const))
            elif kind == 1:
                store_double(slot, float(const))
            elif kind == 2:
                store_float(slot, reciprocal(float(const)))
            elif kind == 3:
                store_double(slot, reciprocal(float(const)))
            else:
                slot[0] = int(const)
            slot += 8
            at += 16
        if PyErr_Occurred() != 0:
            return 0
        ready[0] = entry
        ready[1] = blocks
        ready[2] = threads
        ready[3] = parameters
        ready += 32
    return 1


def launched(chain: Chain, program: Words):
    """Launch the kernels and give the live shells their values, as a Runner does in Python.

    1 if that is done without a kernel, 2 with one; 0 where Python has to do it or is interrupted.
    """
    words = PyLong_AsVoidPtr(program.address)
    if is_elsewhere(words) != 0 or chain.values is not None:
        return 0
    done = ran_kernels(chain, program, words)
    given_up(words)  # the shells have their references
    return done


def ran_kernels(chain: Chain, program: Words, words):
    """`launched`, before the outputs are let go."""
    count = words[INPUTS]
    pointers = words[POINTERS]
    outputs = words[OUTPUTS]
    marks: list = chain.marks
    at = words + 8 * FIRST
    for k in range(count):  # Inputs: whether they have a version
        x = PyList_GetItem(chain.inputs, k)
        if at[0] != 0 and version_of(x) != int(marks[2 * k]):
            return 0
        pointers[k] = address_of(x)
        if pointers[k] != int(marks[2 * k + 1]):
            return 0
        at += 8
    shells = at[0]  # live shells: index, node, Meta, which output
    visible = at + 8
    at = visible
    for _ in range(shells):
        if int(call_object(USERS_METHOD, chain[at[0]], 0)) != 1:
            return 0
        at += 32
    if chain.bumps is not None:  # of which bases have some, too
        if program.viewer is not None or program.attach_views is True:
            return 0
    copies = program.copied is not None
    if copies != 0 and (grad_mode() != 0 or chain.into is None or words[PLACED] != 0):
        return 0
    at = allocated(words, at, pointers + 8 * count)
    if at == 0:
        return 0
    if program.viewer is not None and viewed(program, words) == 0:
        return 0
    placed = words[PLACED]
    if placed != 0 and overwriting(chain, words) == 0:
        return 0
    into = kept(chain.into)
    own = None
    if into is not None and copies == 0:
        pointer = address_of(into)
        if pointer == -1:
            return 0
        pointers[words[PLACES] - 1] = pointer
    if into is not None or placed != 0:
        own = values_of(words, visible, shells)
        if own == 0:
            return 0
    writes = (into is not None and copies == 0) or placed != 0
    if chain.bumps is not None and placed == 0:  # up to Python 3.11 this runs finalizers
        count_writes(chain.bumps, words, visible, shells)
    if chain.values is not None:  # a finalizer was faster, or another thread
        return 0
    if writes != 0:  # what is launched next cannot be repeated
        chain.values = WRITING
        chain.into = None
    done = 1 + (at[0] != 0)
    went = sent(words, at, load(chain.consts + LISTED), PyLong_AsVoidPtr(chain.stream))
    if writes != 0:
        chain.values = None
        if went > 0:
            chain.values = own
            if into is not None:
                bumped(into)
        if went != 0 and placed != 0:  # where a part of it is done Python finds what has changed
            count_writes(chain.bumps, words, visible, shells)
    if went < 1:
        return 0
    if program.attach is not None:
        made = words[OWNED]
        args = words[ARGUMENTS]
        args[0] = chain.inputs
        args[1] = chain.consts
        args[2] = chain.late
        for k in range(made):
            args[k + 3] = outputs[k]
        views = PyObject_Vectorcall(program.attach, args, 3 + made, 0)
        if program.attach_views is True:
            put_after(words, views)
    if copies != 0 and copied_out(chain, program, outputs, into, own) == 0:
        return 0
    if chain.values is not own:  # another thread was faster
        return 0
    if settled(chain, words, visible, shells) == 0:
        return 0
    return done


def copied_out(chain: Chain, program: Words, outputs, into, own: dict):
    """Copy the last value to the memory that it is written to; 0 where Python has to do it."""
    last: tuple = program.copied
    args = room(2)
    args[0] = into
    args[1] = outputs[int(last[1])]
    if PyDict_SetItem(own, last[0], args[1]) != 0:
        return 0
    if chain.values is not None:  # a finalizer was faster
        return 0
    chain.values = own
    chain.into = None
    if borrowed(tried(PyObject_Vectorcall(copy_to, args, 2, 0))) == 0:
        chain.into = into  # Python then says why
        return 0
    return 1


def overwriting(chain: Chain, words):
    """Put the Inputs whose memory is written to after the outputs; 0 if a handle has it still."""
    outputs = words[OUTPUTS]
    places = words[PLACED_AT]
    if chain.placed is None:
        return 0
    for _ in range(words[PLACED]):
        step = PyLong_FromLong(places[0])
        if PyDict_GetItemWithError(chain.placed, step) == 0:
            return 0
        outputs[words[MADE]] = kept(PyList_GetItem(chain.inputs, places[1]))
        words[MADE] = words[MADE] + 1
        places += 16
    return 1


def values_of(words, at, shells) -> object:
    """The outputs by node index, as `chain.values` has them."""
    outputs = words[OUTPUTS]
    values = PyDict_New()
    for _ in range(shells):
        number = PyLong_FromLong(at[0])
        PyDict_SetItem(values, number, outputs[at[3]])
        at += 32
    return values


def answer(entry, program: Words, incoming: tuple, saved: tuple, given) -> object:
    """`run.words.answer`: gradients by a kernel."""
    words = PyLong_AsVoidPtr(program.address)
    if words[BUSY] != 0:
        return 0
    words[BUSY] = 1
    before = switch_off(1)  # a leaf of the user's may be wrapped
    result = answered(program, words, incoming, saved, given)
    given_up(words)  # what it returns it holds
    switch_back(before)
    words[BUSY] = 0
    return result


def answered(program: Words, words, incoming: tuple, saved: tuple, given) -> object:
    """What `Answer` promises; 0 where Python has to do it."""
    if is_elsewhere(words) != 0:
        return 0
    if words[DEVICE] > HOST:
        ident = PyLong_FromLong(PyThread_get_thread_ident())
        if PySet_Contains(entered, ident) != 1:  # threads with a current context
            return 0
    pointers = words[POINTERS]
    outputs = words[OUTPUTS]
    count = words[INPUTS]
    at = words + 8 * FIRST
    for k in range(count):  # Inputs: the tensor they lie in, and at which byte
        if at[0] < len(incoming):
            pointer = address_of(incoming[at[0]])
        else:
            pointer = address_of(saved[at[0] - len(incoming)])
        if pointer == -1:
            return 0
        pointers[k] = pointer + at[1]
        at += 16
    at = allocated(words, at, pointers + 8 * count)
    if at == 0:
        return 0
    consts = 0
    if program.numbers is not None:
        consts = PyObject_CallOneArg(program.numbers, given)
    stream = PyObject_CallNoArgs(program.stream)
    if sent(words, at, consts + ITEMS, PyLong_AsVoidPtr(stream)) < 1:
        return 0
    refs: tuple = program.results  # None, a result as k, an incoming gradient as ~k
    result: tuple = PyTuple_New(len(refs))
    for k in range(len(refs)):
        if refs[k] is None:
            result[k] = None
        elif int(refs[k]) >= 0:
            result[k] = outputs[int(refs[k])]
        else:
            result[k] = incoming[~int(refs[k])]
    words[RUNS] = words[RUNS] + 1
    return result


def count_writes(bumps, words, at, shells):
    """Give outputs the versions that in-place ops on their handles made, before they are saved."""
    outputs = words[OUTPUTS]
    own = kept(bumps)
    for _ in range(shells):
        number = PyLong_FromLong(at[0])
        times = PyDict_GetItemWithError(own, number)
        if times != 0:
            for _ in range(int(times)):
                bumped(outputs[at[3]])
        at += 32


def bumped(tensor):
    """Let the version counter of `tensor` go up."""
    if borrowed(tried(PyObject_CallOneArg(increment_version, (tensor,)))) == 0:
        PyErr_Clear()


def settled(chain: Chain, words, at, shells):
    """Let each live shell become its output, which then serves as its node's shell.

    0 where Python has to go on with `chain.values`.
    """
    outputs = words[OUTPUTS]
    own = chain.values
    visible = at
    done = 1
    for _ in range(shells):
        node: Node = at[1]
        shell = chain[at[0]]
        output = outputs[at[3]]
        # up to Python 3.11 this runs finalizers, which may be faster
        args: tuple = tried(PyTuple_New(2))
        if args == 0 or chain.values is not own:
            done = 0
            break
        args[0] = shell
        args[1] = output
        set_class(shell, Plain)  # of another torch asks Python whether it is a tensor, 70 ns
        swapped = tried(PyObject_Call(swap, args, 0))
        set_class(shell, Tensor)
        if swapped == 0:  # C++ may have a weak reference
            done = 0
            break
        PyObject_GenericSetAttr(shell, AF, at[2])
        set_class(output, Tensor)
        PyObject_GenericSetAttr(output, AF, node)
        node.shell = output
        chain[at[0]] = None
        at += 32
    if done == 0:
        PyErr_Clear()
    if done == 0 and chain.values is None:
        values = values_of(words, visible, shells)
        if values != 0:
            chain.values = values
    words[RUNS] = words[RUNS] + 1
    return done


def given_up(words):
    """Forget the outputs, and an error unless it is an interrupt."""
    forget_error()
    outputs = words[OUTPUTS]
    made = words[MADE]
    words[MADE] = 0
    for k in range(made):
        Py_DecRef(outputs[k])


def is_elsewhere(words):
    """Whether it is for another device, of several, than the current one, or for more threads."""
    if words[DEVICE] == ALONE:
        return number_of(get_num_threads) != 1
    if words[DEVICE] < 0:
        return 0
    return number_of(get_device) != words[DEVICE]

"""Launching a chain's kernels and settling its shells, in words; the language is `machine`'s."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..kernel.source import THREADS_PER_BLOCK
from ..run.settle import WRITING
from ..run.words import (
    ARGUMENTS,
    BUSY,
    DEVICE,
    FIRST,
    INPUTS,
    LAUNCH,
    MADE,
    OUTPUTS,
    PLACES,
    POINTERS,
    Words,
)
from ..torch_private import swap
from .c import (
    AF,
    COUNT,
    ITEMS,
    LISTED,
    USERS_METHOD,
    Plain,
    Py_DecRef,
    Py_IncRef,
    PyDict_GetItemWithError,
    PyDict_New,
    PyDict_SetItem,
    PyErr_Clear,
    PyErr_Occurred,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyFloat_AsDouble,
    PyList_GetItem,
    PyList_SetItem,
    PyLong_AsLong,
    PyLong_AsVoidPtr,
    PyLong_FromLong,
    PyObject_Call,
    PyObject_CallNoArgs,
    PyObject_CallOneArg,
    PyObject_GenericSetAttr,
    PyObject_Vectorcall,
    PySet_Contains,
    PyThread_get_thread_ident,
    PyTuple_New,
    PyTuple_Size,
    call_pointer,
    entered,
    get_device,
    increment_version,
    load,
    reciprocal,
    store,
    store_double,
    store_float,
)
from .values import (
    address_of,
    class_of,
    forget_error,
    number_of,
    python,
    set_class,
    switch_back,
    switch_off,
    version_of,
)


def allocated(words, at, place):
    """Make the outputs and put their pointers at `place`; where the words go on, 0 if it fails."""
    outputs = load(words + OUTPUTS)
    further = load(at)
    at += 8
    while further > 0:  # what allocates, its arguments, for how many values of which bytes
        output = PyObject_Call(load(at), load(at + 8), 0)
        if output == 0:
            return 0
        made = load(words + MADE)
        store(outputs + 8 * made, output)
        store(words + MADE, made + 1)
        pointer = address_of(output)
        if pointer == -1:
            return 0
        inner = load(at + 16)
        while inner > 0:
            store(place, pointer)
            place += 8
            pointer += load(at + 24)
            inner -= 1
        at += 32
        further -= 1
    return at


def sent(words, at, consts, stream):
    """Launch the pieces, with `consts` as items; whether that went well."""
    pointers = load(words + POINTERS)
    pieces = load(at)
    at += 8
    while pieces > 0:
        entry = load(at)
        blocks = load(at + 8)
        parameters = load(at + 16)
        slot = load(at + 24)
        bits = 0
        operands = load(at + 32)
        at += 40
        while operands > 0:  # pointers: which, and 15 if the kernel moves 16 bytes at a time
            pointer = load(pointers + 8 * load(at))
            bits = bits | (pointer & load(at + 8))
            store(slot, pointer)
            slot += 8
            at += 16
            operands -= 1
        if bits != 0:
            return 0
        operands = load(at)
        at += 8
        while operands > 0:  # Consts: which, and as what
            const = load(consts + 8 * load(at))
            kind = load(at + 8)
            if kind == 0:
                store_float(slot, PyFloat_AsDouble(const))
            elif kind == 1:
                store_double(slot, PyFloat_AsDouble(const))
            elif kind == 2:
                store_float(slot, reciprocal(PyFloat_AsDouble(const)))
            elif kind == 3:
                store_double(slot, reciprocal(PyFloat_AsDouble(const)))
            else:
                store(slot, PyLong_AsLong(const))
            slot += 8
            at += 16
            operands -= 1
        if PyErr_Occurred() != 0:
            return 0
        # the launch may wait for room in the device's queue
        thread = PyEval_SaveThread()
        error = call_pointer(load(words + LAUNCH), entry, blocks, 1, 1, THREADS_PER_BLOCK, 1, 1, 0,
                             stream, parameters, 0)  # fmt: skip
        PyEval_RestoreThread(thread)
        if error & 0xFFFFFFFF != 0:
            return 0
        pieces -= 1
    return 1


def launched(recorder: Recorder, chain: Chain, program: Words):
    """Launch the kernels and give the live shells their values, as `CudaRunner` does in Python.

    1 if that is done without a kernel, 2 with one; 0 where Python has to do it or is interrupted.
    """
    words = PyLong_AsVoidPtr(program.address)
    if is_elsewhere(words) != 0 or chain.values is not None:
        return 0
    count = load(words + INPUTS)
    pointers = load(words + POINTERS)
    at = words + FIRST
    k = 0
    while k < count:  # Inputs: whether they have a version
        x = PyList_GetItem(chain.inputs, k)
        if load(at) != 0 and version_of(x) != PyLong_AsLong(PyList_GetItem(chain.marks, 2 * k)):
            return 0
        pointer = address_of(x)
        if pointer != PyLong_AsLong(PyList_GetItem(chain.marks, 2 * k + 1)):
            return 0
        store(pointers + 8 * k, pointer)
        at += 8
        k += 1
    shells = load(at)  # live shells: index, node, Meta, which output
    at += 8
    visible = at
    k = 0
    while k < shells:
        users = call_pointer(USERS_METHOD, PyList_GetItem(chain, load(at)), 0)
        if users == 0:
            return given_up(words)
        number = PyLong_AsLong(users)
        Py_DecRef(users)
        if number != 1:
            return 0
        at += 32
        k += 1
    at = allocated(words, at, pointers + 8 * count)
    if at == 0:
        return given_up(words)
    into = chain.into
    own = None
    if into is not None:
        pointer = address_of(into)
        if pointer == -1:
            return given_up(words)
        store(pointers + 8 * load(words + PLACES) - 8, pointer)
        own = values_of(words, visible, shells)
        if own == 0:
            return given_up(words)
    if chain.bumps is not None:  # up to Python 3.11 this runs finalizers
        count_writes(chain.bumps, words, visible, shells)
    if chain.values is not None:  # a finalizer was faster, or another thread
        if into is not None:
            Py_DecRef(own)
        return given_up(words)
    if into is not None:  # what is launched next cannot be repeated
        Py_IncRef(into)
        chain.values = WRITING
        chain.into = None
    done = 1 + (load(at) != 0)
    went = sent(words, at, load(chain.consts + LISTED), PyLong_AsVoidPtr(chain.stream))
    if into is not None:
        chain.values = None
        if went != 0:
            chain.values = own
            bumped(into)
        Py_DecRef(into)
        Py_DecRef(own)
    if went == 0:
        return given_up(words)
    if program.attach is not None:
        made = load(words + MADE)
        args = load(words + ARGUMENTS)
        store(args, chain.inputs)
        store(args + 8, chain.consts)
        store(args + 16, chain.late)
        k = 0
        while k < made:
            store(args + 24 + 8 * k, load(load(words + OUTPUTS) + 8 * k))
            k += 1
        attached = PyObject_Vectorcall(program.attach, args, 3 + made, 0)
        if attached == 0:
            return given_up(words)
        Py_DecRef(attached)
    if chain.values is not own:  # another thread was faster
        return given_up(words)
    if settled(chain, words, visible, shells) == 0:
        return 0
    return done


def values_of(words, at, shells):
    """The outputs by node index, as `chain.values` has them; 0 if it fails."""
    values = PyDict_New()
    while values != 0 and shells > 0:
        number = PyLong_FromLong(load(at))
        if number == 0:
            Py_DecRef(values)
            return 0
        PyDict_SetItem(values, number, load(load(words + OUTPUTS) + 8 * load(at + 24)))
        Py_DecRef(number)
        at += 32
        shells -= 1
    return values


def answer(entry, function, args, flags, names):
    """`run.words.answer`: gradients by a kernel."""
    if names == 0 and flags & COUNT == 4:
        program: Words = load(args)
        words = PyLong_AsVoidPtr(program.address)
        if load(words + BUSY) == 0:
            store(words + BUSY, 1)
            before = switch_off(1)  # a leaf of the user's may be wrapped
            result = answered(program, words, load(args + 8), load(args + 16), load(args + 24))
            given_up(words)  # what it returns it holds
            switch_back(before)
            store(words + BUSY, 0)
            if result != 0:
                return result
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def answered(program: Words, words, incoming, saved, given):
    """What `Answer` promises; 0 where Python has to do it."""
    if class_of(incoming) is not tuple or class_of(saved) is not tuple or is_elsewhere(words) != 0:
        return 0
    ident = PyLong_FromLong(PyThread_get_thread_ident())
    if ident == 0:
        return 0
    known = PySet_Contains(entered, ident)  # threads with a current context
    Py_DecRef(ident)
    if known != 1:
        return 0
    first = PyTuple_Size(incoming)
    pointers = load(words + POINTERS)
    count = load(words + INPUTS)
    at = words + FIRST
    k = 0
    while k < count:  # Inputs: the tensor they lie in, and at which byte
        pointer = address_of(given_tensor(incoming, saved, first, load(at)))
        if pointer == -1:
            return 0
        store(pointers + 8 * k, pointer + load(at + 8))
        at += 16
        k += 1
    at = allocated(words, at, pointers + 8 * count)
    if at == 0:
        return 0
    consts = 0
    if program.numbers is not None:
        consts = PyObject_CallOneArg(program.numbers, given)
        if consts == 0:
            return 0
    stream = PyObject_CallNoArgs(program.stream)
    if stream == 0:
        Py_DecRef(consts)
        return 0
    went = sent(words, at, consts + ITEMS, PyLong_AsVoidPtr(stream))
    Py_DecRef(stream)
    Py_DecRef(consts)
    if went == 0:
        return 0
    at = program.results  # None, a result as k, an incoming gradient as ~k
    size = PyTuple_Size(at)
    result = PyTuple_New(size)
    if result == 0:
        return 0
    k = 0
    while k < size:
        item = load(at + ITEMS + 8 * k)
        if item is not None:
            number = PyLong_AsLong(item)
            if number >= 0:
                item = load(load(words + OUTPUTS) + 8 * number)
            else:
                item = load(incoming + ITEMS + 8 * ~number)
        Py_IncRef(item)
        store(result + ITEMS + 8 * k, item)
        k += 1
    store(words, load(words) + 1)
    return result


def given_tensor(incoming, saved, first, k):
    if k < first:
        return load(incoming + ITEMS + 8 * k)
    return load(saved + ITEMS + 8 * (k - first))


def count_writes(bumps, words, at, shells):
    """Give outputs the versions that in-place ops on their handles made, before they are saved."""
    outputs = load(words + OUTPUTS)
    Py_IncRef(bumps)
    while shells > 0:
        times = 0
        number = PyLong_FromLong(load(at))
        if number == 0:
            PyErr_Clear()
        else:
            times = PyDict_GetItemWithError(bumps, number)
            Py_DecRef(number)
        if times != 0:
            times = PyLong_AsLong(times)
        while times > 0:
            bumped(load(outputs + 8 * load(at + 24)))
            times -= 1
        at += 32
        shells -= 1
    Py_DecRef(bumps)


def bumped(tensor):
    """Let the version counter of `tensor` go up."""
    tensors = PyTuple_New(1)
    if tensors == 0:
        PyErr_Clear()
        return
    Py_IncRef(tensor)
    store(tensors + ITEMS, tensor)
    done = PyObject_CallOneArg(increment_version, tensors)
    Py_DecRef(tensors)
    if done == 0:
        PyErr_Clear()
    else:
        Py_DecRef(done)


def settled(chain: Chain, words, at, shells):
    """Let each live shell become its output, which then serves as its node's shell.

    0 where Python has to go on with `chain.values`.
    """
    outputs = load(words + OUTPUTS)
    own = chain.values
    visible = at
    done = 1
    k = 0
    while k < shells and done != 0:
        index = load(at)
        node: Node = load(at + 8)
        shell = PyList_GetItem(chain, index)
        output = load(outputs + 8 * load(at + 24))
        args = PyTuple_New(2)  # up to Python 3.11 this runs finalizers, which may be faster
        if args == 0 or chain.values is not own:
            done = 0
        else:
            Py_IncRef(shell)
            store(args + ITEMS, shell)
            Py_IncRef(output)
            store(args + ITEMS + 8, output)
            set_class(shell, Plain)  # of another torch asks Python whether it is a tensor, 70 ns
            swapped = PyObject_Call(swap, args, 0)
            set_class(shell, Tensor)
            Py_DecRef(swapped)
            done = swapped != 0  # C++ may have a weak reference
        Py_DecRef(args)
        if done != 0:
            PyObject_GenericSetAttr(shell, AF, load(at + 16))
            set_class(output, Tensor)
            PyObject_GenericSetAttr(output, AF, node)
            node.shell = output
            Py_IncRef(None)
            PyList_SetItem(chain, index, None)
        at += 32
        k += 1
    if done == 0:
        PyErr_Clear()
    if done == 0 and chain.values is None:
        values = values_of(words, visible, shells)
        if values != 0:
            chain.values = values
        Py_DecRef(values)
    store(words, load(words) + 1)
    given_up(words)  # the shells have their references
    return done


def given_up(words):
    """In the middle of it: forget the outputs, and the error unless it is an interrupt."""
    forget_error()
    outputs = load(words + OUTPUTS)
    made = load(words + MADE)
    store(words + MADE, 0)
    while made > 0:
        made -= 1
        Py_DecRef(load(outputs + 8 * made))
    return 0


def is_elsewhere(words):
    """Whether another device than the program's is the current one, where there are several."""
    if load(words + DEVICE) < 0:
        return 0
    return number_of(get_device) != load(words + DEVICE)

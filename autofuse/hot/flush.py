"""Flushing a chain, as machine code: `chain.flush` where its kernels are there."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import TYPE_CHECKING

from ..chain.shell import Tensor, swap
from ..chain.trie import Node
from ..kernel.source import THREADS_PER_BLOCK
from ..run.launch import (
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
    WRITING,
    Program,
)
from .c import (
    ADDRESS_METHOD,
    AF,
    CLASS,
    COUNT,
    COUNTED,
    FLUSHES,
    ITEMS,
    LISTED,
    OBSERVER,
    PEEK,
    PROGRAM,
    PYTHON,
    USERS_METHOD,
    VERSION_CLOSURE,
    VERSION_GETTER,
    WEAKREFS,
    NoTorchFunction,
    Py_DecRef,
    Py_IncRef,
    PyDict_Clear,
    PyDict_DelItem,
    PyDict_GetItemWithError,
    PyDict_New,
    PyDict_SetItem,
    PyErr_Clear,
    PyErr_Fetch,
    PyErr_Occurred,
    PyErr_Restore,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    PyFloat_AsDouble,
    PyList_GetItem,
    PyList_New,
    PyList_SetItem,
    PyList_SetSlice,
    PyList_Size,
    PyLong_AsLong,
    PyLong_AsVoidPtr,
    PyLong_FromLong,
    PyObject_Call,
    PyObject_CallNoArgs,
    PyObject_CallOneArg,
    PyObject_GenericSetAttr,
    PyObject_GetAttr,
    PyObject_Vectorcall,
    PySet_Contains,
    PyThread_get_thread_ident,
    PyTuple_New,
    PyTuple_Size,
    call_pointer,
    chain_flush,
    chain_names,
    counts,
    enter,
    entered,
    get_device,
    increment_version,
    inside,
    leave,
    load,
    load32,
    ranges,
    reciprocal,
    room,
    store,
    store_double,
    store_float,
)
from .record import class_of, count_one, ended, forget_error, number_of, python, state_of

if TYPE_CHECKING:
    from ..record.chain import Chain, Recorder


def flush(entry, function, args, flags, names):
    """`chain.flush`."""
    count = flags & COUNT
    if names == 0 and (count == 2 or count == 5):
        recorder: Recorder = load(args)
        target = 0
        held = 0
        last = 0
        if count == 5:
            target = load(args + 16)
            last = load(args + 24)
            held = PyLong_AsLong(load(args + 32))
        done = flushed(recorder, load(args + 8), target, held, last)
        if done > 0:
            Py_IncRef(True)
            return True
        if done < 0:
            return 0
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


def flushed(recorder: Recorder, reason, target, held, last):
    """1 or 2 if it is done, 0 if Python has to do it, -1 after an interrupt.

    target: the memory that takes the last value, or 0; held, last: the chain then and its tip.
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
    if recorder.guarded is True:
        return 0
    if PyDict_GetItemWithError(chain_names, OBSERVER) is not None or PyList_Size(ranges) != 0:
        return 0  # somebody looks
    if recorder.spare is None:  # what may run Python comes before anything is looked at
        spare = PyObject_CallOneArg(Chain, recorder.home)
        if spare == 0:
            return -1
        recorder.spare = spare
        Py_DecRef(spare)
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if target != 0 and (chain is not held or tip is not last):
        return 0
    size = PyList_Size(chain)
    into = target != 0
    Py_IncRef(chain)
    alive = PyTuple_New(size + into)  # up to Python 3.11 this runs finalizers, which may flush
    same = recorder.chain is chain and chain.tip is tip and recorder.spare is not None
    Py_DecRef(chain)
    if alive == 0:
        return -1
    if same == 0:
        Py_DecRef(alive)
        return 0
    if into != 0:
        store(alive + ITEMS, PyLong_FromLong(-2))
    k = 0
    while k < size:
        number = PyLong_FromLong(load32(PyList_GetItem(chain, k)) + COUNTED)
        if number == 0:
            Py_DecRef(alive)
            return -1
        store(alive + ITEMS + 8 * (into + k), number)
        k += 1
    runner = PyDict_GetItemWithError(tip.runners, alive)
    Py_DecRef(alive)
    if runner == 0:
        return 0
    program = PyObject_GetAttr(runner, PROGRAM)
    if program == 0:
        return -1
    if program is None:
        Py_DecRef(program)
        return 0
    done = 0
    Py_IncRef(chain)
    taken = PyObject_CallOneArg(recorder.acquire, False)  # waiting, the counts would grow stale
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


def ran(recorder: Recorder, chain: Chain, size, program: Program, reason, target):
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
    begun = PyObject_CallNoArgs(recorder.hide)
    if begun != 0:
        Py_DecRef(begun)
        done = launched(recorder, chain, program)
        ended(recorder.show)
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
            PyDict_Clear(chain.slots)
            chain.pinned = zero
            recorder.spare = chain
    Py_DecRef(zero)
    Py_DecRef(home)
    Py_DecRef(spare)
    return done


def counted(recorder: Recorder, reason, launches):
    """Count a flush and its launches, 0 or 1."""
    flushes = PyObject_GetAttr(counts, FLUSHES)
    count_one(flushes, reason)
    Py_DecRef(flushes)
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


# --- launching: a Program's words, from the front to the back; see `launch` ------------------


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


def address_of(tensor):
    """The address of a tensor's memory, 0 after an error."""
    address = call_pointer(ADDRESS_METHOD, tensor, 0)
    if address == 0:
        return 0
    pointer = PyLong_AsLong(address)
    Py_DecRef(address)
    return pointer


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
        if PyErr_Occurred() != 0:
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


def launched(recorder: Recorder, chain: Chain, program: Program):
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
        if load(at) != 0:
            version = call_pointer(VERSION_GETTER, x, VERSION_CLOSURE)
            if version == 0:
                return given_up(words)
            now = PyLong_AsLong(version)
            Py_DecRef(version)
            if now != PyLong_AsLong(PyList_GetItem(chain.marks, 2 * k)):
                return 0
        pointer = address_of(x)
        if PyErr_Occurred() != 0:
            return given_up(words)
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
        store(pointers + 8 * load(words + PLACES) - 8, address_of(into))
        if PyErr_Occurred() != 0:
            return given_up(words)
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
    """`launch.answer`: gradients by a kernel."""
    if names == 0 and flags & COUNT == 4:
        program: Program = load(args)
        words = PyLong_AsVoidPtr(program.address)
        if load(words + BUSY) == 0:
            guard = PyObject_CallNoArgs(NoTorchFunction)  # a leaf of the user's may be wrapped
            if guard == 0:
                return 0
            store(words + BUSY, 1)
            Py_DecRef(PyObject_CallOneArg(enter, guard))
            result = answered(program, words, load(args + 8), load(args + 16), load(args + 24))
            given_up(words)  # what it returns it holds
            error = room(3)
            PyErr_Fetch(error, error + 8, error + 16)
            Py_DecRef(PyObject_CallOneArg(leave, guard))
            PyErr_Restore(load(error), load(error + 8), load(error + 16))
            Py_DecRef(guard)
            store(words + BUSY, 0)
            if result != 0:
                return result
            if PyErr_Occurred() != 0:
                return 0
    return python(function, args, flags, names)


def answered(program: Program, words, incoming, saved, given):
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
        if PyErr_Occurred() != 0:
            return 0
        store(pointers + 8 * k, pointer + load(at + 8))
        at += 16
        k += 1
    at = allocated(words, at, pointers + 8 * count)
    if at == 0:
        return 0
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
            swapped = PyObject_Call(swap, args, 0)
            Py_DecRef(swapped)
            done = swapped != 0  # C++ may have a weak reference
        Py_DecRef(args)
        if done != 0:
            PyObject_GenericSetAttr(shell, AF, load(at + 16))
            PyObject_GenericSetAttr(output, CLASS, Tensor)
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

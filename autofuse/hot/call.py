"""Eager ops between two chains, as machine code: torch functions, what begins chains, writes."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Held, Tensor
from ..chain.state import Chain, Node, Recorder
from ..dispatch.unrecorded import Known
from .c import *
from .eager import are_modes_off, are_watched, called_on_plain, count_eager, lend, take_back
from .flush import flush_now
from .record import handed, number_chain, verdict_on
from .values import (
    address_of,
    are_others,
    class_of,
    current_recorder,
    functions_off,
    has_lent,
    has_target,
    has_value,
    is_lent,
    is_ours,
    is_simple,
    item_at,
    looked_on,
    node_of,
    only_recorder,
    own_recorders,
    set_class,
    slot_of,
    state_of,
    switch_back,
    told,
)
from .view import recorded_views


def getting(entry, x: Tensor) -> object:
    """A property of `dispatch.metadata`; entry: C's getter, its closure, whether gradients count.

    A shell says of itself what its value will say, but for those.
    """
    if looked_on() != 0:
        return 0
    state = state_of(x)
    if class_of(state) is Held:  # its value says it
        return 0
    if entry[2] is True and has_value(state) == 0:
        return 0
    before = functions_off()
    result = tried(call_object(entry[0], x, entry[1]))
    switch_back(before)
    return result


def asking(entry, function, args, count, names) -> object:
    """A method of `dispatch.metadata`; entry: the method of torch's."""
    if looked_on() != 0:
        return 0
    given = count
    if names != 0:
        given += PyTuple_Size(names)
    for k in range(given):
        if class_of(args[k]) is Tensor and class_of(state_of(args[k])) is Held:
            return 0
    before = functions_off()
    result = tried(PyObject_Vectorcall(entry[0], args, count, names))
    switch_back(before)
    return result


def passing(table, function, args, count, names) -> object:
    """`run_eager` for a function of torch in C that writes nothing.

    table: by handlers, each one's function, what is known of that.
    """
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    entry = own + ITEMS
    recorder: Recorder = current_recorder()
    if recorder == 0:
        return 0
    if is_everyday(recorder, entry[1], args, count, names) == 0:
        return 0
    known: Known = entry[1]
    return passed(recorder, entry, known.refusal, args, count, names)


def running(table, function, args, count, names) -> object:
    """`run_eager` for a function of torch in Python that writes nothing; table: as in `passing`."""
    own = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    entry = own + ITEMS
    known: Known = entry[1]
    return run(entry[0], known, known.refusal, args, count, names)


def run(function, known: Known, refusal, args, count, names) -> object:
    """What a function in Python gives that finds wrapped tensors plain; 0 if Python has to."""
    recorder: Recorder = current_recorder()
    if recorder == 0 or known.lends is not True:
        return 0
    if is_everyday(recorder, known, args, count, names) == 0:
        return 0
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if len(loans) != 0 and are_others() != 0 and has_lent(args, every) != 0:
        return 0  # its lenders may have ended before the function has
    plain = room(16)
    lent_before = room(16)
    if are_few(args, every, 16) == 0:
        return 0
    chain: Chain = kept(recorder.chain)
    pending = is_next(chain)
    lent = lend(plain, 0, args, every, 16)
    for k in range(lent):
        lent_before[k] = is_lent(plain[k])
    for k in range(lent):
        if node_of(plain[k]) != 0:  # a finalizer has made it pending
            claim(plain, lent_before, lent)
            take_back(plain, lent)
            return 0
        if state_of(plain[k]) is not UNKNOWN:  # a hook, say, may set its data without our seeing it
            PyObject_GenericSetAttr(plain[k], AF, 0)
    result = tried(PyObject_Vectorcall(function, args, count, names))
    claim(plain, lent_before, lent)
    take_back(plain, lent)
    if result == 0:
        return 0
    count_eager(refusal)
    if pending != 0 and recorder.chain is chain:  # `numbers.pass_over`
        number_chain(chain, call_pointer(PEEK) - len(chain))
    return wrapped(recorder, result)


def claim(place, lent_before, count):
    """Let those be lent no more that others have lent while they were plain: no Python runs here.

    They are their user's, see `dispatch.eager.wrap_again`.
    """
    for k in range(count):
        if lent_before[k] == 0 and is_lent(place[k]) != 0:
            key = tried(PyLong_FromLong(place[k]))
            if key != 0:
                PyDict_DelItem(loans, key)


def are_few(args, count, most):
    """Whether less than `most` wrapped tensors are among the arguments: what is left, or 0."""
    for k in range(count):
        x = args[k]
        kind = class_of(x)
        if kind is Tensor:
            most -= 1
        elif kind is list:
            most = are_few(load(x + LISTED), PyList_Size(x), most)
        elif kind is tuple:
            most = are_few(x + ITEMS, PyTuple_Size(x), most)
        if most <= 0:
            return 0
    return most


def viewing(table, function, args, count, names) -> object:
    """`run_eager` for a function that gives views, or of a pending value `record.views`."""
    if count != 0 and class_of(args[0]) is Tensor and class_of(state_of(args[0])) is Node:
        value: Node = state_of(args[0])
        if value.into is not None:  # what is written over is read as it lies
            return looking(table, function, args, count, names)
        recorder: Recorder = current_recorder()
        if recorder != 0 and recorder is not None:
            chain: Chain = recorder.chain
            tip: Node = chain.tip
            if tip.rows is not None:  # row kernels read no index maps
                return looking(table, function, args, count, names)
        if names == 0 and count == 2 and has_tensor(args[1]) != 0:
            own: tuple = PyDict_GetItemWithError(table[0], function)
            if own != 0 and own[0] is getitem:  # no view
                return passing(table, function, args, count, names)
        return recorded_views(function, args, count, names)
    return looking(table, function, args, count, names)


def has_tensor(index):
    """Whether it is one, or several with one among them."""
    if class_of(index) is tuple:
        for k in range(PyTuple_Size(index)):
            if is_ours(load(index + ITEMS + 8 * k)) != 0:
                return 1
        return 0
    return is_ours(index)


def looking(table, function, args, count, names) -> object:
    """`run_eager` for a function that gives views, mostly one in C."""
    own: tuple = PyDict_GetItemWithError(table[0], function)
    if own == 0:
        return 0
    known: Known = own[1]
    return left_eager(own + ITEMS, known.refusal, args, count, names)


def left_eager(entry, refusal, args, count, names) -> object:
    """`run_eager` for a function in C or in Python, counted under `refusal`; 0 if Python has to.

    entry: begins with the function, and what is known of it.
    """
    known: Known = entry[1]
    if known.in_c is not True:
        return run(entry[0], known, refusal, args, count, names)
    recorder: Recorder = current_recorder()
    if recorder == 0:
        return 0
    if is_everyday(recorder, known, args, count, names) == 0:
        return 0
    return passed(recorder, entry, refusal, args, count, names)


def returning(table, function, args, count, names) -> object:
    """`passing` for a function that mostly returns its argument: Python does, of pending values."""
    if has_pending(args, count) != 0:
        return 0
    return passing(table, function, args, count, names)


def making(table, function, args, count, names) -> object:
    """A function of `dispatch.metadata` that makes a tensor as a pending one is; or `passing`."""
    if count == 0 or class_of(args[0]) is not Tensor:
        return passing(table, function, args, count, names)
    state: Node = state_of(args[0])
    if class_of(state) is not Node:
        return passing(table, function, args, count, names)
    meta: Meta = state.meta
    if class_of(meta) is not Meta or meta.stand_in is None:
        return 0
    own = PyDict_GetItemWithError(table[0], function)
    recorder: Recorder = current_recorder()
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if own == 0 or recorder == 0 or recorder.off is True or every > 8:
        return 0
    operands = room(8)
    stands = kept(meta.stand_in)
    operands[0] = stands
    for k in range(1, every):
        if is_ours(args[k]) != 0:
            return 0
        operands[k] = args[k]
    entry = own + ITEMS
    known: Known = entry[1]
    if is_everyday(recorder, known, operands, count, names) == 0:
        return 0
    return passed(recorder, entry, known.refusal, operands, count, names)


def has_pending(items, count):
    """Whether one of the items is pending."""
    for k in range(count):
        if class_of(items[k]) is Tensor:
            if class_of(state_of(items[k])) is Node:
                return 1
    return 0


def turning(entry, function, args, count, names) -> object:
    """A reflected operator; entry: torch's function of the operands in turn, whether one of them
    may be a number."""
    recorder: Recorder = current_recorder()
    if names != 0 or count != 2 or recorder == 0:
        return 0
    kind = class_of(args[1])
    if is_ours(args[1]) == 0 and (entry[1] is False or (kind is not float and kind is not int)):
        return 0
    if recorder.off is True or are_modes_off() == 0:
        return 0
    operands = room(2)
    operands[0] = args[1]
    operands[1] = args[0]
    return PyObject_Vectorcall(entry[0], operands, 2, 0)


def is_everyday(recorder: Recorder, known: Known, args, count, names):
    """Whether Python has nothing to do for these arguments; pending ones are flushed."""
    if are_watched() != 0 or are_modes_off() == 0:
        return 0
    if int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    if names != 0:
        if has_target(TARGETS, names, args + 8 * count) != 0:
            return 0
        if known.targets is not TARGETS and has_target(known.targets, names, args + 8 * count) != 0:
            if is_pending_elsewhere(recorder) != 0 or flush_now(recorder, known.name) == 0:
                return 0
        count += PyTuple_Size(names)
    for k in range(count):
        kind = class_of(args[k])
        if kind is tuple or kind is list:
            if are_concrete(recorder, known, args[k]) == 0:
                return 0
        elif is_concrete(recorder, known, args[k]) == 0:
            return 0
    return 1


def is_pending_elsewhere(recorder: Recorder):
    """Whether another device has something pending, or another thread may have."""
    if only_recorder() == recorder:
        return 0
    recorders: dict = own_recorders()
    if recorders == 0:
        return 1
    place = room(3)  # the position, a key, a value
    place[0] = 0
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        other: Recorder = place[2]
        if other is not recorder and PyList_Size(other.chain) != 0:
            return 1
    return 0


def is_quiet():
    """Whether nobody but this thread has recorded anything, and nothing is pending."""
    if len(all_recorders) == 0:
        return 1
    only: Recorder = only_recorder()
    if only != 0:
        return is_idle(only)
    recorders: dict = own_recorders()
    if recorders == 0:
        return 0
    place = room(3)  # the position, a key, a value
    place[0] = 0
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        if is_idle(place[2]) == 0:
            return 0
    return 1


def is_idle(recorder: Recorder):
    """Whether nothing of it is pending, it is in the middle of no flush, and its thread lives."""
    if PyList_Size(recorder.chain) != 0 or recorder.reading is True:
        return 0
    return int(recorder.ident) != 0


def is_unread(target):
    """Whether what is pending reads nothing of a plain tensor's storage: `writes.flush_readers`.

    0 where Python has to look: at what lies next to it, in other threads, in the middle of a flush.
    """
    if is_ours(target) == 0 or class_of(target) is Tensor:
        return 0
    keys = load(load(target + TENSOR_AT) + KEYS_AT)
    if keys != CPU_KEYS and keys != CUDA_KEYS:  # it may have no storage
        return 0
    place = room(3)
    place[2] = 0
    start = address_of(target)
    failed = call_pointer(BYTES_OF, target + TENSOR_AT, place)
    failed = failed | call_pointer(OFFSET_OF, target + TENSOR_AT, place + 8)
    failed = failed | call_pointer(DTYPE_OF, target + TENSOR_AT, place + 16)
    if start == -1 or start == 0 or failed & FAILED != 0:
        return 0
    start = start - place[1] * call_pointer(WIDTH_OF, place[2])
    end = start + place[0]
    only: Recorder = only_recorder()
    if only != 0:
        return reads_nothing(only, start, end)
    recorders: dict = own_recorders()
    if recorders == 0:
        return 0
    place[0] = 0  # the position, a key, a value
    while PyDict_Next(recorders, place, place + 8, place + 16) != 0:
        if reads_nothing(place[2], start, end) == 0:
            return 0
    return 1


def reads_nothing(recorder: Recorder, start, end):
    """Whether the open chain, if there is one, has no Input that may lie in memory from there on
    and before the end."""
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if recorder.reading is True or int(recorder.ident) == 0 or tip.told is not EMPTY:
        return 0
    metas: tuple = tip.inputs
    marks: list = chain.marks
    for k in range(len(metas)):
        meta: Meta = metas[k]
        begins = int(marks[2 * k + 1])
        if begins == 0 or (begins < end and start < begins + int(meta.reach)):
            return 0  # of no bytes, too: whose storage it lies in, its address does not say
    return 1


def are_concrete(recorder: Recorder, known: Known, items):
    """`is_concrete` for what is in a tuple or a list, which a flush may change."""
    k = 0
    while 1:
        x = item_at(items, k)
        if x == 0:
            return 1
        if is_concrete(recorder, known, x) == 0:
            return 0
        k += 1


def is_concrete(recorder: Recorder, known: Known, x):
    """Whether `x` is concrete now, and no Input of a chain whose order of uses counts."""
    kind = class_of(x)
    if kind is not Tensor:
        if kind is float or kind is int or kind is bool or x is None or kind is complex:
            return 1
        if is_simple(kind) == 0:
            return 0
    chain: Chain = recorder.chain
    tip: Node = chain.tip
    if tip.holds_grad is True and slot_of(chain, x) != 0:
        return 0  # the engine adds up gradients in the order of uses
    if kind is not Tensor:
        return 1
    state: Node = state_of(x)
    if class_of(state) is Node:
        return state.recorder is recorder and flush_now(recorder, known.name) != 0
    return has_value(state)


def passed(recorder: Recorder, entry, refusal, args, count, names) -> object:
    """What the function returns, wrapped; what is pending reads none of its arguments."""
    chain: Chain = kept(recorder.chain)
    pending = is_next(chain)
    result = called_on_plain(recorder, entry[0], refusal, args, count, names)
    if pending != 0 and recorder.chain is chain:  # `numbers.pass_over`
        number_chain(chain, call_pointer(PEEK) - len(chain))
    if result == 0:
        return 0
    return wrapped(recorder, result)


def is_next(chain: Chain):
    """`numbers.is_next` of a chain under grad."""
    tip: Node = chain.tip
    if tip.holds_grad is not True:
        return 0
    return call_pointer(PEEK) == int(chain.first) + len(chain)


def wrapped(recorder: Recorder, result) -> object:
    """What a program gets of an op's result: that, wrapped where it does not stay plain."""
    kind = class_of(result)
    if kind is Tensor or (kind is not Plain and is_simple(kind) != 0):
        return kept(result)
    if kind is list and PyList_Size(result) != 0:
        first = class_of(PyList_GetItem(result, 0))
        if first is float or first is int or first is list:  # `tolist`: to ask of none takes 4 us
            return kept(result)
    verdict = verdict_on(recorder, result)
    if verdict == 0:
        return 0
    if verdict is not None:
        return handed(result, verdict)
    if kind is Plain:
        if load32(result) == 1 and is_strided(result) != 0:
            set_class(result, Tensor)
    elif kind is tuple:
        wrap(result + ITEMS, PyTuple_Size(result))
    elif kind is list:
        wrap(load(result + LISTED), PyList_Size(result))
    elif PyType_GetFlags(kind) & TUPLES != 0:  # with names, of max and topk
        wrap(result + ITEMS, PyTuple_Size(result))
    else:
        return PyObject_CallOneArg(lifted, result)
    return kept(result)


def wrap(items, count):
    """Wrap those of the items that are plain and that nobody else has."""
    for k in range(count):
        if class_of(items[k]) is Plain and load32(items[k]) == 1 and is_strided(items[k]) != 0:
            set_class(items[k], Tensor)


def is_strided(tensor):
    """Whether its memory is laid out by strides."""
    if load(load(tensor + TENSOR_AT) + KEYS_AT) & DENSE != 0:
        return 1
    layout = told(LAYOUT_GETTER, LAYOUT_CLOSURE, tensor)
    return layout is strided

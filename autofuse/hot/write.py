"""Writes, as machine code: `record.writes`, and what leads there and to `in_place`."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dispatch.unrecorded import Known
from .c import *
from .call import is_everyday, is_pending_elsewhere, is_quiet
from .choice import choice_for
from .eager import are_modes_off, are_watched, called_lending
from .flush import flush_into, flush_now
from .in_place import is_sole, renamed, taken
from .inputs import is_as, item_of, lies_as, likely_meta
from .record import placed, recorded
from .values import (
    address_of,
    class_of,
    current_recorder,
    grad_mode,
    has_value,
    is_ours,
    looked_on,
    node_of,
    state_of,
    switch_back,
    switch_off,
)
from .view import makes_view


def writing(entry, function, args, count, names) -> object:
    """An in-place method or function.

    entry: the function, what is known of it, the op that it is with operands alone (or None) and
    how many there are, its `Choices` of other calls or None, what else Python does.
    """
    recorder: Recorder = current_recorder()
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    if count == 0 or is_ours(args[0]) == 0 or is_free(recorder) == 0:
        return 0
    target = args[0]
    known: Known = entry[1]
    written = 0
    if are_settled(args, every) != 0:
        done = 0
        if is_sole(recorder, target) != 0:
            done = taken_by(recorder, entry, args, count, names)
        if done == 1 or PyErr_Occurred() != 0:
            written = done
        elif done == 0:
            if flush_now(recorder, known.name) == 0:
                return 0
            if is_empty(recorder) != 0:
                written = write_now(recorder, entry[0], known, args, count, names)
    elif names == 0 and entry[2] is not None and count == entry[3]:
        written = recorded_on(entry[2], target, args, count)
    elif entry[4] is not None:
        written = chosen_on(entry[4], args, count, names)
    elif entry[2] is None and is_pending(target) == 0:
        written = 2
    if written == 2 and PyErr_Occurred() == 0:
        written = written_after(recorder, entry, args, count, names)
    if PyErr_Occurred() != 0:
        return 0
    if written == 1:
        return target
    return PyObject_Vectorcall(entry[5], args, count, names)


def taken_by(recorder: Recorder, entry, args, count, names):
    """`taken`, of what the op is with these arguments."""
    if names == 0 and entry[2] is not None and count == entry[3]:
        return taken(recorder, entry[2], args[0], args, count)
    if entry[4] is None:
        return 0
    found = choice_for(entry[4], args, count, names)
    if found == 0:
        return 2
    if class_of(found) is not tuple:
        return 0
    own: tuple = found
    operands = room(8)
    return taken(recorder, own[0], args[0], operands, placed(operands, own, args))


def written_after(recorder: Recorder, entry, args, count, names):
    """Run an in-place op that no kernel can write once what it reads is computed, or leave it.

    1 if that is done. It is counted as outside the table: something was pending.
    """
    known: Known = PyDict_GetItemWithError(known_functions, entry[0])
    every = count
    if names != 0:
        every += PyTuple_Size(names)
    for k in range(every):
        x = args[k]
        kind = class_of(x)
        if is_ours(x) == 0 and kind is not float and kind is not int and kind is not bool:
            return 0
    if known == 0 or flush_now(recorder, known.name) == 0:
        return 0
    if are_settled(args, every) == 0 or is_empty(recorder) == 0:
        return 0
    return write_now(recorder, entry[0], known, args, count, names)


def recorded_on(op, target, operands, count):
    """Record an op on `target`, pending or with what it reads, as a write; as `copied`."""
    if node_of(target) != 0:
        return renamed(op, target, operands, count)
    recorder: Recorder = current_recorder()
    if recorder != 0 and is_sole(recorder, target) != 0:
        done = taken(recorder, op, target, operands, count)
        if done != 0 or PyErr_Occurred() != 0:
            return done == 1
    return wrote(op, target, operands, count)


def chosen_on(choices, args, count, names):
    """`recorded_on` of what a chooser says of a call that writes to its first argument."""
    found = choice_for(choices, args, count, names)
    if found == 0 or class_of(found) is not tuple:
        return 0
    own: tuple = found
    operands = room(8)
    return recorded_on(own[0], args[0], operands, placed(operands, own, args))


def setting(entry, x, index, value) -> object:
    """`x[i] = value`; entry: the function, what is known of it, `Choices` of writes by a mask."""
    if is_ours(x) == 0:
        return 0
    if is_pending(value) != 0 and makes_view(index) != 0:
        done = put_item(x, index, value)
        if done == 0 or PyErr_Occurred() != 0:
            return 0
        if done == 1:
            return None
    recorder: Recorder = current_recorder()
    known: Known = entry[1]
    args = room(3)
    args[0] = x
    args[1] = index
    args[2] = value
    if class_of(index) is Tensor and (is_pending(index) != 0 or is_pending(x) != 0):
        if is_free(recorder) == 0 or chosen_on(entry[2], args, 3, 0) != 1:
            return 0
        return None
    if is_free(recorder) == 0 or is_everyday(recorder, known, args, 3, 0) == 0:
        return 0
    if flush_now(recorder, known.name) == 0 or is_empty(recorder) == 0:
        return 0
    if write_now(recorder, entry[0], known, args, 3, 0) == 0:
        return 0
    return None


def copying(entry, function, args, count, names) -> object:
    """`x.copy_(value)`; entry: what stands for it where no kernel can write it."""
    if names != 0 or count != 2 or is_ours(args[0]) == 0:
        return 0
    if is_pending(args[1]) == 0:
        return PyObject_Vectorcall(entry[0], args, count, 0)
    if looked_on() != 0:
        return 0
    done = copied(args[0], args[1])
    if done == 0 or PyErr_Occurred() != 0:
        return 0
    if done == 2:
        return PyObject_Vectorcall(entry[0], args, count, 0)
    return args[0]


def placing(entry, x, value) -> object:
    """`patches.memory`'s setter of an attribute; entry: C's setter, its closure, whether what is
    set is another's memory."""
    if is_ours(x) == 0 or (entry[2] is False and is_quiet() == 0):
        return 0
    if value is not None and value is not True and value is not False:
        if class_of(value) is not Plain:
            return 0
    if call_pointer(entry[0], x, value, entry[1]) & FAILED != 0:
        return 0
    return None


def taking(entry, x) -> object:
    """`patches.memory`'s getter of an attribute; entry: C's getter, its closure."""
    if is_ours(x) == 0:
        return 0
    return call_object(entry[0], x, entry[1])


def is_free(recorder: Recorder):
    """Whether this thread may use it now, and may write without anybody else in its way."""
    if recorder == 0 or are_watched() != 0:
        return 0
    if are_modes_off() == 0:
        return 0
    if int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    return is_pending_elsewhere(recorder) == 0


def is_empty(recorder: Recorder):
    """Whether nothing reads what is to be written: a finalizer may have recorded in the flush."""
    return PyList_Size(recorder.chain) == 0 and is_pending_elsewhere(recorder) == 0


def are_settled(args, count):
    """Whether an in-place op on these can run at once."""
    for k in range(count):
        x = args[k]
        kind = class_of(x)
        if kind is Tensor:
            state = state_of(x)
            if has_value(state) == 0:
                return 0
        elif kind is not float and kind is not int and kind is not bool:
            if kind is not Plain and kind is not Parameter:
                return 0
    return 1


def write_now(recorder: Recorder, function, known: Known, args, count, names):
    """Run an in-place op as eager PyTorch; 1, or 0 after an error."""
    BEGUN[0] = BEGUN[0] + 1
    refusal = known.refusal
    result = tried(called_lending(recorder, function, refusal, args, 1, count, names))
    BEGUN[0] = BEGUN[0] - 1
    if result == 0 or result is NotImplemented:  # of an operator's method; Python comes to the same
        return 0
    if grad_mode() != 0 and class_of(args[0]) is Tensor and node_of(args[0]) == 0:
        PyObject_GenericSetAttr(args[0], AF, UNKNOWN)  # it may require grad now
    return 1


def record_write(entry, op, target, operands: tuple) -> object:
    """`record_write`."""
    if is_ours(target) == 0 or wrote(op, target, operands + ITEMS, len(operands)) != 1:
        return 0
    return True


def wrote(op, target, operands, count):
    """Write an op to the memory of a concrete `target` with what it reads; as `copied`."""
    recorder: Recorder = current_recorder()
    meta: Meta = destination(recorder, target)
    if meta == 0:
        return 0
    chain: Chain = kept(recorder.chain)
    made: Meta = made_of(meta)
    if made is None or can_write(recorder, chain, target, operands, count) == 0:
        return 0
    if reads_apart(chain, target, meta) != 0:
        return 2
    if meta.flat is True:
        result = recorded(0, op, operands, count, made)
    else:
        result = recorded(0, op, operands, count, 0)
        result = laid(result, made)  # and nobody holds the other
    return put(recorder, chain, target, meta, result)


def laid(value, made: Meta) -> object:
    """What is just recorded as `made`, whose shape and dtype it has; or 0."""
    if value == 0:
        return 0
    node: Node = node_of(value)
    if node == 0:
        return 0
    meta: Meta = node.meta
    if meta is made:
        return value
    if meta.dtype is not made.dtype or are_equal(meta.shape, made.shape) == 0:
        return 0
    return recorded_write(value, made)


def copied(target, value):
    """Write the pending `value` to the memory of a concrete `target`.

    1 if that is done, 2 if it has to be computed first, 0 if Python has to decide.
    """
    recorder: Recorder = current_recorder()
    meta: Meta = destination(recorder, target)
    if meta == 0:
        return 0
    if reads_apart(recorder.chain, target, meta) != 0:
        return 2
    chain: Chain = kept(recorder.chain)
    node: Node = node_of(value)
    made: Meta = made_of(meta)
    if node == 0 or made is None or node.recorder is not recorder:
        return 0
    return put(recorder, chain, target, meta, recorded_write(value, made))


def put_item(x, index, value):
    """`x[index] = value` of a pending value, where `index` makes a view; as `copied`."""
    if is_pending(x) != 0:
        return 2
    if are_modes_off() == 0:
        return 0
    before = switch_off(2)
    view = tried(call_object(GETITEM, x, index))
    switch_back(before)
    if view == 0:
        PyErr_Clear()  # eager PyTorch will say it
        return 0
    return copied(view, value)


def is_pending(x):
    return class_of(x) is Tensor and class_of(state_of(x)) is Node


def destination(recorder: Recorder, target):
    """The Meta of `target`, borrowed, if the open chain may write to its memory; or 0."""
    if recorder == 0:
        return 0
    if grad_mode() != (recorder.grad is True):
        return 0
    if int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    if is_pending_elsewhere(recorder) != 0:
        return 0
    chain: Chain = kept(recorder.chain)
    tip: Node = chain.tip
    if len(chain) == 0 or tip.holds_grad is True:
        return 0
    meta: Meta = state_of(target)  # UNKNOWN for a plain tensor
    if class_of(target) is not Tensor or meta is UNKNOWN:
        meta = likely_meta(tip.likely, target)
    elif class_of(meta) is Meta and lies_as(target, meta) == 0:
        return 0
    if meta == 0 or class_of(meta) is not Meta or recorder.chain is not chain:
        return 0
    if meta.inference is True or recorder.inference is True:
        return 0
    if recorder.grad is True:  # it may require grad by an alias
        if meta.requires_grad is True or is_as(target, meta) == 0:
            return 0
    return meta


def made_of(meta: Meta):
    """What has to be computed for memory of `meta`, or None: see `writes._destination`."""
    if meta.requires_grad is True:
        return meta.ungraded
    return meta


def recorded_write(value, made: Meta) -> object:
    """What writes `value` to memory like `made`, as it has been recorded before; or 0.

    A Node where it is known that no kernel does.
    """
    if made.write is None:
        return 0
    operands = room(1)
    operands[0] = value
    return recorded(TELL, made.write, operands, 1, made)


def put(recorder: Recorder, chain: Chain, target, meta: Meta, result):
    """Write the value of `result`, which has just been recorded, to `target`; as `copied`."""
    if result != 0 and class_of(result) is Node:
        return 2
    if result == 0 or reads_apart(chain, target, meta) != 0:
        return 0
    if is_pending_elsewhere(recorder) != 0:  # by now
        return 0
    if recorder.chain is not chain or chain.tip is not state_of(result):
        return 0
    BEGUN[0] = BEGUN[0] + 1
    done = flush_into(recorder, WRITE, target, chain)
    BEGUN[0] = BEGUN[0] - 1
    return done


def can_write(recorder: Recorder, chain: Chain, target, operands, count):
    """Whether something pending is written; `target` among what is read has the same layout."""
    pending = 0
    for k in range(count):
        x = operands[k]
        item = item_of(recorder, chain, x)
        if item == 0:
            return 0
        if x is target:
            continue
        if class_of(item) is int:
            pending = pending | is_pending(x)
        elif class_of(item) is Meta:
            other: Meta = item
            if other.flat is not True:
                return 0
    return pending


def is_even(chain: Chain, meta: Meta, start):
    """Whether what reads memory of `meta` at `start` has its shape: another is another kernel."""
    tip: Node = chain.tip
    if tip.viewed is True:
        return 0
    marks: list = chain.marks
    for k in range(len(chain)):
        node: Node = state_of(chain[k])
        own: Meta = node.meta
        if own.shape is not meta.shape and are_equal(own.shape, meta.shape) == 0:
            refs: tuple = node.args
            for ref in refs:
                if int(ref) < 0 and int(marks[2 * ~int(ref) + 1]) == start:
                    return 0
    return 1


def are_equal(shape, other):
    return PyObject_RichCompareBool(shape, other, EQUAL) == 1


def reads_apart(chain: Chain, target, meta: Meta):
    """`writes.reads_apart`; it is asked where their ends say nothing."""
    start = address_of(target)
    if start == -1:
        return 1
    tip: Node = chain.tip
    metas: tuple = tip.inputs
    marks: list = chain.marks
    end = start + int(meta.reach)
    along = 0
    for k in range(len(metas)):
        other: Meta = metas[k]
        begins = int(marks[2 * k + 1])
        if begins < end and start < begins + int(other.reach):
            if begins != start or other is not meta:
                met: tuple = tip.apart
                if met is not None and met[0] is meta and met[1] is other:
                    if int(met[2]) == begins - start:
                        return 1
                args = room(3)
                args[0] = chain
                args[1] = target
                args[2] = meta
                return tried(PyObject_Vectorcall(exactly, args, 3, 0)) is not False
            along = 1
    return along != 0 and is_even(chain, meta, start) == 0

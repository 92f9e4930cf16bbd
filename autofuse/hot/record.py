"""Recording an op, as machine code: `record.record`."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, Recorder
from ..dispatch.unrecorded import Known
from ..record.numbers import ORDER
from ..record.origins import Origin, Trials
from ..record.policy import SKIPS
from .c import *
from .eager import are_modes_off, are_watched, called, called_on_plain
from .flush import flush_now
from .inputs import added, fits, item_of
from .values import (
    ask2,
    autocast_mode,
    class_of,
    grad_mode,
    recorder_of,
    set_class,
)


def record(entry, op, operands: tuple) -> object:
    """`record.record`."""
    return recorded(0, op, operands + ITEMS, len(operands), ANEW)


def recorded(func, op, operands, count, wanted) -> object:
    """A new reference to the result of `op` over `operands`; 0 where Python has to decide.

    func: the torch function, by which an op is run that is better off eager; or 0; or TELL, for the
    node that says so; with 0 the result is pending. wanted: the Meta that it has to have, or 0 for
    any; or ANEW, for any, which may be on another chain where the op cuts this one, and computed by
    now where memory was short.
    """
    recorder: Recorder = recorder_of(operands, count)
    if recorder == 0 or recorder is None or recorder.off is True or count > MOST_OPERANDS:
        return 0
    if int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    if grad_mode() != (recorder.grad is True):
        if wanted != ANEW or turned(recorder, GRAD) == 0:
            return 0
    if autocast_mode(recorder) != (recorder.autocast is True):
        if wanted != ANEW or turned(recorder, CASTS) == 0:
            return 0
    # one that is flushed in the middle, see `record.flush`, must not be used again
    chain: Chain = kept(recorder.chain)
    tip: Node = chain.tip
    key = room(33)
    key[0] = op
    consts = 0
    fresh = 0
    for k in range(count):
        item = item_of(recorder, chain, operands[k])
        if item == 0:
            return 0
        if class_of(item) is Meta:
            slot = slot_of_same(tip, operands, key, k)
            if slot == 0:
                fresh += 1
            else:
                item = slot
        elif class_of(item) is type:
            consts += 1
        key[k + 1] = item
    node: Node = next_of(recorder, chain, tip, key, count + 1)
    if node == 0:
        return 0
    if node.starts is not None:
        begun: Node = known_here(kept(node.starts), 0)
        if begun == 0:
            return 0
        node = begun
    shell = node.shell
    if shell is None:
        if wanted == ANEW and node.cuts is not EMPTY:
            return recorded_anew(recorder, node.cuts, func, op, operands, count)
        if func == 0 or node.reason is EMPTY or (len(chain) != 0 and func != TELL):
            return 0
        return run_short(recorder, func, node, operands, count)
    if wanted != 0 and wanted != ANEW and node.meta is not wanted:
        return 0
    key = node.key + ITEMS
    if consts != 0 and node.limits is not None and fits(node, operands, key, count) == 0:
        return 0
    if node.holds_grad is True and numbered(chain, tip) == 0:
        if wanted != ANEW:
            return 0
        return recorded_anew(recorder, ORDER, func, op, operands, count)
    if fresh != 0:
        pinned = PyLong_FromLong(int(chain.pinned) + int(node.fresh_bytes))
        if added(recorder, chain, tip, operands, key, count) == 0:
            return 0
        chain.pinned = pinned
    elif recorder.chain is not chain or chain.tip is not tip:
        return 0
    k = 0
    while consts != 0:
        k += 1
        if class_of(key[k]) is type:
            PyList_Append(chain.consts, operands[k - 1])
            consts -= 1
    chain.tip = node
    PyList_Append(chain, shell)
    result = kept(shell)
    if fresh != 0 and wanted == ANEW and relieved(recorder, chain, node) == 0:
        return 0
    return result


def relieved(recorder: Recorder, chain: Chain, node: Node):
    """Flush if Inputs that the chain alone keeps alive have come to much memory; 0 after an error.

    To be asked after `node`.
    """
    if int(chain.pinned) > int(node.pinned_limit):
        return borrowed(ask2(relieve, recorder, chain)) != 0
    return 1


def slot_of_same(tip: Node, operands, key, k):
    """What stands in an edge for operand k, a new Input, if it is an earlier one too; or 0."""
    inputs: tuple = tip.inputs
    position = len(inputs)
    for earlier in range(k):
        if operands[earlier] is operands[k]:
            if position < len(SLOTS):
                return SLOTS[position]
            return EMPTY  # no edge has this
        if class_of(key[earlier + 1]) is Meta:
            position += 1
    return 0


def turned(recorder: Recorder, reason):
    """Flush, and go on in the grad mode and autocast of this moment; 0 if Python has to.

    As `Recorder.open` does it; after a change of any other mode `patches.modes` has it done.
    """
    home: Node = kept(recorder.home)
    if home.turns is None:
        return 0
    grad = grad_mode() != 0
    autocast = autocast_mode(recorder) != 0
    other = kept(PyList_GetItem(home.turns, 2 * grad + autocast))
    if other is None or flush_now(recorder, reason) == 0:
        return 0
    if recorder.home is not home or int(recorder.ident) != PyThread_get_thread_ident():
        return 0
    chain: Chain = recorder.chain
    if PyList_Size(chain) != 0 or PyList_Size(chain.inputs) != 0 or chain.tip is not home:
        return 0
    recorder.home = other
    chain.tip = other
    if grad != 0:
        recorder.grad = True
    else:
        recorder.grad = False
    if autocast != 0:
        recorder.autocast = True
    else:
        recorder.autocast = False
    return 1


def recorded_anew(recorder: Recorder, reason, func, op, operands, count) -> object:
    """`recorded` on another chain, once the open one is flushed, which the op cannot follow."""
    recorder.reading = False
    own = kept(reason)  # of a node that the flush may let go
    if borrowed(ask2(chain_flush, recorder, own)) == 0 or PyList_Size(recorder.chain) != 0:
        return 0
    return recorded(func, op, operands, count, 0)


def recorded_as(func, found: tuple, args) -> object:
    """The same of the op that a chooser has found, of these arguments; see `dispatch.chosen`."""
    operands = room(8)
    return recorded(func, found[0], operands, placed(operands, found, args), ANEW)


def placed(operands, found: tuple, args):
    """Put the operands that a chooser has found at `operands`: how many these are."""
    count = len(found) - 1
    for k in range(count):
        part = found[k + 1]
        if class_of(part) is int:
            operands[k] = args[int(part)]
        else:
            operands[k] = load(part + ITEMS)
    return count


def tupled(flat, size) -> object:
    """A tuple of the objects at `flat`; to make one runs finalizers, up to Python 3.11."""
    for k in range(size):
        Py_IncRef(flat[k])
    made = PyTuple_New(size)
    items = made + ITEMS
    for k in range(size):
        items[k] = flat[k]
    return made


def follows(entry, chain: Chain) -> object:
    """`numbers.follows`."""
    if numbered(chain, chain.tip) != 0:
        return True
    return False


def numbered(chain: Chain, tip: Node):
    """Whether the next op, which has a number now, follows the last one of `chain`."""
    first = call_pointer(TAKE) - len(chain)
    if tip.holds_grad is True:
        return first == int(chain.first)
    number_chain(chain, first)
    return 1


def number_chain(chain: Chain, first):
    """Set the number of the first op of `chain`."""
    chain.first = PyLong_FromLong(first)


def next_of(recorder: Recorder, chain: Chain, tip: Node, key, size):
    """The node that the edge `key` leads to, 0 if none: mostly the one that followed last time."""
    node: Node = tip.recent
    if node is not None:
        known: tuple = node.key
        if len(known) == size:
            for k in range(size):
                if known[k] is not key[k]:
                    break
            else:
                return node
    for k in range(size):
        Py_IncRef(key[k])
    edge = PyTuple_New(size)  # up to Python 3.11 this runs finalizers, which may record and flush
    same = recorder.chain is chain and chain.tip is tip
    items = edge + ITEMS
    for k in range(size):
        items[k] = key[k]
    if same == 0:
        return 0
    node = PyDict_GetItemWithError(tip.next, edge)
    if node != 0:
        tip.recent = node
    return node


def run_short(recorder: Recorder, func, node: Node, operands, count) -> object:
    """Run an op that the trie has found better off eager: `dispatch.eager.run_short`."""
    if are_watched() != 0 or are_modes_off() == 0:
        return 0
    if node.returns is not None and int(node.skips) >= SKIPS:
        return 0
    recorder.reading = False
    node.skips = PyLong_FromLong(int(node.skips) + 1)
    own: Node = kept(node)  # a finalizer may let the op be recorded again
    if func == TELL:
        return own
    if class_of(func) is Function and passes_on(func) == 0:
        result = called(func, own.refusal, operands, count, 0)
    else:
        result = called_on_plain(recorder, func, own.refusal, operands, count, 0)
    if result != 0:
        verdict = verdict_on(recorder, result)
        if verdict == 0:
            return 0
        if verdict is not None:
            return handed(result, verdict)
        set_class(result, Tensor)
    return result


def passes_on(func):
    """Whether a function in Python does nothing but pass its tensors on to C."""
    known: Known = PyDict_GetItemWithError(known_functions, func)
    return known != 0 and known.in_c is True


def verdict_on(recorder: Recorder, result) -> object:
    """What `origins.ask` says of an op's result here; 0 after an error.

    It takes 0.1 us, most of it to have a frame object of the function that calls the op.
    """
    if len(measuring) == 0:
        return None
    if recorder.off is True:
        return PyObject_CallOneArg(ask_origin, result)
    origin: Origin = known_here(origins, 0)
    now: Trials = trials
    if origin == 0:
        if PyErr_Occurred() != 0:
            return 0
        new = int(now.new) - 1
        if new <= 0:
            return PyObject_CallOneArg(ask_origin, result)
        now.new = PyLong_FromLong(new)
        return None
    if origin.parts is not None:
        origin = known_here(kept(origin.parts), 1)
        if origin == 0:  # a frame of torch may be new; others pay 0.9 us of 4 for that
            if PyErr_Occurred() != 0:
                return 0
            return PyObject_CallOneArg(ask_origin, result)
    if origin.once is not True:
        left = int(now.left) - 1
        if left <= 0:
            return PyObject_CallOneArg(ask_origin, result)
        if int(now.new) > 0:  # or new ones alone are on trial
            now.left = PyLong_FromLong(left)
    if origin.plain is True:
        return STAY
    return None


def known_here(table: dict, calls) -> object:
    """What `table` has of the instruction that the program is at; 0 where Python has to find that.

    calls: 1 for the instruction by which the function was called that has this one, else 0.
    """
    frame = kept(PyEval_GetFrame())
    while frame != 0:
        code = PyFrame_GetCode(frame)
        if calls == 0:
            key = PyLong_FromLong(code + PyFrame_GetLasti(frame))
            known = PyDict_GetItemWithError(table, key)
            if known != 0:
                return known
        key = PyLong_FromLong(code)
        if PyDict_GetItemWithError(between, key) == 0:
            if calls == 0:
                return 0
            calls -= 1
        frame = tried(PyFrame_GetBack(frame))
    return 0


def handed(result, verdict) -> object:
    """What `origins.ask` has told of: it is wrapped and on trial, or stays."""
    if verdict is STAY:
        return result
    return ask2(lifted, result, verdict)

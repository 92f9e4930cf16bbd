"""Chains: recording ops, reading liveness from reference counts, and flushing.

One open chain per thread and device. Python may run in the middle of all that happens here: signal
handlers, finalizers, callbacks of weak references, other threads. It runs where a call begins or
ends and where a loop turns, up to Python 3.11 also where a container is made, in 3.10 also where a
condition makes a jump; never between plain reads, comparisons and stores. So there is one rule:

- What was read of a chain may be another after any such place. Recording reads, prepares, and then
  in one stretch of plain code looks whether the chain is still the open one and ends where it did,
  and only then writes; otherwise it starts again. A chain is whole wherever Python can run.
- A flush takes its chain away in one such stretch. From then on the chain grows no more, and it is
  undone (made the open one again) or done, for its values are known (`values`) before any is given
  away: whatever interrupts giving them away, that is finished first.
- Whoever needs a value in the middle of the flush that makes it, or from another thread while it is
  itself inside a flush or a backward, waits for nobody: it computes the chain by eager ops
  (`_foresee`), and the flush gives those values away instead of its own. Two flushes can so never
  wait for each other.
- Whoever changes memory flushes its readers first; where an op is being recorded (`reading`) that
  op starts again, for it may have looked at the memory before.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from sys import getrefcount
from threading import get_ident
from typing import Any, Protocol
from weakref import getweakrefcount, ref

import torch

from ..chain import shell as _shell
from ..chain.shell import (
    UNKNOWN,
    Held,
    Lost,
    Meta,
    NoModes,
    NoTorchFunction,
    Tensor,
    address_of,
    become,
    concrete_meta,
    likely_meta,
    make_meta,
    make_shell,
    plain_alias,
    plain_meta,
    raw_version_of,
    requires_grad_of,
)
from ..chain.trie import Node, eager_node, extend, make_eager, needed_by
from ..dtypes import EXACT, Wide
from ..errors import ColdKernelError, KernelError, NotReadyError, StaleInputError, warn_once
from ..grad.autograd import Graph, graded, graph_of, numbered, pays
from ..inside import (
    being_inside,
    in_another_thread,
    inside,
    is_foreign,
    is_owned,
    patience,
    whatever_interrupts,
)
from ..kernel.plan import CONST, make_pieces
from ..ops.arithmetic import CASTS
from ..ops.row import Op
from ..run.launch import (
    WRITING,
    FailedRunner,
    Runner,
    compiled,
    runner_class,
    settle,
    stream_reader,
    write_out,
)
from ..settings.config import config, watch
from ..supply import kernels as compiling
from ..supply.kernels import Order
from ..supply.load import enter_context
from ..torch_private import peek, take

_Parameter = torch.nn.Parameter
_storage_of = torch.Tensor.untyped_storage
_INT64 = 1 << 63


def _dead_count() -> int:
    """The count that `_counts` reports for an object that only the list holds."""
    return _counts([object()])[0]


def _counts(shells: list[Any]) -> tuple[int, ...]:
    return tuple(map(getrefcount, shells))


def _held_here() -> int:
    """The count of an object that one local variable holds."""
    held = object()
    return getrefcount(held)


ALONE = _dead_count()
_HELD_HERE = _held_here()
DEAD = ALONE + 1  # its trie node holds it too


class Chain(list):  # type: ignore[type-arg]
    """The open chain: its shells in order, and what they read."""

    __slots__ = ("bumps", "consts", "first", "inputs", "into", "late", "marks", "pinned", "slots",
                 "stream", "tip", "values")  # fmt: skip

    def __init__(self, tip: Node) -> None:
        self.tip = tip
        self.inputs: list[torch.Tensor] = []
        self.slots: dict[int, int] = {}  # id of an Input -> ~its position
        self.marks: list[int] = []  # version and address of each Input when it was recorded
        self.consts: list[Any] = []
        self.bumps: dict[int, int] | None = None  # node index -> in-place ops its handle has seen
        # memory that takes the last value, see `record_write`; None again once it has
        self.into: torch.Tensor | None = None
        self.values: dict[int, torch.Tensor] | None = None  # what a flush gives away, by node index
        self.pinned = 0  # bytes of Inputs since the last look at who holds them
        self.stream = 0
        self.first = 0  # under grad: the number of the first op, see `follows`
        self.late: int | None = None  # that, where nodes made now would come too late

    def emptied(self) -> Chain:
        """Itself without its contents, to be used again: 0.2 us less than a new one."""
        self.inputs, self.consts = [], []  # autograd may keep those of the last flush
        self.slots.clear()
        self.marks.clear()
        self.bumps = self.into = self.values = None
        self.pinned = 0
        return self


class Recorder:
    """What one thread records on one device."""

    __slots__ = ("__weakref__", "acquire", "chain", "closed", "device", "ended", "enter", "exit",
                 "grad", "guarded", "hide", "home", "ident", "inference", "last_wait", "launches",
                 "lock", "off", "reading", "release", "resting", "roots", "running", "runners",
                 "show", "size", "spare", "stream", "thread", "waits")  # fmt: skip

    def __init__(self, device: torch.device, ident: int, off: bool) -> None:
        self.device, self.off = device, off
        self.thread = ident  # whose it is; -1 once that has ended
        self.ident = ident  # the same, or 0 while a flush has taken the chain
        self.relock()
        self.ended = False  # its thread has gone
        self.guarded = False  # `native` runs an eager op, with torch functions off
        modes = NoTorchFunction()
        self.enter, self.exit = modes.__enter__, modes.__exit__
        modes = NoModes()
        self.hide, self.show = modes.__enter__, modes.__exit__
        self.stream = stream_reader(device)
        enter_context(device)
        self.closed = Node(self, None, None)  # nothing is ever recorded after it
        self.grad = self.inference = False
        self.resting = False  # records nothing until there is news of kernels, see `_rest`
        self.launches = 0  # flushes that ran a kernel, or waited for it
        self.waits = self.last_wait = 0  # flushes in a row that waited; `launches` at the last
        self.roots: dict[object, Node] = {}  # by what decides results besides the operands
        self.size = 0  # nodes in the trie
        self.runners: list[Runner] = []
        self.reading = False  # an op that is being recorded looks at tensors that it is to read
        self.running: Chain | None = None  # taken by a flush that is not done; `ident` is 0 then
        self.chain = Chain(self.closed)
        self.open()

    def relock(self) -> None:
        """Have a lock that nobody holds."""
        self.lock = threading.RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def open(self) -> bool:
        """Start an empty chain where the modes of this moment say: the trie is theirs alone.

        False, with the chain left open, where something is pending.
        """
        grad, inference = self.grad, self.inference
        if self.thread == get_ident():  # another thread's modes are not those of its recorder
            grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        modes = (grad, inference, torch.get_default_dtype(), config.recompute,
                 config.always_fuse, config.relaxed, self.resting)  # fmt: skip
        root = self.roots.get(modes)
        if root is None:
            root = self.roots[modes] = Node(self, None, None, grad and not inference)
            root.reason = "waiting for kernels" if self.resting else ""
        # under anomaly mode every op has to have its own autograd node
        closed = self.off or not config.enabled or torch.is_anomaly_enabled()
        home = self.closed if closed else root
        chain = Chain(home)
        if not self.chain:
            # no Python runs from here...
            self.grad = grad
            self.inference = inference
            self.home = home
            self.spare: Chain | None = None
            self.chain = chain
            # ...to here
            return True
        return False

    def reopen(self, reason: str) -> None:
        """Flush, and start an empty chain under the modes of this moment."""
        flush(self, reason)
        while not self.open():  # something was recorded in the middle
            flush(self, reason)

    def end(self) -> None:
        """The thread has gone: only values that somebody holds stay pending.

        They keep their recorder; whoever needs one first flushes it, as any other thread's.
        """
        self.ended = True
        self.thread = -1  # its number is used again; a value of it is another thread's now
        if self.acquire(blocking=False):  # else somebody flushes it; a fork may have lost who
            try:
                if self.chain and max(_counts(self.chain)) <= DEAD:
                    flush(self, "end of a thread")
                self.leave()
            finally:
                self.release()

    def leave(self) -> None:
        """Once nothing is pending any more, be nothing that holds something.

        Undone by hand, for a cycle would wait for the garbage collector.
        """
        if not self.ident:  # in the middle of a flush, which does this at its end
            return
        self.ident = -1
        if self.chain:
            return
        counts.forgotten.update(totals(self))
        self.runners.clear()
        nodes = list(self.roots.values())
        self.roots.clear()
        for node in nodes:
            nodes += node.next.values()
            if node.returns is not None:
                nodes.append(node.returns[2])
            node.next.clear()
            node.runners.clear()
            node.recent = node.returns = node.shell = None
        self.spare = None
        self.home = self.closed = self.chain.tip = _NOWHERE


_NOWHERE = Node(None, None, None)  # type: ignore[arg-type] - where recorders end


class _Recorders:
    """All recorders that there are: their threads hold them, and values that are pending."""

    def __init__(self) -> None:
        self.refs: list[ref[Recorder]] = []

    def add(self, recorder: Recorder) -> None:
        self.refs.append(ref(recorder, self.refs.remove))

    def __iter__(self) -> Iterator[Recorder]:
        for known in self.refs[:]:  # other threads add and remove
            recorder = known()
            if recorder is not None:
                yield recorder


class _Owned(dict):  # type: ignore[type-arg]
    """A thread's recorders by device; goes when the thread goes."""

    def __del__(self) -> None:
        for recorder in self.values():
            recorder.end()


class _Local(threading.local):
    """This thread's recorders, and how many reasons it has to record nothing."""

    current: Recorder | None = None  # the one used last
    closed = 0
    depth = 0  # fused calls on the stack

    def __init__(self) -> None:
        self.recorders: dict[torch.device, Recorder] = _Owned()


_local = _Local()
_all_recorders = _Recorders()
writing: dict[int, bool] = {}  # threads that look for readers of what they are about to write


def is_alone() -> bool:
    """Whether no other thread has recorded anything."""
    return len(_all_recorders.refs) == len(_local.recorders)


def announced(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let `write` flush those that read some memory, and write to it: nobody records meanwhile."""
    ident = get_ident()
    if ident in writing:
        return write(*args, **kwargs)
    try:
        writing[ident] = True
        return write(*args, **kwargs)
    finally:
        writing.pop(ident, None)


class Counts:
    """Counters that are not kept per runner."""

    def __init__(self) -> None:
        self.flushes: dict[str, int] = {}  # a Counter counts in twice the time
        self.eager: Counter[tuple[str, str]] = Counter()
        self.replays = 0
        self.forgotten: Counter[str] = Counter()  # totals of runners that are gone


counts = Counts()
ASIDE = "a fused call that has launched no kernel lately"  # and records nothing for now


class Watch(Protocol):
    """Looks at one flush: what an observer returns."""

    def failed(self, error: Exception) -> None: ...

    def ended(self, runner: Runner | None) -> None: ...  # None: the flush raised


# set by `observe` while somebody looks; called before a flush runs, with its reference counts
observer: Callable[[Recorder, Chain, Node, tuple[int, ...], str], Watch] | None = None


def recorder_for(device: torch.device) -> Recorder:
    """This thread's recorder for `device`."""
    recorder = _local.recorders.get(device)
    if recorder is None:
        device = _shell.same_device(device)
        recorder = Recorder(device, get_ident(), _local.closed > 0)
        _all_recorders.add(recorder)
        recorder = _local.recorders.setdefault(device, recorder)  # made in the middle, it may be
    return recorder


# --- hot path: per recorded op, budget 0.5 us ------------------------------------------------


def record(op: Op, operands: Sequence[Any]) -> Tensor | None:
    """Record `op` over tensors and Python scalars; None if it has to run as eager PyTorch."""
    recorder = _local.current
    if recorder is None:
        return _record_elsewhere(op, operands)
    chain = recorder.chain  # before `ident`: during a flush the new chain may not be used
    tip = chain.tip
    if not recorder.ident:
        return _record_elsewhere(op, operands)
    if recorder.grad is not torch.is_grad_enabled():
        regrade()
        return record(op, operands)
    slots = chain.slots
    edge: list[Any] = [op]
    fresh: list[Any] = []
    consts: list[Any] = []
    on_host = False
    for x in operands:
        cls = x.__class__
        if cls is Tensor:
            state = x._af
            if state.recorder is recorder:
                edge.append(state.index)
                continue
        elif cls is float or cls is int or cls is bool:
            if cls is int and not -EXACT <= x <= EXACT:
                if not -_INT64 <= x < _INT64:
                    return None
                cls = Wide
            edge.append(cls)
            consts.append(x)
            continue
        slot = slots.get(id(x))
        if slot is not None:
            edge.append(slot)
            continue
        recorder.reading = True  # before the look at what it is
        state = x._af if cls is Tensor else None
        if state is None or state.__class__ is not Meta or state.device is not recorder.device:
            x, state = _input(x, recorder)
            if state is _SCALAR:
                if op.one_device:
                    return None
                edge.append(x.__class__)
                consts.append(x)
                on_host = True
                continue
            if state is None or state.device is not recorder.device:
                return _record_elsewhere(op, operands)
        again = _position(fresh, x)
        if again is not None:
            edge.append(~(len(tip.inputs) + again))
            continue
        fresh += (x, state)
        edge.append(state)
    if on_host and all(operand.__class__ is type for operand in edge[1:]):
        return _record_elsewhere(op, operands)
    key = tuple(edge)
    node = tip.next.get(key)
    if node is None:
        if recorder.chain is not chain or chain.tip is not tip:
            return record(op, operands)
        node = _miss(recorder, tip, op, key)
        if node is None:  # the chain had to be cut first
            return record(op, operands)
    shell = node.shell
    if shell is None:
        if node.reason:
            counts.eager[op.name, node.reason] += 1
            recorder.reading = False
            return None
        shell = _shell_of(node)
    if on_host and node.meta is not None and not node.meta.shape:
        counts.eager[op.name, "0-d tensors on two devices, which promote each other"] += 1
        recorder.reading = False
        return None
    if consts and node.limits is not None:
        low, high = node.limits
        if not all(low <= value <= high or not math.isfinite(value) for value in consts):
            counts.eager[op.name, "a scalar that does not fit"] += 1
            recorder.reading = False
            return None
    if node.holds_grad and not follows(chain):
        flush(recorder, "order of gradients")
        return record(op, operands)
    if fresh:
        done = record_fresh(recorder, chain, tip, node, shell, fresh[::2], fresh[1::2], consts)
        if not done:
            if done is None:
                counts.eager[op.name, "in the middle of a write"] += 1
                recorder.reading = False
                return None
            return record(op, operands)
        if chain.pinned > node.pinned_limit:
            relieve(recorder, chain)
        return shell
    if recorder.chain is chain and chain.tip is tip and node.shell is shell:
        # no Python runs from here...
        chain.consts += consts
        chain.tip = node
        chain.append(shell)
        # ...to here
        return shell
    return record(op, operands)


def record_fresh(
    recorder: Recorder,
    chain: Chain,
    tip: Node,
    node: Node,
    shell: Tensor,
    xs: Sequence[torch.Tensor],
    metas: Sequence[Meta],
    consts: Sequence[Any],
) -> bool | None:
    """Append `node`, whose new Inputs are `xs`, to `chain` if that is still open and ends at `tip`.

    False, with nothing done, if it does not, if memory was written meanwhile, or if one of `xs` has
    come to require grad since its Meta was read, as a view does when its base is written. None in
    the middle of a write, which has looked for those that read its memory: this one is to run now.
    """
    known = len(tip.inputs)
    stream = chain.stream if known else recorder.stream()
    marks: list[int] = []
    slots = {}
    with NoModes():
        for x, meta in zip(xs, metas):  # noqa: B905 - strict costs 0.1 us
            if recorder.grad and requires_grad_of(x) is not meta.requires_grad:
                x.__dict__["_af"] = UNKNOWN
                return False
            try:
                marks += (raw_version_of(x), address_of(x))
            except RuntimeError:  # an inference tensor has no version
                marks += (-1, address_of(x))
            slots[id(x)] = ~(known + len(slots))
    if writing:
        return None
    if (
        recorder.reading
        and recorder.chain is chain
        and chain.tip is tip
        and node.shell is shell
        and recorder.ident
    ):
        # no Python runs from here...
        chain.stream = stream
        chain.inputs += xs
        chain.marks += marks
        chain.slots |= slots
        chain.consts += consts
        chain.pinned += node.fresh_bytes
        chain.tip = node
        recorder.reading = False
        chain.append(shell)
        # ...to here
        return True
    return False


def _shell_of(node: Node) -> Tensor:
    """The shell of a node that has none, or got one meanwhile."""
    assert node.meta is not None
    shell = make_shell(node.meta, node)
    if node.shell is None:
        node.shell = shell
    return node.shell


def _follows(chain: Chain) -> bool:
    """Number the op that `chain` gets next; False if the chain has to end first.

    Then another node has been made since its last op. That one's gradients come between those of
    the ops before and after, where no node that stands for both could add them.
    """
    first = take() - len(chain)
    if chain.tip.holds_grad:
        return first == chain.first
    chain.first = first
    return True


follows = partial(_follows)  # C calls it, so that Python 3.11 too runs its machine code


def pass_over(first: int) -> None:
    """Let the nodes made since its last op not end the chain that begins with number `first`.

    They add to no gradient that ops of the chain add to.
    """
    recorder = _local.current
    if recorder is not None and recorder.chain.first == first:
        recorder.chain.first = peek() - len(recorder.chain)


# --- end of the hot path ---------------------------------------------------------------------

_SCALAR: Any = object()


def _position(fresh: list[Any], x: torch.Tensor) -> int | None:
    """Where `x` stands among the (tensor, Meta) pairs of `fresh`."""
    for k in range(0, len(fresh), 2):
        if fresh[k] is x:
            return k // 2
    return None


def _record_elsewhere(op: Op, operands: Sequence[Any]) -> Tensor | None:
    """Record with another recorder than the one used last, or None."""
    ident = get_ident()
    chosen: Recorder | None = None
    for x in operands:
        if x.__class__ is Tensor:
            found = x._af.recorder
            if found is not None:
                if found.ident != ident:
                    flush(found, "another thread")
                    if x._af.recorder is not None:  # from a finalizer, in the middle of a flush
                        return None
                elif chosen is None:
                    chosen = found
    if chosen is None:
        chosen = _concrete_recorder(operands)
    if chosen is not None and not chosen.ident and ident not in inside:
        flush(chosen, "interrupt")  # goes on with one that was interrupted
        if chosen.ident:
            return record(op, operands)
    if chosen is None or chosen is _local.current or not chosen.ident:
        if _local.current is not None:
            _local.current.reading = False
        return None
    _local.current = chosen
    return record(op, operands)


def _concrete_recorder(operands: Sequence[Any]) -> Recorder | None:
    """The recorder for operands none of which is pending; a CPU scalar follows the others."""
    chosen = None
    for x in operands:
        if isinstance(x, torch.Tensor):
            state = x._af if x.__class__ is Tensor else None
            meta = state if state.__class__ is Meta else _input(x, None)[1]
            if meta is None:
                return None
            if chosen is None or chosen.ndim == 0 and meta.device != chosen.device:
                chosen = meta
    return None if chosen is None else recorder_for(chosen.device)


def _input(x: Any, recorder: Recorder | None) -> tuple[Any, Meta | None]:
    """(tensor to read, its Meta), (Python number, _SCALAR), or (x, None) where x is unreadable."""
    cls = x.__class__
    meta: Meta | None
    if cls is Tensor:
        state = x._af
        if state.__class__ is Meta:
            meta = state
        elif state.__class__ is Lost:
            raise state.error
        elif state.__class__ is Held:
            x = state.real
            meta = plain_meta(x)
        elif state.recorder is not None:  # pending on another device
            flush(state.recorder, "another device")
            return (x, None) if x._af is state else _input(x, recorder)
        else:
            meta = concrete_meta(x)
    elif cls is torch.Tensor or cls is _Parameter:
        meta = plain_meta(x) if recorder is None else likely_meta(x, recorder.chain.tip)
    else:
        return x, None
    if meta is None or recorder is None or meta.device is recorder.device:
        return x, meta
    if meta.ndim == 0 and meta.device.type == "cpu" and not meta.requires_grad:
        # torch reads such an operand on the host; its dtype only matters within its category
        default = meta.dtype is torch.get_default_dtype() or meta.dtype in (torch.int64, torch.bool)
        return (x.item(), _SCALAR) if default else (x, None)
    return x, None


def _miss(recorder: Recorder, tip: Node, op: Op, key: tuple[Any, ...]) -> Node | None:
    """A new edge at `tip`, where the open chain ends; None after cutting one that is full."""
    if tip is recorder.closed:
        return eager_node(recorder, tip, op, "recording is off")
    path = tip.path()
    new_inputs = sum(isinstance(operand, Meta) for operand in key[1:])
    full = len(path) >= config.max_nodes or (
        len(tip.inputs) + new_inputs > config.max_inputs and len(path) > 0
    )
    looped = len(path) >= config.loop_nodes and path[0].op is op
    if full or looped:
        flush(recorder, "limit")
        return None
    if recorder.size >= config.max_trie and not path:
        forget(recorder)
        return None
    metas = [node.meta for node in path if node.meta is not None]
    node = extend(recorder, tip, op, key[1:], metas)
    if tip.reason and not node.reason:
        eager = eager_node(recorder, tip, op, tip.reason)
        eager.meta = node.meta
        node = eager
    has_int = int in key or Wide in key
    dtypes_checked = op.result == "bool" and has_int and node.common not in ("f32", "f64")
    if dtypes_checked and node.common not in ("i64", "f16", "bf16"):
        node = eager_node(recorder, tip, op, "an integer that may not fit the dtype")
    node.key = key
    recorder.size += 1
    return tip.next.setdefault(key, node)  # another may stand in a chain by now


def relieve(recorder: Recorder, chain: Chain) -> None:
    """Flush if Inputs that only this chain keeps alive have come to much memory."""
    alive = _counts(chain.inputs)
    metas = chain.tip.inputs
    dead = [meta.nbytes for meta, held in zip(metas, alive, strict=False) if held <= ALONE]
    chain.pinned = sum(dead)
    if chain.pinned > chain.tip.pinned_limit:
        flush(recorder, "memory")


def record_inplace(op: Op, target: Tensor, operands: Sequence[Any]) -> bool:
    """Record an in-place op on a pending `target`: a new node, which the handle then names.

    False if that is not possible; nothing has then changed.
    """
    node = target._af
    recorder = node.recorder
    if recorder is None or recorder.ident != get_ident() or recorder.chain.tip.holds_grad:
        return False  # under grad the value before the write may be saved for backward
    result = record(op, operands)
    meta, new = node.meta, _node_of(result)
    if new is None or new.meta.shape != meta.shape:  # type: ignore[union-attr]
        return False
    if new.meta.dtype is not meta.dtype:  # type: ignore[union-attr]
        if not torch.can_cast(new.meta.dtype, meta.dtype):  # type: ignore[union-attr]
            return False
        result = record(CASTS[meta.dtype], (result,))
        new = _node_of(result)
    if result is None or new is None or new.recorder is not recorder or new.meta is not meta:
        return False
    chain = recorder.chain
    bumps = chain.bumps or {}
    first, last, seen = node.index, new.index, bumps.get(node.index, 0) + 1
    mine, its = target.__dict__, result.__dict__
    if recorder.chain is chain and chain.tip is new and target._af is node and result._af is new:
        # no Python runs from here...
        chain[first] = result
        chain[last] = target
        node.shell = result
        new.shell = target
        mine["_af"] = new
        its["_af"] = node
        bumps[first] = 0
        bumps[last] = seen
        chain.bumps = bumps
        # ...to here
        return True
    return False


def _node_of(result: Tensor | None) -> Node | None:
    """The node of what was just recorded; None if it was not, or is computed by now."""
    node = None if result is None else result._af
    return node if node.__class__ is Node else None


def record_write(op: Op, target: torch.Tensor, operands: Sequence[Any], cast: bool = True) -> bool:
    """Write an in-place op on the memory of `target` with the kernel of what it reads.

    target: a concrete tensor, wrapped, plain or a Parameter. cast: whether eager converts a result
    of another dtype to that of `target`. False if nothing pending is among the operands or the
    memory is also read another way; nothing has then been written.
    """
    for x in operands:
        if x.__class__ is Tensor and x._af.recorder is not None:
            break
    else:
        return False
    if target.__class__ is Tensor:
        meta = target._af
        if meta.__class__ is not Meta or torch.is_grad_enabled():  # it may require grad by an alias
            meta = concrete_meta(target)  # type: ignore[arg-type]
    else:
        current = _local.current
        meta = plain_meta(target) if current is None else likely_meta(target, current.chain.tip)
    if meta is None or meta.inference or torch.is_inference_mode_enabled():
        return False
    made = meta  # what the op has to make of it
    if meta.requires_grad:  # a leaf, of whose use under no_grad autograd knows nothing
        if torch.is_grad_enabled():
            return False
        made = meta.ungraded = make_meta(meta.dtype, meta.shape, meta.stride, meta.device)
    for recorder in _local.recorders.values():
        if recorder.chain.tip.holds_grad:
            return False
    result = record(op, operands)
    node = _node_of(result)
    if cast and node is not None and node.meta is not made and meta.flat:
        assert node.meta is not None
        if node.meta.shape == meta.shape and torch.can_cast(node.meta.dtype, meta.dtype):
            result = record(CASTS[meta.dtype], (result,))
            node = _node_of(result)
    if result is None or node is None or node.meta is not made:
        return False
    recorder = node.recorder
    chain = recorder.chain
    if chain.tip is not node or result._af is not node or _reads_apart(chain, target, meta):
        return False
    # one thread reads and writes an element; another shape would be another kernel
    shape = meta.shape
    if id(target) in chain.slots and any(step.meta.shape != shape for step in node.path()):  # type: ignore[union-attr]
        return False
    if is_alone():
        return flush(recorder, "write", target, node, id(chain))
    return announced(_write_among_others, recorder, target, node, id(chain))


def _write_among_others(recorder: Recorder, target: torch.Tensor, node: Node, held: int) -> bool:
    flush_readers(target, "write", others=True)
    return flush(recorder, "write", target, node, held)


def _reads_apart(chain: Chain, target: torch.Tensor, meta: Meta) -> bool:
    """Whether `chain` reads memory of `target` by another tensor."""
    with NoTorchFunction():
        start = address_of(target)
        for k, x in enumerate(chain.inputs):
            other = chain.tip.inputs[k]
            if x is target:
                continue
            if meta.flat and other.flat:  # 0.1 us; a storage takes 1 us
                begins = chain.marks[2 * k + 1]
                if begins < start + meta.nbytes and start < begins + other.nbytes:
                    return True
            elif _overlap(_extent(x), _extent(target)):
                return True
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the storage of `tensor`: the first and the one past the last."""
    storage = _storage_of(tensor)
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def pending_version(tensor: Tensor) -> int:
    """The version counter that eager would show for `tensor`."""
    state = tensor._af
    if state.recorder is not None:
        chain = state.recorder.running or state.recorder.chain
        return (chain.bumps or {}).get(state.index, 0)
    with NoTorchFunction():
        return torch.Tensor._version.__get__(tensor)  # type: ignore[attr-defined]


# --- flushing ------------------------------------------------------------------------------------


def flush(
    recorder: Recorder,
    reason: str,
    into: torch.Tensor | None = None,
    node: Node | None = None,
    held: int = 0,
) -> bool:
    """Run what `recorder` has pending: live values get memory, dead ones are forgotten.

    into: memory that takes the last value, that of `node` in the chain whose id is `held`, for the
    caller holds it; nothing happens if that is no longer the last, or another chain has come to end
    like it. Returns whether this call has done it. In the middle of the flush that does it, and
    where this thread would have to wait for it from inside another one, values stay pending;
    `beside` knows them.
    """
    while recorder.chain or not recorder.ident or recorder.reading:
        if recorder.spare is None:
            recorder.spare = Chain(recorder.home)
        nested = get_ident() in inside
        if nested and recorder.running is not None:
            if _foresee(recorder, recorder.running):
                return False
            continue
        owned, taken = is_owned(recorder.lock), False
        acquire, leave = recorder.acquire, int if owned else recorder.release
        try:
            # another thread's flush is waited for; not for ever, for this one may hold a lock that
            # nobody knows of, such as llvmlite's, in the middle of which a handler runs
            taken = owned or acquire(False)
            if not taken and not nested:
                taken = acquire(timeout=patience(_WAIT_SECONDS))
            if taken:
                done = _flush(recorder, reason, into, node, held, nested)
                if done is not None:
                    return done
        finally:
            try:
                leave()  # at once: an interrupt may have come before `taken` was told
            except RuntimeError as error:
                if is_foreign(error):
                    raise  # otherwise the lock was not taken
        if not taken and recorder.running is not None and _foresee(recorder, recorder.running):
            return False
    return False


_WAIT_SECONDS = 2.0


def _flush(
    recorder: Recorder,
    reason: str,
    into: torch.Tensor | None,
    node: Node | None,
    held: int,
    nested: bool,
) -> bool | None:
    """`flush` with the lock held; None to try again. nested: the thread was inside already."""
    ident, open_ = get_ident(), recorder.chain
    same = node is None or id(open_) == held
    # no Python runs from here...
    spare, recorder.spare = recorder.spare, None
    chain = interrupted = recorder.running
    same = same and (node is None or recorder.chain is open_ and open_.tip is node)
    if chain is None and spare is not None and same:
        chain, recorder.chain = recorder.chain, spare
        recorder.running = chain
        recorder.ident = 0  # a recording thread goes the slow path
        recorder.reading = False
        chain.into = into
        spare.tip = recorder.home
    grad, inference, home = recorder.grad, recorder.inference, recorder.home
    # ...to here
    if chain is not None:
        spare = open_ = None  # a traceback would hold them
        try:
            inside[ident] = True
            if chain:
                _run(recorder, chain, reason)
            # no Python runs from here...
            recorder.running = None
            recorder.ident = recorder.thread
            if not nested:
                inside.pop(ident, None)  # a fork in the middle has left none
            # ...to its end
        except BaseException:
            try:
                # no Python runs from here...
                if recorder.running is chain and chain.values is None:
                    recorder.running = None
                    chain.into = None  # the write of an op that raised is not tried again
                    if chain:  # its values are not lost
                        recorder.chain = chain
                        recorder.home = home  # somebody may have opened another, under other modes
                        recorder.grad = grad
                        recorder.inference = inference
                if recorder.running is None:  # or else the next flush goes on with it
                    recorder.ident = recorder.thread
                # ...to here
            finally:
                if not nested:
                    inside.pop(ident, None)
            raise
        chain.clear()
        # no recording is in the middle of it; who writes holds it, and adds nothing to it
        if getrefcount(chain) == _HELD_HERE + (into is not None):
            recorder.spare = chain.emptied()
        if recorder.ended:
            recorder.leave()
        return None if interrupted is not None and node is not None else True
    recorder.spare = spare
    return None if same else False


def _run(recorder: Recorder, chain: Chain, reason: str) -> None:
    """Flush `chain`, which was taken from `recorder`.

    If it raises and the chain is done all the same, `recorder.running` is None.
    """
    node, into, own = chain.tip, chain.into is not None, recorder.thread == get_ident()
    watch = runner = None
    counted = False
    try:
        if chain.values is not None:  # an interrupt came while they were given away
            finish(chain)
            return
        if not own:
            enter_context(recorder.device)
        alive = tuple(map(getrefcount, chain))
        if node.holds_grad:
            here = own and peek() == chain.first + len(alive)
            chain.late = None if here else chain.first
        if observer is not None:  # 0.02 us
            watch = observer(recorder, chain, node, alive, reason)
        runner = node.runners.get((-2, *alive) if into else alive)
        if runner is None:
            runner = _runner_for(recorder, node, alive, into)
        counts.flushes[reason] = counts.flushes.get(reason, 0) + 1
        try:
            if runner.live and own:
                runner.run(chain)
            elif runner.live:
                _without_modes(runner.run, recorder, chain)
            counted = True
            runner.others += 1
            if runner.pieces:  # also if they wait for their kernels
                recorder.launches += 1
        except Exception as error:
            if chain.values is not None or is_foreign(error):
                raise
            if isinstance(error, ColdKernelError) and not compiling.capturing(recorder.device):
                raise
            if watch is not None:
                watch.failed(error)
            counted = True
            if own:
                _recover(chain, node, runner, error)
            else:  # no name for it here, which would be a cycle with the error's traceback
                _without_modes(
                    partial(_recover, node=node, runner=runner, error=error), recorder, chain
                )
        let_go(chain)
    except BaseException as error:
        if watch is not None:
            watch.ended(None)
        if chain.values is None:  # nothing was given away or written: the next flush tries again
            raise
        if runner is not None and not counted:  # others were faster, or C++ holds a shell
            runner.others += 1
            if runner.pieces:
                recorder.launches += 1
        finish(chain)
        recorder.running = None
        if runner is None or is_foreign(error):
            raise
        return  # others were faster and have gone on: what this run met does not matter
    recorder.running = None
    if watch is not None:
        watch.ended(runner)


def let_go(chain: Chain) -> None:
    """Before anybody records again: no other value gets a shell that a weak reference knows."""
    for shell in chain:  # 0.05 us each
        if getweakrefcount(shell) and shell is not None:
            shell._af.shell = None  # the weak reference dies with the shell


def finish(chain: Chain) -> None:
    """Give the values of `chain` away, which are known, whatever interrupts that."""

    def give() -> None:
        assert chain.values is not None
        owners = [node for node in chain.tip.path() if node.index in chain.values]
        settle(chain, owners, again=True)
        let_go(chain)

    whatever_interrupts(give)


def _foresee(recorder: Recorder, chain: Chain) -> bool:
    """Know the values of `chain`, which a flush is at, before that flush does.

    They are made by eager ops, which change nothing, and so also while the flush goes on; what it
    writes to memory is written. False if it was over before they were known; `chain` may be pending
    again.
    """
    while chain.values is WRITING and recorder.running is chain:  # by another thread, in C
        time.sleep(0)
    if chain.values is None and chain:
        nodes, bumps = chain.tip.path(), chain.bumps
        values: list[dict[int, torch.Tensor]] = []

        def compute(chain: Chain) -> None:
            every, late = tuple(range(len(nodes))), chain.first if nodes[-1].holds_grad else None
            values.append(_replayed(chain, nodes, every, bumps, late))

        _without_modes(compute, recorder, chain)
        # it may have been given back, gone on, and been taken again
        if chain.values is None and recorder.running is chain and chain.tip is nodes[-1]:
            # no Python runs from here...
            chain.values = values[0]
            chain.bumps = None
            # ...to here
    if recorder.running is chain and chain and (chain.values is None or chain.values is WRITING):
        return _foresee(recorder, chain)
    if recorder.running is chain and chain.into is not None and chain.values is not None:
        with NoTorchFunction():  # who asks may be about to write there too, and comes after it
            write_out(chain, chain.values[chain.tip.index])
    return recorder.running is chain


def beside(tensor: Tensor) -> torch.Tensor | None:
    """The value of `tensor` where it is beside it, after `flush_tensor`; None where it is its own.

    That is so where C++ holds the shell, and in the middle of the flush that makes the value.
    """
    state = tensor._af
    recorder = state.recorder
    if recorder is None:
        return state.real if state.__class__ is Held else None
    with NoTorchFunction():
        chain = recorder.running
        if chain is None:
            return None
        # no Python runs from here...
        values = chain.values
        same = recorder.running is chain and tensor._af is state
        # ...to here
        if not same:  # that flush is over
            return beside(tensor)
        if values is None or state.index not in values:
            return None
        apart = plain_alias(values[state.index])
        if apart is None:  # exchanged, which the flush is about to say
            tensor.__dict__["_af"] = UNKNOWN
        return apart


def _without_modes(run: Callable[[Chain], None], recorder: Recorder, chain: Chain) -> None:
    """Run another thread's chain: the modes of this one must not reach its results."""
    moded = (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )
    if not moded and torch.is_inference_mode_enabled() is recorder.inference:
        run(chain)
        return

    def alone() -> None:
        enter_context(recorder.device)
        with being_inside(), torch._C._InferenceMode(recorder.inference):
            run(chain)

    in_another_thread(alone)  # until it ends, for the chain is that thread's


def _runner_for(recorder: Recorder, node: Node, alive: tuple[int, ...], into: bool) -> Runner:
    if recorder.size >= config.max_trie:
        forget(recorder)
    live = tuple(index for index, held in enumerate(alive) if held > DEAD)
    mask = (-3 if into else -1, *live)  # no reference count is negative: one dict serves all
    known: Runner | None = node.runners.get(mask)
    runner = known
    if known is None or known.waiting:
        try:
            runner = _build_runner(recorder, node, live, into) if known is None else known.ready()
        except Exception as error:
            cold = isinstance(error, ColdKernelError)
            if is_foreign(error) or (cold and not compiling.capturing(recorder.device)):
                raise
            args = (recorder.device, node.path(), node.inputs, live, (), into)
            if cold:
                return FailedRunner(*args, error=error)  # not to be remembered
            runner = FailedRunner(*args, error=KernelError(f"no kernel: {error}"))
        if runner is not known:
            recorder.runners.append(runner)
            node.runners[mask] = runner
            if _ranges:
                _annotated(runner)
        if runner.waiting:
            _rest(recorder)
            return runner  # asked again next time
    assert runner is not None
    if len(node.runners) > 256:  # a value may be held in any number of places
        node.runners = {key: kept for key, kept in node.runners.items() if key[0] in (-1, -3)}
    node.runners[(-2, *alive) if into else alive] = runner
    return runner


_PATIENCE = 8  # flushes in a row that waited for kernels


def _rest(recorder: Recorder) -> None:
    """Where one flush after the other waits for kernels, record nothing until there is news.

    Recording and running the ops later costs up to twice what running them at once does.
    """
    following = recorder.launches == recorder.last_wait + 1
    recorder.waits = recorder.waits + 1 if following else 1
    recorder.last_wait = recorder.launches
    if recorder.waits < _PATIENCE:
        return
    before = compiling.news()
    if compiling.outstanding():
        recorder.resting, recorder.waits = True, 0
        if compiling.news() != before:  # `wake` may have come too early
            recorder.resting = False
        recorder.open()


def wake(*reason: object) -> None:
    """Let every recorder that rests record again."""
    for recorder in _all_recorders:
        if recorder.resting:
            recorder.resting = False
            recorder.reopen("wake")


def launches() -> int:
    """Flushes of this thread that ran a kernel, or waited for it."""
    total = 0
    for recorder in _local.recorders.values():  # 0.2 us less than a sum
        total += recorder.launches
    return total


def rests() -> bool:
    """Whether this thread records nothing for now because its kernels are being compiled."""
    return any(recorder.resting for recorder in _local.recorders.values())


# ops from which a kernel costs less than they do: one op alone takes 10.4 us fused, 6.1 us eager,
# and no kernel has to be compiled for it (H200, bench/overhead.py)
SHORTEST = {"cuda": 2, "cpu": 1}


def _build_runner(recorder: Recorder, node: Node, live: tuple[int, ...], into: bool) -> Runner:
    device, nodes = recorder.device, node.path()
    if len(nodes) < SHORTEST[device.type] and not (nodes[0].long or config.always_fuse):
        alone = ShortRunner(device, nodes, node.inputs, live, (), into)
        alone.until_long = True
        return alone
    graph = None
    computed = live
    if any(nodes[index].meta.requires_grad for index in live):  # type: ignore[union-attr]
        graph = graph_of(recorder, nodes, node.inputs, live)
        if graph is None:
            return EagerRunner(device, nodes, node.inputs, live, (), into)
        if not (config.always_fuse or pays(nodes, graph)):
            return ShortRunner(device, nodes, node.inputs, live, (), into)
        computed = tuple(sorted({*live, *graph.stored}))
    nodes[0].long = True
    pieces = make_pieces(node.program(), computed, device.type)
    written = into and bool(pieces) and node.index in pieces[-1].stores
    args = (device, nodes, node.inputs, live, pieces, written)
    waiting = WaitingRunner(*args, graph=graph, computed=computed)
    waiting.copied = into and not written
    return waiting.ready()


class EagerRunner(Runner):
    """Runs a chain as the ops it was recorded from."""

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        self.check(chain)
        _run_ops(chain, self.nodes, self)


class WaitingRunner(EagerRunner):
    """The same until the kernels of `pieces` are there."""

    waiting = True

    def __init__(self, *args: Any, graph: Graph | None, computed: tuple[int, ...]) -> None:
        super().__init__(*args)
        self.graph = graph  # what a runner with kernels leaves behind
        self.computed = computed  # the live-outs, and what `graph` stores
        self.order = Order([piece.plan for piece in self.pieces], self.device)

    def ready(self) -> Runner:
        """The runner that launches, or this one; asks for the kernels that are missing."""
        if self.order.quiet:
            return self
        kernels = self.order.filled()
        if kernels is None:
            if self.graph is not None:
                self.graph.prepare()
            return self
        make = runner_class(self.device)
        runner = make(self.device, self.nodes, self.inputs, self.computed, self.pieces, self.into,
                      kernels)  # fmt: skip
        runner.copied = self.copied
        if self.graph is not None:
            runner = graded(runner, self.graph, self.live)
        return runner.settling()


class ShortRunner(EagerRunner):
    """The same for a chain that costs less so; it soon is not recorded any more."""

    until_long = False  # once a longer chain begins as it does, a kernel costs less

    @property
    def reason(self) -> str:
        return "a chain of one op" if len(self.nodes) == 1 else "a short chain under grad"

    def run(self, chain: Chain) -> None:
        super().run(chain)
        first = self.nodes[0]
        if first.long and self.until_long:
            self.nodes[-1].runners.clear()
        elif self.runs >= 3 and not first.long:
            make_eager(first, self.reason)


def _recover(chain: Chain, node: Node, runner: Runner, error: Exception) -> None:
    """After a failed run: compute the live-outs without the kernel, or say that they are lost."""
    cold = isinstance(error, ColdKernelError) and not runner.kernels  # in the middle of a capture
    if isinstance(error, StaleInputError) or cold:
        if chain.values is not None:
            raise error
        chain.values = {}  # nobody computes them any more
        for owner in runner.owners:
            _shell._set(chain[owner.index], "_af", Lost(error))
            owner.shell = None
        chain.clear()
        chain.values = None
        raise error
    try:
        _run_ops(chain, node.path(), runner)
    except Exception as failure:  # nothing is lost: the next flush tries again
        raise failure from error
    counts.forgotten["ops_recorded"] += node.index + 1
    counts.forgotten["live_outs_stored"] += len(runner.live)
    if isinstance(error, NotReadyError):
        counts.forgotten["eager_flushes"] += 1
        return
    counts.replays += 1
    warn_once(f"autofuse: a chain runs as eager ops because its kernel failed: {error!r}")


def _run_ops(chain: Chain, nodes: list[Node], runner: Runner) -> None:
    """Do what `runner` does by the eager ops that the chain was recorded from."""
    if runner.ops is None:
        runner.ops = _replay(nodes, runner.live)
    values = _replayed(chain, nodes, runner.live, chain.bumps, chain.late, runner.ops)
    if chain.values is None:
        chain.bumps = None
        chain.values = values
    settle(chain, runner.visible)


def _replayed(
    chain: Chain,
    nodes: list[Node],
    live: tuple[int, ...],
    bumps: dict[int, int] | None,
    late: int | None,
    ops: Callable[..., list[torch.Tensor]] | None = None,
) -> dict[int, torch.Tensor]:
    """The values `live` of `chain`, by node index, made by eager ops; `chain` stays as it is."""
    if nodes[-1].graded and _is_excluded(_AUTOGRAD):
        with _show(_AUTOGRAD, False), _show(torch._C.DispatchKey.ADInplaceOrView, False):
            return _replayed(chain, nodes, live, bumps, late, ops)
    was = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(nodes[-1].graded)
        with NoTorchFunction():
            made = (ops or _replay(nodes, live))(chain.inputs, chain.consts, bumps, late)
    finally:
        torch._C._set_grad_enabled(was)
    return dict(zip(live, made, strict=True))


# a `__torch_dispatch__` of another class runs without autograd, and may flush
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_show = torch._C._SetExcludeDispatchKeyGuard
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def _replay(nodes: list[Node], live: tuple[int, ...]) -> Callable[..., list[torch.Tensor]]:
    """A function of what a chain has of these names that runs the ops; dead values go early."""
    space: dict[str, Any] = {"bump": torch.autograd.graph.increment_version}
    lines = []
    needed = needed_by(nodes, live)
    last = {ref: node.index for node in nodes if node.index in needed for ref in node.args}
    for index, node in enumerate(nodes):
        assert node.op is not None
        if index not in needed:
            continue
        space[f"f{index}"] = node.op.eager
        operands = [
            f"consts[{ref - CONST}]" if ref >= CONST else f"v{ref}" if ref >= 0
            else f"inputs[{~ref}]" for ref in node.args
        ]  # fmt: skip
        lines.append(f"v{index} = f{index}({', '.join(operands)})")
        if node.meta is not None and node.meta.requires_grad:
            lines.append(f"if late is not None: {numbered(index)}")
        if index in live:  # before another op saves it
            lines.append(f"for _ in range(bumps and bumps.get({index}, 0) or 0): bump(v{index})")
        values = {ref for ref in node.args if 0 <= ref < CONST}
        done = [f"v{ref}" for ref in values if last[ref] == index and ref not in live]
        if done:
            lines.append(f"del {', '.join(done)}")
    results = ", ".join(f"v{index}" for index in live)
    body = "".join(f"    {line}\n" for line in lines)
    signature = "replay(inputs, consts, bumps, late)"
    exec(compiled(f"def {signature}:\n{body}    return [{results}]\n"), space)
    return space["replay"]


# --- profilers -----------------------------------------------------------------------------------

_ranges: list[Callable[[str], contextlib.AbstractContextManager[Any]]] = []  # for profilers


def annotate(make: Callable[[str], contextlib.AbstractContextManager[Any]], on: bool) -> None:
    """Make every run of a chain a range, which `make` gives for a name, or stop that.

    The runners change, so that a flush need not ask.
    """
    if on is (make in _ranges):
        return
    _ranges.append(make) if on else _ranges.remove(make)
    for recorder in _all_recorders:
        with recorder.lock:
            for runner in recorder.runners:
                if runner.recorded:  # autograd's have no flush
                    _annotated(runner)


def _annotated(runner: Runner) -> None:
    """Let `runner` run inside ranges that are named after its kernels, or its ops without one."""
    if runner.bare is not None:
        runner.run, runner.bare = runner.bare, None
    if not _ranges:
        return
    names = [piece.plan.name for piece in runner.pieces if runner.kernels]
    ops = [node.op.name for node in runner.nodes if node.op is not None]
    label = f"autofuse: {', '.join(names)}" if names else f"autofuse, eager: {', '.join(ops)}"
    run, makers = runner.run, list(_ranges)
    runner.bare = run

    def ranged(chain: Chain) -> None:
        with contextlib.ExitStack() as stack:
            for make in makers:
                stack.enter_context(make(label))
            run(chain)

    runner.run = ranged


def flush_tensor(tensor: Tensor, reason: str) -> None:
    """Make `tensor` concrete."""
    state = tensor._af
    if state.recorder is not None:
        flush(state.recorder, reason)
    elif state.__class__ is Held:
        if torch.Tensor._use_count(tensor) == 1:  # type: ignore[attr-defined]
            become(tensor, state.real, UNKNOWN, None)  # type: ignore[arg-type]
    elif state.__class__ is Lost:
        raise state.error


def _leave_pending(tensor: Tensor) -> torch.Tensor:
    """Make `tensor` concrete; returns what has its value."""
    flush_tensor(tensor, "attribute")
    apart = beside(tensor)
    return tensor if apart is None else apart


def flush_thread(reason: str) -> None:
    """Flush everything this thread has pending."""
    for recorder in list(_local.recorders.values()):
        if recorder.chain or recorder.reading or recorder.running is not None:
            flush(recorder, reason)


def regrade() -> None:
    """After a change of grad mode: what was recorded before keeps the mode it was recorded in."""
    for recorder in list(_local.recorders.values()):
        if recorder.grad is not torch.is_grad_enabled():
            recorder.reopen("grad mode")


def flush_all(reason: str) -> None:
    """Flush everything that any thread has pending."""
    for recorder in _all_recorders:
        if recorder.chain or recorder.reading or not recorder.ident:
            flush(recorder, reason)


def flush_readers(tensor: torch.Tensor, reason: str, others: bool = False) -> None:
    """Flush the chains that read the memory of `tensor`, which is about to change.

    others: those of other threads alone. Chains of threads that have gone go with them, so that
    nobody has to look at them again.
    """
    ident = get_ident() if others else None
    for known in _all_recorders.refs[:]:  # 0.3 us less than an iterator of recorders
        recorder = known()
        if recorder is None:
            continue
        chain = recorder.running or recorder.chain
        if (chain or recorder.reading) and recorder.ident != ident:
            with NoTorchFunction():
                try:
                    extent = _extent(tensor)
                    reads = recorder.reading or any(
                        _overlap(_extent(x), extent) for x in list(chain.inputs)
                    )
                except (RuntimeError, NotImplementedError):  # no storage: sparse, functorch
                    reads = True
            if reads:
                flush(recorder, reason)
            elif recorder.ended:
                with contextlib.suppress(StaleInputError):  # told to who reads the value
                    flush(recorder, "end of a thread")


def close_thread(reason: str) -> None:
    """Record nothing in this thread until the matching `reopen_thread`."""
    _local.closed += 1
    try:
        reopen(reason)
    except BaseException:  # nothing has changed, for the recorders before it neither
        _local.closed -= 1
        for recorder in _local.recorders.values():
            if recorder.off is not (_local.closed > 0) and not recorder.chain:
                recorder.off = _local.closed > 0
                recorder.open()
        raise


def reopen_thread() -> None:
    """Undo one `close_thread`."""
    _local.closed -= 1
    reopen("reopen")


class closed(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Record nothing in this thread inside; a context manager and a decorator."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __enter__(self) -> None:
        close_thread(self.reason)

    def __exit__(self, *exc: object) -> None:
        reopen_thread()


def reopen(reason: str) -> None:
    """Flush this thread's chains and start new ones under the modes of this moment."""
    for recorder in list(_local.recorders.values()):
        flush(recorder, reason)
        recorder.off = _local.closed > 0
        recorder.reopen(reason)


def reopen_all(reason: str) -> None:
    """The same for every thread, where a mode of the process has changed."""
    for recorder in _all_recorders:
        recorder.reopen(reason)


def totals(recorder: Recorder) -> Counter[str]:
    """What the runners of `recorder` have done so far."""
    total: Counter[str] = Counter()
    for runner in recorder.runners:
        runs = runner.runs
        total["bytes_saved_for_backward"] += runs * runner.saved_bytes
        total["kernels_launched"] += runs * len(runner.kernels)
        total["cache_hits"] += max(0, runs - 1) * bool(runner.kernels)
        total["eager_flushes"] += runs * runner.waiting
        if not runner.recorded:
            continue
        total["ops_recorded"] += runs * len(runner.nodes)
        if not isinstance(runner, EagerRunner):
            total["nodes_elided"] += runs * runner.elided
            total["bytes_elided"] += runs * runner.elided_bytes
        total["live_outs_stored"] += runs * len(runner.live)
    return total


def forget(recorder: Recorder) -> None:
    """Drop the trie of `recorder`, whose chain is empty; kernels stay."""
    counts.forgotten.update(totals(recorder))
    recorder.runners.clear()
    recorder.roots.clear()
    recorder.size = 0
    recorder.reopen("limit")


def forget_kernels() -> None:
    """Let every recorder drop its trie, and with it kernels, where it next sees something new."""
    for recorder in _all_recorders:
        recorder.size = config.max_trie


def forget_threads() -> None:
    """After a fork: what other threads had pending does not exist here."""
    for threads in (inside, writing):
        for ident in set(threads) - {get_ident()}:
            del threads[ident]
    for recorder in _all_recorders:
        if not is_owned(recorder.lock):
            recorder.relock()  # another thread may have held it
        if recorder is not _local.recorders.get(recorder.device):
            recorder.end()


watch(wake)
watch(reopen_all)
compiling.on_news(wake)
compiling.on_evict(forget_kernels)
_shell._leave_pending = _leave_pending

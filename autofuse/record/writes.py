"""Writes: in-place ops on pending values, and on memory, by the kernel of what they read.

A write flushes those that read its memory first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from ..chain.liveness import DEAD, counts_of
from ..chain.meta import Meta, concrete_meta, likely_meta, make_meta, plain_meta
from ..chain.shell import Tensor
from ..chain.state import (
    LATER,
    Chain,
    Node,
    Recorder,
    all_recorders,
    announced,
    is_alone,
    this_thread,
)
from ..errors import StaleInputError
from ..ops.arithmetic import CASTS
from ..ops.autocast import is_cast
from ..ops.row import Op
from ..torch_private import NoModes, NoTorchFunction, address_of, looked_on, raw_version_of
from .flush import flush
from .record import record

_storage_of = torch.Tensor.untyped_storage


def record_inplace(op: Op, target: Tensor, operands: Sequence[Any]) -> bool:
    """Record an in-place op on a pending `target`: a new node, which the handle then names.

    False if that is not possible; nothing has then changed.
    """
    node = target._af
    recorder = node.recorder
    if recorder is None or recorder.ident != get_ident() or recorder.chain.tip.holds_grad:
        return False  # under grad the value before the write may be saved for backward
    if _is_cast(op, recorder) or _is_seen_apart(recorder.chain, node):
        return False
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
    # in place a comparison, whose result has no gradient, makes its target require one
    if new.grad_mode and any(x.requires_grad for x in new.inputs):
        return False
    chain = recorder.chain
    bumps = chain.bumps or {}
    first, last, seen = node.index, new.index, bumps.get(node.index, 0) + 1
    mine, its = target.__dict__, result.__dict__
    if _is_seen_apart(chain, node):  # by now
        return False
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


def _is_seen_apart(chain: Chain, node: Node) -> bool:
    """Whether somebody holds another value of `chain` in the memory of `node`, and sees a write."""
    if not chain.tip.viewed:
        return False
    if node.base >= 0:
        return True
    held = counts_of(chain)
    return any(view.base == node.index and held[view.index] > DEAD for view in chain.tip.path())


def _is_cast(op: Op, recorder: Recorder | None) -> bool:
    """Whether autocast may cast for `op`, which it does not for its in-place form."""
    if recorder is None or not torch.is_autocast_enabled(recorder.device.type):
        return False
    return is_cast(op.name, recorder.device.type)


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
            if _is_cast(op, x._af.recorder):
                return False
            break
    else:
        return False
    if target.__class__ is Tensor:
        meta = target._af
        if meta.__class__ is not Meta or torch.is_grad_enabled():  # it may require grad by an alias
            meta = concrete_meta(target)  # type: ignore[arg-type]
    else:
        current = this_thread.current
        meta = plain_meta(target) if current is None else likely_meta(target, current.chain.tip)
    if meta is None or meta.inference or torch.is_inference_mode_enabled():
        return False
    made = meta  # what the op has to make of it
    if meta.requires_grad:  # a leaf, of whose use under no_grad autograd knows nothing
        if torch.is_grad_enabled():
            return False
        made = meta.ungraded = make_meta(meta.dtype, meta.shape, meta.stride, meta.device)
    for recorder in list(this_thread.recorders.values()):
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
    # one thread reads and writes an element; another shape would be another kernel, and through a
    # view another element may be read
    shape = meta.shape
    if id(target) in chain.slots and (
        node.viewed or any(step.meta.shape != shape for step in node.path())  # type: ignore[union-attr]
    ):
        return False
    return announced(_write_last, recorder, target, node, id(chain))


def _write_last(recorder: Recorder, target: torch.Tensor, node: Node, chain_id: int) -> bool:
    """Write the value of `node`, the last one pending, to the memory of `target`."""
    if not is_alone():
        flush_readers(target, "write", others=True)
    return flush(recorder, "write", target, node, chain_id)


def _reads_apart(chain: Chain, target: torch.Tensor, meta: Meta) -> bool:
    """Whether `chain` reads memory of `target` by another tensor."""
    with NoModes():
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
    return a == b or (a[0] < b[1] and b[0] < a[1])  # what has no bytes is equal


def pending_version(tensor: Tensor) -> int:
    """The version counter that eager would show for `tensor`."""
    state = tensor._af
    if looked_on():
        return raw_version_of(tensor)
    if state.recorder is not None:
        chain = state.recorder.running or state.recorder.chain
        return (chain.bumps or {}).get(state.index if state.base < 0 else state.base, 0)
    with NoTorchFunction():
        return raw_version_of(tensor)


def flush_readers(tensor: torch.Tensor, reason: str, others: bool = False) -> None:
    """Flush the chains that read the memory of `tensor`, which is about to change.

    others: those of other threads alone. Chains of threads that have gone go with them, so that
    nobody has to look at them again.
    """
    ident = get_ident() if others else None
    for known in all_recorders.refs[:]:  # 0.3 us less than an iterator of recorders
        recorder = known()
        if recorder is None:
            continue
        chain = recorder.running or recorder.chain
        if (chain or recorder.reading) and recorder.ident != ident:
            if chain.tip.told is LATER and recorder.thread == get_ident():
                flush(recorder, reason)  # a hook may end a checkpoint's run before the write
                continue
            with NoModes():
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

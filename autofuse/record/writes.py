"""Writes to memory, at once, by the kernel of what they read.

A write flushes those that read its memory first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

from ..chain.claims import announced
from ..chain.meta import Meta, concrete_meta, likely_meta, make_meta, plain_meta, still_lies_as
from ..chain.refusal import Refusal
from ..chain.shell import Held, Lost, Tensor
from ..chain.state import LATER, Chain, Node, Recorder, all_recorders, is_alone, this_thread
from ..errors import StaleInputError
from ..inside import is_foreign
from ..layout import Ints, broadcast, is_injective, meets
from ..ops.arithmetic import CASTS
from ..ops.row import Op
from ..ops.views import WriteOp, write_op
from ..program.program import Ref
from ..torch_private import (
    NoModes,
    NoTorchFunction,
    TensorBase,
    address_of,
    looked_on,
    raw_version_of,
)
from .flush import flush
from .in_place import is_cast_for, node_of
from .record import record

_storage_of = torch.Tensor.untyped_storage


def record_write(
    op: Op, target: torch.Tensor, operands: Sequence[Any], cast: bool = True
) -> bool | Refusal:
    """Write an in-place op on the memory of `target` with the kernel of what it reads.

    target: a concrete tensor, wrapped, plain or a Parameter. cast: whether eager converts a result
    of another dtype to that of `target`. False if nothing pending is among the operands or the
    memory is also read another way, or what `record` says; nothing has then been written.
    """
    for x in operands:
        if x.__class__ is Tensor and x._af.recorder is not None:
            if is_cast_for(op, x._af.recorder):
                return False
            break
    else:
        return False
    metas = _destination(target)
    if metas is None:
        return False
    meta, made = metas
    result = record(op, operands)
    node = node_of(result)
    if node is not None and node.meta is not made:
        assert node.meta is not None
        dtype, write = node.meta.dtype, _write_op(made)
        if write is None or node.meta.shape != meta.shape:
            return False
        if dtype is not meta.dtype and not (cast and torch.can_cast(dtype, meta.dtype)):
            return False
        result = record(write, (result,))
    elif isinstance(result, Refusal):
        return result
    return _write(result, target, meta, made)


def record_copy(target: torch.Tensor, value: Tensor) -> bool:
    """Write `value`, which is pending, to the memory of `target`, by its kernel; as `copy_`.

    target: as in `record_write`. False if that is not possible; nothing has then been written.
    """
    node, metas = value._af, _destination(target)
    if node.__class__ is not Node or node.recorder.ident != get_ident() or metas is None:
        return False
    meta, made = metas
    write = _write_op(made)
    if write is None or broadcast([meta.shape, node.meta.shape]) != meta.shape:
        return False
    if node.meta.device is not meta.device or reads_apart(node.recorder.chain, target, meta):
        return False
    return _write(record(write, (value,)), target, meta, made)


def record_item(x: Any, key: Any, value: Any) -> bool:
    """`x[key] = value` with a pending value, where `key` makes a view, as `record_copy`."""
    if value.__class__ is not Tensor or value._af.__class__ is not Node or not _makes_view(key):
        return False
    if x.__class__ is Tensor and x._af.recorder is not None:
        return False
    with NoModes():
        try:
            view = _item_of(x, key)
        except (RuntimeError, IndexError, ValueError) as error:
            if is_foreign(error):
                raise
            return False  # eager PyTorch will say it
    return record_copy(view, value)


_item_of = TensorBase.__getitem__  # type: ignore[attr-defined]


def _makes_view(key: Any) -> bool:
    return all(map(_is_basic, key)) if key.__class__ is tuple else _is_basic(key)


def _is_basic(index: Any) -> bool:
    """Whether it is an int, a slice of ints, None or Ellipsis."""
    if index.__class__ is slice:
        ends = index.start, index.stop, index.step
        return all([end is None or end.__class__ is int for end in ends])
    return index is None or index is Ellipsis or index.__class__ is int


def _destination(target: torch.Tensor) -> tuple[Meta, Meta] | None:
    """The Meta of memory that a kernel may write to, and that of what is to be computed for it."""
    current = this_thread.current
    place = None if current is None else current.chain.tip
    if target.__class__ is Tensor:
        meta = target._af
        if meta.recorder is not None or isinstance(meta, (Held, Lost)):  # not its own memory
            return None
        # it may require grad by an alias, or lie elsewhere by now
        if meta.__class__ is not Meta or torch.is_grad_enabled() or not still_lies_as(target, meta):
            meta = concrete_meta(target, place)  # type: ignore[arg-type]
    else:
        meta = plain_meta(target) if place is None else likely_meta(target, place)
    if meta is None or meta.inference or torch.is_inference_mode_enabled():
        return None
    if any([recorder.chain.tip.holds_grad for recorder in list(this_thread.recorders.values())]):
        return None
    if not meta.requires_grad:
        return meta, meta
    if torch.is_grad_enabled():
        return None
    # a leaf, of whose use under no_grad autograd knows nothing
    meta.ungraded = make_meta(meta.dtype, meta.shape, meta.stride, meta.device)
    return meta, meta.ungraded


def _write_op(meta: Meta) -> WriteOp | None:
    """What writes to memory like that; None where eager has something to say about it."""
    if meta.write is None and meta.nbytes and is_injective(meta.shape, meta.stride):
        meta.write = write_op(CASTS[meta.dtype], meta.dtype, meta.shape, meta.stride)
    return meta.write


def _write(result: Any, target: torch.Tensor, meta: Meta, made: Meta) -> bool:
    """Write the value of `result`, if that is pending and `made`, where nothing stands against it.

    meta, made: as from `_destination`.
    """
    node = node_of(result)
    if node is None or node.meta is not made:
        return False
    recorder = node.recorder
    chain = recorder.chain
    if chain.tip is not node or result._af is not node or reads_apart(chain, target, meta):
        return False
    return announced(_write_last, recorder, target, node, id(chain))


def _write_last(recorder: Recorder, target: torch.Tensor, node: Node, chain_id: int) -> bool:
    """Write the value of `node`, the last one pending, to the memory of `target`."""
    if not is_alone():
        flush_readers(target, "write", others=True)
    return flush(recorder, "write", target, node, chain_id)


def reads_apart(chain: Chain, target: torch.Tensor, meta: Meta) -> bool:
    """Whether `chain` reads an element of `target` elsewhere than where it writes it.

    One thread reads and writes an element of an Input that is laid out as `target` is. But another
    shape would be another kernel, and through a view of what comes of it another element is read.
    """
    with NoModes():
        start = address_of(target)
    along: set[Ref] = set()
    for k, other in enumerate(chain.tip.inputs):
        distance = chain.marks[2 * k + 1] - start
        if distance >= meta.reach or -distance >= other.reach:
            continue
        if distance == 0 and (other is meta or _layout(other) == _layout(meta)):
            along.add(~k)
        elif _meet(distance, meta, other):
            chain.tip.apart = meta, other, distance  # for who would ask again
            return True
    for node in chain.tip.path() if along else ():
        if not along.isdisjoint(node.args):
            if node.base >= 0 or node.op.move is not None:  # type: ignore[union-attr]
                return True
            reads = any([ref < 0 and ref in along for ref in node.args])
            if reads and node.meta.shape != meta.shape:  # type: ignore[union-attr]
                return True
            along.add(node.index)
    return False


@lru_cache(maxsize=4096)
def _meet(distance: int, meta: Meta, other: Meta) -> bool:
    """Whether tensors have a byte in common that begin `distance` bytes from each other."""
    return meets(distance, *_layout(meta), *_layout(other))


def _layout(meta: Meta) -> tuple[Ints, Ints]:
    """Sizes, and strides in bytes, with an axis for the bytes of an element."""
    size = meta.dtype.itemsize
    return (*meta.shape, size), (*(s * size for s in meta.stride), 1)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the storage of `tensor`: the first and the one past the last."""
    storage = _storage_of(tensor)
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a == b or (a[0] < b[1] and b[0] < a[1])  # what has no bytes is equal


def pending_version(tensor: Tensor) -> int:
    """The version counter that eager would show for `tensor`."""
    if looked_on():
        return raw_version_of(tensor)
    state = tensor._af
    if state.__class__ is Held:
        return pending_version(state.real)
    if state.recorder is not None:
        chain = state.recorder.running or state.recorder.chain
        own = state.index if state.base < 0 else state.base
        position = (chain.placed or {}).get(own)
        before = 0 if position is None else chain.marks[2 * position]
        return before + (chain.bumps or {}).get(own, 0)  # type: ignore[no-any-return]
    with NoTorchFunction():
        version = raw_version_of(tensor)
    return version if tensor._af is state else pending_version(tensor)  # pending by now


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

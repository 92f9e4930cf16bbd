"""In-place ops that are recorded: on pending values, and on memory that its tensor alone holds.

`x.mul_(2)` of a pending `x` is `x * 2`, of which the handle is `x` from then on. Where `x` is sole
(`sole`) the same is done of its memory: what C++ has of `x` stands among the Inputs in a tensor of
its own, `x` is pending, and whatever gives it its value gives it its memory back, where the kernel
has written that. The address stays, and so does all else that can be seen.

Nowhere else does a concrete tensor become pending. Whoever has found one concrete says so until C
has used it (`claims.using`); whoever writes down what is known of one leaves a pending one alone
(`meta.remember`); a kernel overwrites what the chain has of a handle (`Chain.placed`) and of nobody
else (`ways.out_of_place`); and who has met a value in the middle of the flush that makes it shares
memory with the handle afterwards (`settle.put_back`). Threads that record are seen; of those that
do not one may be in the middle of C with a tensor that is lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from threading import get_ident
from typing import Any

import torch

from ..chain.claims import loans, using
from ..chain.liveness import DEAD, counts_of
from ..chain.meta import UNKNOWN, Meta, concrete_meta, still_lies_as
from ..chain.refusal import Refusal
from ..chain.shell import Tensor
from ..chain.state import (
    Chain,
    Node,
    Recorder,
    all_recorders,
    is_alone,
    recorder_for,
    this_thread,
)
from ..inside import is_foreign, others_wait
from ..ops.arithmetic import CASTS
from ..ops.autocast import is_cast
from ..ops.row import Op
from ..ops.views import in_place_op
from ..sole import ONES, REFERENCES, Reach, reach_of
from ..torch_private import NoModes, copy_to, swap
from .record import record


def record_inplace(op: Op, target: Tensor, operands: Sequence[Any]) -> bool | Refusal:
    """Record an in-place op on a pending `target`: a new node, which the handle then names.

    False if that is not possible, or what `record` says; nothing has then changed.
    """
    node = target._af
    recorder = node.recorder
    if recorder is None or recorder.ident != get_ident() or recorder.chain.tip.holds_grad:
        return False  # under grad the value before the write may be saved for backward
    if is_cast_for(op, recorder) or _is_seen_apart(recorder.chain, node):
        return False
    if node.into is not None:
        if operands[0] is not target:
            return False
        op = in_place_op(op)
    result = record(op, operands)
    if isinstance(result, Refusal):
        return result
    meta, new = node.meta, node_of(result)
    if new is not None and new.into is not None and target._af is not node:  # the chain was cut
        own, reach = _of_sole(target)
        done = own is not None and reach is not None
        return done and _exchanged(target, own, reach, result, new)  # type: ignore[arg-type]
    if new is None or new.meta.shape != meta.shape:  # type: ignore[union-attr]
        return False
    if new.meta.dtype is not meta.dtype:  # type: ignore[union-attr]
        if not torch.can_cast(new.meta.dtype, meta.dtype):  # type: ignore[union-attr]
            return False
        result = record(CASTS[meta.dtype], (result,))
        new = node_of(result)
    if not isinstance(result, Tensor) or new is None:
        return False
    if new.recorder is not recorder or new.meta is not meta or new.into != node.into:
        return False
    # in place a comparison, whose result has no gradient, makes its target require one
    if new.grad_mode and any(x.requires_grad for x in new.inputs):
        return False
    chain = recorder.chain
    bumps, placed = chain.bumps or {}, chain.placed or {}
    first, last, seen = node.index, new.index, bumps.get(node.index, 0) + 1
    mine, its = target.__dict__, result.__dict__
    if _is_seen_apart(chain, node) or (node.into is not None and first not in placed):  # by now
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
        if new.into is not None:
            placed[last] = ~new.into
            del placed[first]
        # ...to here
        return True
    return False


def record_sole(op: Op, target: Tensor, operands: Sequence[Any]) -> bool | Refusal:
    """Record an in-place op on a concrete `target` that is sole, and pending from then on.

    False if that is not possible, or what `record` says; nothing has then changed.
    """
    meta, reach = _of_sole(target)
    if meta is None or reach is None or operands[0] is not target:
        return False
    if is_cast_for(op, recorder_for(meta.device)):
        return False
    result = record(in_place_op(op), operands)
    if not isinstance(result, Tensor):
        return result or False
    node = node_of(result)
    if node is None or node.into is None:
        return False
    return _exchanged(target, meta, reach, result, node)


def _exchanged(target: Tensor, meta: Meta, reach: Reach, result: Tensor, node: Node) -> bool:
    """Let `target` be what `node`, just recorded, gives, and `result` have its memory."""
    recorder = node.recorder
    assert node.into is not None
    chain, position = recorder.chain, ~node.into
    bumps, placed = chain.bumps or {}, chain.placed or {}
    mine, its = target.__dict__, result.__dict__
    if [*mine] not in ([], ["_af"]):
        return False  # a shell that is used again has nothing of the user's
    exchange, done, unknown = starmap(swap, [(target, result)]), list[None](), dict[int, int]()
    inner, owner, autograd, known = reach
    recorders = [*all_recorders.refs]
    if len(recorders) != len(this_thread.recorders) or recorder.ident != get_ident():
        return False
    try:
        if (
            recorder.chain is chain
            and chain.tip is node
            and result._af is node
            and target._af is meta
            and chain.inputs[position] is target
            and inner[REFERENCES] & ONES == owner[REFERENCES] & ONES == 1
            and inner[autograd] == owner[known] == 0
            and all_recorders.refs == recorders  # whoever uses it in C meanwhile has one
        ):
            # no Python runs from here, but for finalizers up to 3.11 before the exchange is done...
            done += exchange
            if recorder.chain is chain and result._af is node:
                chain[node.index] = target
                chain.inputs[position] = result
                chain.known = unknown
                node.shell = target
                mine["_af"] = node
                its["_af"] = meta
                bumps[node.index] = 1
                placed[node.index] = position
                chain.bumps, chain.placed = bumps, placed
                # ...to here
                return True
    except RuntimeError as error:
        if is_foreign(error):
            raise
        return False  # C++ has a weak reference, and they are not exchanged
    if done:  # a finalizer had the chain flushed: `target` has got the value, the other its memory
        with NoModes():
            copy_to(result, target)
            swap(target, result)
        target.__dict__["_af"] = UNKNOWN
    return bool(done)


def _of_sole(target: Tensor) -> tuple[Meta | None, Reach | None]:
    """What is known of `target`, and who can reach it, if that is nobody else."""
    meta, current = target._af, this_thread.current
    if meta is UNKNOWN:
        meta = concrete_meta(target, None if current is None else current.chain.tip)
    if not isinstance(meta, Meta) or meta.requires_grad or meta.inference:
        return None, None
    if not (meta.nbytes and meta.dense):
        return None, None
    if (
        using
        or not is_alone()
        or torch.is_inference_mode_enabled()
        or not still_lies_as(target, meta)
    ):
        return None, None
    if id(target) in loans and not others_wait():
        return None, None  # they may have it plain, in C, where nobody sees that
    reach = reach_of(target, meta.nbytes, recorder_for(meta.device).frees)
    return meta, reach if reach is not None and reach.is_sole() else None


def _is_seen_apart(chain: Chain, node: Node) -> bool:
    """Whether somebody holds another value of `chain` in the memory of `node`, and sees a write."""
    if not chain.tip.viewed:
        return False
    if node.base >= 0:
        return True
    held = counts_of(chain)
    return any(view.base == node.index and held[view.index] > DEAD for view in chain.tip.path())


def is_cast_for(op: Op, recorder: Recorder | None) -> bool:
    """Whether autocast may cast for `op`, which it does not for its in-place form."""
    if recorder is None or not torch.is_autocast_enabled(recorder.device.type):
        return False
    return is_cast(op.name, recorder.device.type)


def node_of(result: Any) -> Node | None:
    """The node of what was just recorded; None if it was not, or is computed by now."""
    node = result._af if result.__class__ is Tensor else None
    return node if node.__class__ is Node else None

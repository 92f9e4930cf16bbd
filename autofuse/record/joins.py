"""Joins: torch.cat and torch.stack of pending values, which are written where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from ..chain.shell import Tensor
from ..chain.state import AT_ONCE, Node, this_thread
from ..ops.row import OPS
from ..ops.views import JoinOp, join_op
from ..torch_private import looked_on
from .record import record
from .views import meta_of

_MOST = 32  # tensors that one kernel writes side by side
_WAYS = 256  # to join that a recorder knows: each takes a plan


def record_join(name: str, tensors: Any, dim: Any = 0) -> Any:
    """Record torch's function `name` of tensors of which some are pending; None for eager PyTorch.

    Those that are no results of ops, as views and memory are, are copied by the same kernel.
    """
    if dim.__class__ is not int or tensors.__class__ not in (list, tuple):
        return None
    if not 2 <= len(tensors) <= _MOST or this_thread.closed or looked_on():
        return None
    pending = [x for x in tensors if x.__class__ is Tensor and x._af.recorder is not None]
    recorder = pending[0]._af.recorder if pending else None
    if recorder is None or recorder.ident != get_ident():
        return None
    tip = recorder.chain.tip
    if tip.told is AT_ONCE or tip.looked_on or tip.rows is not None:
        return None
    metas = [meta_of(x, tip) for x in tensors]
    first = metas[0]
    for meta in metas:
        if meta is None or first is None or meta.dtype is not first.dtype or not meta.nbytes:
            return None
        if meta.device is not recorder.device:
            return None
    casts = torch.is_autocast_enabled(recorder.device.type)  # now; the tip may be of before
    if casts and first is not None and first.dtype.is_floating_point:
        # which promotes nothing else, and refuses it
        if first.dtype not in (torch.float32, torch.get_autocast_dtype(recorder.device.type)):
            return None
    if torch.is_grad_enabled() and any(meta.requires_grad for meta in metas if meta is not None):
        # gradients of one that is there twice add up in the order of operands, not of ops
        if not recorder.keeps or len({*map(id, tensors)}) < len(tensors):
            return None
    op = _op_of(recorder.joins, name, dim, metas)
    if op is None:
        return None
    parts = []
    for x in tensors:
        node = x._af if x.__class__ is Tensor else None
        if not isinstance(node, Node) or node.base >= 0 or node.op.__class__ is JoinOp:
            x = record(OPS["clone"], (x,))
            if not isinstance(x, Tensor):
                return None
        parts.append(x)
    return record(op, tuple(parts))


def _op_of(
    known: dict[Any, JoinOp | None], name: str, dim: int, metas: Sequence[Any]
) -> JoinOp | None:
    """The op of a join of such tensors; None where only torch knows what comes of it."""
    key = name, dim, *metas
    if key not in known:
        if len(known) >= _WAYS:  # with sizes that vary none would be met again
            return None
        known[key] = join_op(name, dim, metas)
    return known[key]

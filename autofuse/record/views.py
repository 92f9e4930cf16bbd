"""Views of pending values: recorded as index maps, found out once by torch on a stand-in."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import torch

from ..chain.meta import Meta, Unknown, concrete_meta, likely_meta, still_lies_as
from ..chain.shell import Tensor
from ..chain.state import AT_ONCE, Node, this_thread
from ..ops.moves import reshaped
from ..ops.row import Op
from ..ops.views import LIKE, RESHAPING, SPLITS, SQUARE, ViewOp, view_op
from ..settings.config import config
from ..torch_private import InferenceMode, NoModes, looked_on
from .origins import meta_of_concrete
from .record import record

_OURS = (Tensor, torch.Tensor, torch.nn.Parameter)
# an AssertionError by functions of torch in Python
_REFUSED = RuntimeError, IndexError, TypeError, ValueError, AssertionError
_MOST = 16  # views that one call records: more would fill a chain
WAYS = 64  # in which views of one value are recorded: each takes a plan, 0.6 ms, and memory
_ITSELF: tuple[Any, ...] = (None,)  # in place of ops: torch returns the operand


def record_view(name: str, func: Any, handler: Any, args: Any, kwargs: Any) -> Any:
    """Record a view of the pending value args[0], or several; None if eager PyTorch has to run.

    name, func: what torch calls it, and the function; handler: what stands for that.
    """
    x = args[0]
    node = x._af
    recorder = node.recorder
    if recorder is None or recorder.ident != get_ident() or this_thread.closed or looked_on():
        return None
    tip = recorder.chain.tip
    if tip.told is AT_ONCE or tip.looked_on or node.meta is None:
        return None
    if tip.holds_grad and config.recompute == "inputs":  # rules go through no views
        return None
    if tip.rows is not None:  # row kernels read no index maps
        return None
    lists, like = name != "__getitem__", name in LIKE
    if like and (len(args) != 2 or kwargs or args[1].__class__ not in _OURS):
        return None
    given = _frozen(args[1:], lists, like)
    values = _frozen(kwargs.values(), lists, like) if kwargs else ()
    if given is None or values is None:
        return None
    key = func, given, *(kwargs or ()), *values
    ops = node.views.get(key)
    if ops is None:
        if len(node.views) >= WAYS:  # with indices that vary nothing would ever be known
            return None
        options: dict[str, Any] = dict(zip(kwargs or (), map(_thawed, values), strict=True))
        call = partial(_call, LIKE.get(name, func), tuple(map(_thawed, given)), options)
        ops = node.views[key] = _ops_of(name, call, node)
    if ops is _ITSELF:
        return x
    if len(ops) > _MOST:
        return None
    made = []
    for op in ops:
        shell = record(op, (x,))
        if shell.__class__ is not Tensor:  # it has been computed in the middle
            return None
        made.append(shell)
    if not made:
        return None
    if not isinstance(ops[0], ViewOp):  # a copy, which machine code leaves to Python
        return made[0]
    several = ops[0].part is not None
    known = key_of(handler, args[1:], kwargs, tip if like else None)
    if known is not None and len(node.known_views) < 2 * WAYS:
        node.known_views[known] = ops if several else ops[0]
    return tuple(made) if several else made[0]


def key_of(
    handler: Any, given: tuple[Any, ...], named: dict[str, Any], tip: Node | None
) -> tuple[Any, ...] | None:
    """The key by which machine code finds views; None where it leaves them to Python.

    tip: where a tensor is taken for its shape.
    """
    key: list[Any] = [handler]
    if tip is not None:
        meta = meta_of(*given, tip)
        return None if meta is None else (handler, meta)

    def flatten(values: Any, outer: bool) -> bool:
        for x in values:
            cls = x.__class__
            if cls is int or x is None or x is Ellipsis:
                key.append(x)
            elif cls is slice and all(e is None or e.__class__ is int for e in _ends(x)):
                key.extend((slice, *_ends(x)))
            elif (cls is tuple or cls is list or cls is torch.Size) and outer:
                kind = list if cls is list else tuple  # of an index it is not the same
                key.append(kind)
                if not flatten(x, False):
                    return False
                key.append(kind)
            else:
                return False
        return True

    if not flatten(given, True):
        return None
    if named:
        key.append(tuple(named))
    return tuple(key) if flatten(named.values(), True) else None


def meta_of(x: Any, place: Node) -> Meta | None:
    """The Meta of a tensor of ours, pending or not, which has come to `place`; None of others."""
    if x.__class__ is Tensor:
        state = x._af
        if state.__class__ is Meta:
            return state if still_lies_as(x, state) else concrete_meta(x, place)
        if isinstance(state, Unknown):
            return meta_of_concrete(x, state, place)
        return getattr(state, "meta", None)
    return likely_meta(x, place) if x.__class__ in _OURS else None


def _ends(x: slice) -> tuple[Any, Any, Any]:
    return x.start, x.stop, x.step


def _call(func: Any, given: tuple[Any, ...], options: dict[str, Any], x: Any) -> Any:
    return func(x, *given, **options)


def _frozen(values: Any, lists: bool, like: bool) -> tuple[Any, ...] | None:
    """`values` as they are kept and compared; None if one is no number, size or slice.

    lists: whether a list is what a tuple is, as it is not in an index. like: whether a tensor is
    taken for its shape.
    """
    found: list[Any] = []
    for x in values:
        cls = x.__class__
        if cls is int or x is None or x is Ellipsis:
            found.append(x)
        elif cls is slice:
            if not all(end is None or end.__class__ is int for end in _ends(x)):
                return None
            found.append((slice, *_ends(x)))
        elif cls is tuple or cls is torch.Size or (cls is list and lists):
            inner = _frozen(x, False, False)
            if inner is None:
                return None
            found.append(inner)
        elif like and cls in _OURS and not x.is_nested:
            found.append(("shape", *x.shape))
        else:
            return None
    return tuple(found)


def _thawed(value: Any) -> Any:
    if value.__class__ is not tuple or not value:
        return value
    if value[0] is slice:
        return slice(*value[1:])
    if value[0] == "shape":
        return value[1:]
    return tuple(map(_thawed, value))


def _ops_of(name: str, call: partial[Any], node: Node) -> tuple[ViewOp, ...] | tuple[Op]:
    """The ops of the views that `call` gives of the value of `node`, or of the copy in another
    shape; none if that is not all.

    Torch itself says so, and whatever it refuses it will refuse again when it is run.
    """
    own, meta = (node if node.base < 0 else node.path()[node.base]).meta, node.meta
    assert own is not None and meta is not None
    if name in SQUARE and meta.ndim != 2:  # or it would warn
        return ()
    with NoModes(), InferenceMode(False):
        base = torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device="meta")
        x = base if node.base < 0 else base.as_strided(meta.shape, meta.stride, node.offset)
        try:
            result = call(x)
        except _REFUSED:
            return ()
        if result is x:
            return _ITSELF
        several = result.__class__ in (tuple, list)
        results = result if several else (result,)
        if not all(one.__class__ is torch.Tensor and one._base is base for one in results):
            copied = name in RESHAPING and result.is_contiguous() and result.numel()
            op = reshaped(tuple(meta.shape), tuple(result.shape)) if copied else None
            return () if op is None else (op,)
        dim = None
        if name in SPLITS:
            _, given, options = call.args
            dim = options.get("dim", (*given, *(0, 0))[SPLITS[name]])
        return tuple(
            view_op(name, call, k if several else None, len(results) if several else 0, one, dim)
            for k, one in enumerate(results)
        )

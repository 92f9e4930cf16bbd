"""Metadata: answered by the shell itself, nothing runs; and what reads nothing else of a tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.shell import Held, Tensor
from ..chain.state import Node, this_thread
from ..record.writes import pending_version
from ..torch_private import InferenceMode, dispatch_modes, functions_off, looked_on
from .eager import Handler, Plain, run_eager
from .handlers import altering, deleting, handle, unhandled
from .protocol import HANDLERS, HOT, OPTIONS
from .unrecorded import known_of

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested is_mkldnn is_xpu is_mps is_sparse_csr itemsize nbytes names output_nr"
).split()
_METHODS = (
    "size stride dim numel nelement ndimension storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference get_device dim_order "
    "is_same_size __len__"
).split()


# what makes a tensor as another is; and for its dtype and device
_LIKE = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_zeros new_ones new_full"
).split()


def _value(x: Any) -> Any:
    """What says what `x` is: a computed shell that C++ held does not, once its value is changed."""
    if x.__class__ is Tensor and x._af.__class__ is Held:
        return x._af.real
    return x


def _reading(base: Handler) -> Handler:
    """A handler that asks the tensor itself, pending or not."""

    def read(*args: Any, **kwargs: Any) -> Any:
        if looked_on():
            return run_eager(base, args, kwargs)
        args = tuple(map(_value, args))
        kwargs = {name: _value(x) for name, x in kwargs.items()}
        with functions_off():
            return base(*args, **kwargs)

    HOT.append(("asking", read, (base,)))
    return read


def _making(func: Handler) -> Handler:
    """A handler for what makes a tensor and reads no values: of a pending one nothing runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or this_thread.closed or looked_on() or dispatch_modes():
            return run_eager(func, args, kwargs)
        x = args[0]
        state = x._af if x.__class__ is Tensor else None
        if isinstance(state, Node) and state.meta is not None:
            if not any([isinstance(y, Plain) for y in (*args[1:], *kwargs.values())]):
                stands = stand_in(state.meta)
                if stands is not None and stands.is_meta:  # it says nothing of the device
                    kwargs = kwargs if kwargs.get("device") else {**kwargs, "device": x.device}
                x = x if stands is None else stands
        return run_eager(func, (x, *args[1:]), kwargs)

    handler, known = wraps(func)(call), known_of(func)
    if known.in_c:
        HOT.append(("making", handler, (func, known)))
    return handler


def stand_in(meta: Meta) -> torch.Tensor | None:
    """A tensor that lies as such a one would, on its device, without memory.

    It has some for a moment. A large one is on torch's `meta` instead, where what is made as it is
    takes 15 us, not 0.8 (on a CPU; "makers" of bench/overhead.py). None if values like this may lie
    in several ways.
    """
    if meta.stand_in is not None or not (meta.flat or 1 not in meta.shape):
        return meta.stand_in
    large = meta.nbytes > _LARGE
    with InferenceMode(False):
        made = torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device="meta" if large else meta.device
        )
        if large:
            return made
        made.untyped_storage().resize_(0)
    meta.stand_in = made
    return made


_LARGE = 1 << 24  # bytes


def install_metadata() -> None:
    for name in _LIKE:
        for place, func in unhandled(name):
            handle(place, name, _making(func))
    for name in _PROPERTIES:
        base = getattr(Plain, name, None)
        if base is None:
            continue
        getter = base.__get__

        def get(self: Any, getter: Handler = getter) -> Any:
            if looked_on():
                return getter(self)
            self = _value(self)
            with functions_off():
                return getter(self)

        read = get
        if name in ("dtype", "device"):
            read = _from_meta(name, get)
        elif name in _OF_GRAPH:
            read = _of_graph(name, getter, get)
        HOT.append(("getting", read, (base, name in _OF_GRAPH)))
        HANDLERS[getter] = read  # type: ignore[index]
        setattr(Tensor, name, property(read, altering(base.__set__), deleting(base)))
    for name in _METHODS:
        base = getattr(Plain, name, None)
        if base is None:
            continue
        handle(Plain, name, _reading(base))
    for place_name in ("is_floating_point", "is_complex", "numel", "is_signed"):
        func = getattr(torch, place_name)
        HANDLERS[func] = OPTIONS[func] = _reading(func)
    Tensor._version = property(pending_version)  # type: ignore[assignment]
    HANDLERS[Plain._version.__get__] = pending_version  # type: ignore[attr-defined]


def _from_meta(name: str, getter: Handler) -> Handler:
    """An attribute as the Meta of a pending value has it: 0.2 us instead of 0.6, for choosers."""
    read = operator.attrgetter(name)

    def get(self: Any) -> Any:
        if looked_on():  # which are told
            return getter(self)
        state = self._af
        return getter(self) if state.recorder is None else read(state.meta)

    return get


# what a pending value says, whose shell would say what a plain constant does: of the getter, the
# state and the shell
_OF_GRAPH: dict[str, Callable[[Handler, Any, Any], Any]] = {
    "requires_grad": lambda get, state, x: state.meta.requires_grad,
    "is_leaf": lambda get, state, x: not state.meta.requires_grad,
    # a view may be one of several results of its node
    "output_nr": lambda get, state, x: run_eager(get, (x,)) if state.base >= 0 else 0,
}


def _of_graph(name: str, getter: Handler, concrete: Handler) -> Handler:
    """An attribute that autograd gives a value, wherever that lies."""
    pending = _OF_GRAPH[name]

    def get(self: Any) -> Any:
        if looked_on():
            return concrete(self)
        state = self._af
        return concrete(self) if state.recorder is None else pending(getter, state, self)

    return get

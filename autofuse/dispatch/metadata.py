"""Metadata: answered by the shell itself, nothing runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..chain.shell import Held, Tensor
from ..record.writes import pending_version
from ..torch_private import functions_off, looked_on
from .eager import Handler, Plain, run_eager
from .handlers import HOT, handle
from .protocol import HANDLERS, OPTIONS

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested is_mkldnn is_xpu is_mps is_sparse_csr itemsize nbytes names output_nr"
).split()
_METHODS = (
    "size stride dim numel nelement ndimension storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference get_device dim_order "
    "is_same_size __len__"
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


def install_metadata() -> None:
    for name in _PROPERTIES:
        base = getattr(Plain, name, None)
        if base is None:
            continue
        getter = base.__get__
        setter = getattr(base, "__set__", None)

        def get(self: Any, getter: Handler = getter) -> Any:
            if looked_on():
                return getter(self)
            self = _value(self)
            with functions_off():
                return getter(self)

        def set_(self: Any, value: Any, setter: Any = setter) -> None:
            run_eager(setter, (self, value))

        read = get
        if name in ("dtype", "device"):
            read = _from_meta(name, get)
        elif name in _OF_GRAPH:
            read = _of_graph(name, getter, get)
        HOT.append(("getting", read, (base, name in _OF_GRAPH)))
        HANDLERS[getter] = read  # type: ignore[index]
        setattr(Tensor, name, property(read, set_ if setter is not None else None))
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

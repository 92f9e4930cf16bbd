"""Metadata: answered by the shell itself, nothing runs."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..chain.meta import Meta
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


def _reading(base: Handler) -> Handler:
    """A handler that asks the tensor itself, pending or not."""

    def read(*args: Any, **kwargs: Any) -> Any:
        if looked_on():
            return run_eager(base, args, kwargs)
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
            with functions_off():
                return getter(self)

        def set_(self: Any, value: Any, setter: Any = setter) -> None:
            run_eager(setter, (self, value))

        read = get
        if name in ("dtype", "device"):
            read = _from_meta(name, get)
        elif name in ("requires_grad", "is_leaf"):
            read = _pending_grad(name == "is_leaf", get)
        elif name == "output_nr":
            read = _output(getter, get)
        HOT.append(("getting", read, (base, name in ("requires_grad", "is_leaf", "output_nr"))))
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
    """An attribute as the Meta has it: 0.2 us instead of 0.6; choosers ask for some."""
    read = operator.attrgetter(name)

    def get(self: Any) -> Any:
        if looked_on():  # which are told
            return getter(self)
        state = self._af
        if state.__class__ is Meta:
            return read(state)
        return getter(self) if state.recorder is None else read(state.meta)

    return get


def _pending_grad(leaf: bool, concrete: Handler) -> Handler:
    """`requires_grad` or `is_leaf`: a shell's own answer would be that of a plain constant."""

    def get(self: Any) -> bool:
        if looked_on():
            return concrete(self)
        state = self._af
        if state.__class__ is Held:
            return concrete(state.real)
        if state.recorder is not None and state.meta.requires_grad:
            return not leaf
        return concrete(self)

    return get


def _output(getter: Handler, concrete: Handler) -> Handler:
    """`output_nr`: which result of its node it is; a pending view may be one of several."""

    def get(self: Any) -> int:
        if looked_on():
            return concrete(self)
        state = self._af
        if state.__class__ is Held:
            return concrete(state.real)
        if state.recorder is not None and state.base >= 0:
            return run_eager(getter, (self,))
        return concrete(self)

    return get

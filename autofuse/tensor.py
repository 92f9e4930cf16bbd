"""Dispatch: what happens when torch or Python uses a wrapped tensor.

Everyday operators and methods are defined on the class and go straight to recording;
`__torch_function__` serves `torch.*`; `__torch_dispatch__` is the net below for what reaches a
pending shell in C++. An op that is not in the table runs on plain tensors, and what it returns
is wrapped again, so that the next chain is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F

from . import chain as _chain
from . import ops
from .chain import counts, flush_tensor, flush_thread, record, record_inplace, version_of
from .ops import OPS, Op
from .shell import UNKNOWN, Held, NoTorchFunction, Tensor

_Plain = torch.Tensor
_set = _Plain.__setattr__
Handler = Callable[..., Any]

HANDLERS: dict[Any, Handler] = {}  # torch function -> what to call instead


# --- ops that autofuse does not record ------------------------------------------------------


def _tensors(value: Any) -> Iterator[Tensor]:
    """Wrapped tensors in an argument, inside the containers that torch functions take."""
    cls = value.__class__
    if cls is Tensor:
        yield value
    elif cls is tuple or cls is list or isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def run_eager(func: Handler, args: Any, kwargs: Any = None) -> Any:
    """Run `func` as eager PyTorch on plain tensors, and wrap what it returns.

    Pending arguments become concrete. For the call every wrapped argument is an ordinary
    `torch.Tensor`, the same object, so that `func` meets nothing it does not know.
    """
    name = getattr(func, "__name__", "function")
    wrapped = list(_tensors(args))
    if kwargs:
        wrapped += _tensors(kwargs)
    for tensor in wrapped:
        if tensor._af.recorder is not None or isinstance(tensor._af, Held):
            flush_tensor(tensor, name)
    if _writes(name, func, kwargs):
        flush_thread(name)
        for tensor in wrapped:
            if tensor._af.recorder is None and not isinstance(tensor._af, Held):
                _set(tensor, "_af", UNKNOWN)
    held = [tensor for tensor in wrapped if isinstance(tensor._af, Held)]
    if held:
        args, kwargs = _released(args), _released(kwargs or {})
        wrapped = [tensor for tensor in wrapped if tensor not in held]
    counts.eager[name, "not in the table"] += 1
    for tensor in wrapped:
        tensor.__class__ = _Plain
    try:
        result = func(*args, **kwargs) if kwargs else func(*args)
    finally:
        for tensor in wrapped:
            tensor.__class__ = Tensor
    return _lifted(result)


def _released(value: Any) -> Any:
    """`value` with every held shell replaced by the tensor it stands for."""
    if value.__class__ is Tensor:
        return value._af.real if isinstance(value._af, Held) else value
    if value.__class__ in (tuple, list):
        return value.__class__(map(_released, value))
    if value.__class__ is dict:
        return {key: _released(item) for key, item in value.items()}
    return value


def _writes(name: str, func: Handler, kwargs: Any) -> bool:
    """Whether `func` may write to its arguments, or is not known well enough to say."""
    if kwargs and kwargs.get("out") is not None:
        return True
    if name.endswith("_") and (not name.endswith("__") or name[:3] == "__i" or "set" in name):
        return name not in ("__index__", "__int__", "__invert__")
    module = getattr(func, "__module__", None) or ""
    return "batch_norm" in name or module.startswith("torch._ops")


_SOLE = sys.getrefcount(object()) + 1  # of a result: the call's temporary and one local name


def _lifted(result: Any) -> Any:
    """Wrap results that nobody else holds: the same objects, of the wrapped class."""
    if result.__class__ is _Plain:
        if sys.getrefcount(result) <= _LIFT_COUNT and result.layout is torch.strided:
            result.__class__ = Tensor
        return result
    if result.__class__ is tuple or result.__class__ is list or hasattr(result, "_fields"):
        for item in result:
            if item.__class__ is _Plain and sys.getrefcount(item) <= _LIFT_COUNT + 1:
                item.__class__ = Tensor
    return result


def _calibrate() -> int:
    """The reference count that a fresh result shows inside `_lifted`."""

    def probe(result: object) -> int:
        return sys.getrefcount(result)

    def call() -> int:
        result = object()
        return probe(result)

    return call()


_LIFT_COUNT = _calibrate()


# --- __torch_function__ and __torch_dispatch__ -----------------------------------------------


def _torch_function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    handler = HANDLERS.get(func)
    if handler is None or not all(issubclass(cls, (Tensor, torch.nn.Parameter)) or cls is _Plain
                                  for cls in types):  # fmt: skip
        if any(cls not in (Tensor, _Plain) and not issubclass(cls, _KNOWN) for cls in types):
            return NotImplemented  # another subclass knows better
        return run_eager(func, args, kwargs)
    if kwargs:
        return handler(*args, **kwargs)
    return handler(*args)


_KNOWN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A pending shell reached C++ below `__torch_function__`: compute it and go on."""
    args, kwargs = list(args), dict(kwargs or {})
    for tensor in [*_tensors(args), *_tensors(kwargs)]:
        if tensor._af.recorder is not None:
            flush_tensor(tensor, "C++")
    if _writes(func.overloadpacket.__name__, func, kwargs):
        flush_thread("C++")
    counts.eager[func.overloadpacket.__name__, "called from C++"] += 1
    with NoTorchFunction():
        return func(*_released(args), **_released(kwargs))


Tensor.__torch_function__ = staticmethod(_torch_function)  # type: ignore[assignment]
Tensor.__torch_dispatch__ = staticmethod(_torch_dispatch)  # type: ignore[assignment]


# --- recording handlers, generated per op: the hot path ---------------------------------------

_UNARY = """
def handler(self, *args, **kwargs):
    if self.__class__ is Tensor and not args and not kwargs:
        node = self._af
        recorder = node.recorder
        if recorder is not None and recorder.ident == get_ident():
            chain = recorder.chain
            nxt = chain.tip.next.get((OP, node.index))
            if nxt is not None and nxt.pool:
                shell = nxt.pool.pop()
                chain.append(shell)
                chain.tip = nxt
                if recorder.chain is chain:
                    return shell
        shell = record(OP, (self,))
        if shell is not None:
            return shell
    return run_eager(FUNC, (self, *args), kwargs)
"""

_BINARY = """
def handler(self, other{options}):
    if {guard}self.__class__ is Tensor:
        node = self._af
        recorder = node.recorder
        if recorder is not None and recorder.ident == get_ident():
            chain = recorder.chain
            cls = other.__class__
            scalar = False
            if cls is Tensor and other._af.recorder is recorder:
                key = (OP, node.index, other._af.index)
            elif cls is float:
                key = (OP, node.index, float)
                scalar = True
            else:
                key = (OP, node.index, chain.slots.get(id(other)))
            nxt = chain.tip.next.get(key)
            if nxt is not None and nxt.pool:
                if scalar:
                    chain.consts.append(other)
                shell = nxt.pool.pop()
                chain.append(shell)
                chain.tip = nxt
                if recorder.chain is chain:
                    return shell
    {indent}shell = record(OP, (self, other))
    {indent}if shell is not None:
    {indent}    return shell
    return run_eager(FUNC, (self, other{forward}){keywords})
"""


def _generate(template: str, op: Op, func: Handler, name: str, **parts: str) -> Handler:
    space: dict[str, Any] = {
        "Tensor": Tensor, "get_ident": get_ident, "record": record, "run_eager": run_eager,
        "OP": op, "FUNC": func,
    }  # fmt: skip
    exec(template.format(**parts), space)
    handler = space["handler"]
    handler.__name__ = name
    return handler


def _unary(op: Op, func: Handler, name: str) -> Handler:
    return _generate(_UNARY, op, func, name)


def _binary(op: Op, func: Handler, name: str) -> Handler:
    """`func(self, other)` and whatever options it has; any option is left to eager."""
    return _generate(
        _BINARY, op, func, name,
        options=", *args, **kwargs", guard="not args and not kwargs and ", indent="",
        forward=", *args", keywords=", kwargs",
    )  # fmt: skip


def _operator(op: Op, func: Handler, name: str) -> Handler:
    return _generate(
        _BINARY, op, func, name, options="", guard="", indent="", forward="", keywords=""
    )


def _spelled(choose: Handler, func: Handler) -> Handler:
    """A handler for torch functions with options, which decide what is recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is None:
            kwargs.pop("out", None)
            try:
                chosen = choose(*args, **kwargs)
            except (TypeError, AttributeError):  # not the arguments it knows: torch decides
                chosen = None
            if chosen is not None:
                shell = record(*chosen)
                if shell is not None:
                    return shell
        return run_eager(func, args, kwargs)

    return call


def _inplace(choose: Handler, func: Handler) -> Handler:
    """A handler for the in-place form: recorded on a pending tensor, immediate on memory."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__class__ is Tensor and self._af.recorder is not None:
            try:
                chosen = choose(self, *args, **kwargs)
            except (TypeError, AttributeError):
                chosen = None
            if chosen is not None and record_inplace(chosen[0], self, chosen[1]):
                return self
        return run_eager(func, (self, *args), kwargs)

    return call


def _plain_choice(op: Op) -> Handler:
    if len(op.names) == 1:
        return lambda self: (op, (self,))
    return lambda self, other: (op, (self, other))


_PLACES = (torch, F, torch._C._nn, torch.special, torch._C._VariableFunctions)


def _install_ops() -> None:
    """Find every torch spelling of every row, and put a handler in its place."""
    for name, op in ops.PLAIN.items():
        if name in ops.SPELLINGS:
            continue
        make = _unary if len(op.names) == 1 else _binary
        _install(name, lambda func, make=make, op=op, name=name: make(op, func, name))
    for name, choose in ops.SPELLINGS.items():
        _install(name, lambda func, choose=choose: _spelled(choose, func))
    inplace = {name: _plain_choice(op) for name, op in ops.PLAIN.items()} | ops.SPELLINGS
    for name, choose in inplace.items():
        _install(name + "_", lambda func, choose=choose: _inplace(choose, func))
    for table, make in ((ops.BINARY_OPERATORS, _operator), (ops.UNARY_OPERATORS, _unary)):
        for name, row in table.items():
            _override(name, make(OPS[row], getattr(_Plain, name), name))
    for name, row in ops.SPELLED_OPERATORS.items():
        _override(name, _spelled(ops.SPELLINGS[row], getattr(_Plain, name)))
    for name, row in ops.INPLACE_OPERATORS.items():
        if hasattr(_Plain, name):
            choose = ops.SPELLINGS.get(row) or _plain_choice(OPS[row])
            _override(name, _inplace(choose, getattr(_Plain, name)))
    for name, dtype in ops.CAST_METHODS.items():
        _override(name, _cast(dtype, getattr(_Plain, name)))
    _override("__rtruediv__", lambda self, other: self.reciprocal() * other)
    _override("__rdiv__", lambda self, other: self.reciprocal() * other)
    _override("__rpow__", lambda self, other: torch.pow(other, self))
    _override("__hash__", _Plain.__hash__)


def _install(name: str, make: Callable[[Handler], Handler]) -> None:
    for place in _PLACES:
        func = getattr(place, name, None)
        if callable(func) and func not in HANDLERS:
            HANDLERS[func] = make(func)
    method = getattr(_Plain, name, None)
    if callable(method):
        _override(name, make(method))


def _override(name: str, handler: Handler) -> None:
    HANDLERS[getattr(_Plain, name)] = handler
    setattr(Tensor, name, handler)


def _cast(dtype: torch.dtype, func: Handler) -> Handler:
    op = ops.CASTS[dtype]

    def cast(self: Any, **options: Any) -> Any:
        if self.__class__ is Tensor and not options and self.dtype is not dtype:
            shell = record(op, (self,))
            if shell is not None:
                return shell
        elif not options:
            return self
        return run_eager(func, (self,), options)

    return cast


# --- metadata: answered by the shell itself, nothing runs -----------------------------------------

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested is_mkldnn is_xpu is_mps is_sparse_csr itemsize nbytes names output_nr"
).split()
_METHODS = (
    "size stride dim numel nelement ndimension storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference get_device dim_order "
    "is_same_size __len__"
).split()
_RESULT_TYPE = ("result_type", "can_cast", "promote_types", "is_tensor", "broadcast_tensors")


def _install_metadata() -> None:
    for name in _PROPERTIES:
        base = getattr(_Plain, name, None)
        if base is None:
            continue
        getter = base.__get__
        setter = getattr(base, "__set__", None)

        def get(self: Any, getter: Handler = getter) -> Any:
            with NoTorchFunction():
                return getter(self)

        def set_(self: Any, value: Any, setter: Any = setter) -> None:
            run_eager(setter, (self, value))

        HANDLERS[getter] = get
        setattr(Tensor, name, property(get, set_ if setter is not None else None))
    for name in _METHODS:
        base = getattr(_Plain, name, None)
        if base is None:
            continue

        def method(self: Any, *args: Any, base: Handler = base, **kwargs: Any) -> Any:
            with NoTorchFunction():
                return base(self, *args, **kwargs)

        _override(name, method)
    for place_name in ("is_floating_point", "is_complex", "numel", "is_signed"):
        HANDLERS[getattr(torch, place_name)] = getattr(Tensor, place_name)
    Tensor._version = property(version_of)  # type: ignore[assignment]
    HANDLERS[_Plain._version.__get__] = version_of  # type: ignore[attr-defined]


_install_ops()
_install_metadata()
assert _chain.Tensor is Tensor

"""Memory: writes to plain tensors that a pending op has yet to read, and what gives memory out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any

import torch

from ..chain import state as _state
from ..chain.claims import announced, writing
from ..chain.meta import UNKNOWN, Meta
from ..chain.shell import Tensor, set_attribute
from ..dispatch.nested import SIMPLE
from ..dispatch.protocol import HANDLERS, HOT, OPTIONS
from ..dispatch.unrecorded import EXPORTS
from ..lending import is_lent, others_lend
from ..record.flush import flush_all, flush_tensor
from ..record.writes import flush_readers
from ..torch_private import TensorBase, function_modes, looked_on, torch_functions_are_on
from .around import replace

_PLAIN = set(map(id, (torch.Tensor, torch.nn.Parameter)))


_KEEP = {"share_memory_", "retain_grad_", "rename_"}  # change nothing that a pending op reads
_OPERATORS = {"add", "sub", "mul", "truediv", "div", "mod", "floordiv", "pow", "and", "or", "xor",
              "lshift", "rshift", "matmul"}  # fmt: skip


def patch_inplace() -> None:
    """In-place functions of plain tensors, and exports through which others may write.

    What a pending op still has to read is read first.
    """
    for name in dir(torch.Tensor):
        inplace = name.endswith("_") and not name.startswith("_") and name not in _KEEP
        operator = name.startswith("__i") and name[3:-2] in _OPERATORS
        if inplace or operator or name == "__setitem__" or name in EXPORTS:
            setattr(torch.Tensor, name, _reads_first(getattr(torch.Tensor, name), name))
    for module in (torch, torch._C._nn, torch.nn.functional):
        for name in dir(module):
            function = getattr(module, name)
            if name.endswith("_") and not name.startswith("__") and callable(function):
                replace(module, name, _reads_first(function, name))
    for name in dir(torch._C._VariableFunctions):  # by which torch.nn.functional has some of them
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch._VF, name, getattr(torch, name))
    torch.utils.swap_tensors = _swapping(torch.utils.swap_tensors)
    torch._C._swap_tensor_impl = _swapping(torch._C._swap_tensor_impl)
    for module in (torch, torch._C._nn):
        for name, place in ASIDE.items():
            if hasattr(module, name):
                replace(module, name, _announcing(getattr(module, name), place))


# functions that write to arguments after the first, such as running statistics, some without
# counting it as a write; and the place of the argument that says whether they do
ASIDE = {
    "batch_norm": 5, "instance_norm": 5, "native_batch_norm": 5, "_native_batch_norm_legit": 5,
    "_batch_norm_impl_index": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5,
    "batch_norm_update_stats": None, "batch_norm_gather_stats": None,
    "batch_norm_gather_stats_with_counts": None, "fused_moving_avg_obs_fake_quant": None,
    "_fused_moving_avg_obs_fq_helper": None, "rrelu_with_noise": 4, "rrelu_with_noise_": 4,
    "_amp_update_scale_": None,
}  # fmt: skip


def _announcing(original: Callable[..., Any], place: int | None = None) -> Callable[..., Any]:
    """`original`, which writes to any of its arguments unless the one at `place` is False."""

    def write(*args: Any, **kwargs: Any) -> Any:
        if _pending():
            for x in (*args, *kwargs.values()):
                if isinstance(x, torch.Tensor):
                    flush_readers(x, original.__name__)
        return original(*args, **kwargs)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        idle = place is not None and len(args) > place and args[place] is False
        if idle or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return announced(write, *args, **kwargs)

    HOT.append(("announcing", call, (original, -1 if place is None else place)))
    return call


def _reads_first(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    recorders = _state.all_recorders.refs
    handler = OPTIONS.get(original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if handler is not None and args and id(args[0].__class__) in _PLAIN:
            for known in recorders[:]:
                recorder = known()
                if recorder is not None and recorder.chain:
                    if _asks_us(args, kwargs):
                        return handler(*args, **kwargs)  # torch would take 4 us to find it
                    break
        elif handler is not None and args and args[0].__class__ is Tensor:
            if not _goes(args[0]) and _asks_us(args, kwargs):
                return handler(*args, **kwargs)  # which may record it
        ident = get_ident()
        nested = ident in writing
        try:
            writing[ident] = True  # as `announced`, in 0.2 us less
            if _pending():
                _flush_readers_of(args, kwargs, name)
            return original(*args, **kwargs)
        finally:
            if not nested:
                writing.pop(ident, None)

    HOT.append(("unread", call, (original,)))
    for table in (HANDLERS, OPTIONS):  # __torch_function__ is told of the new one
        if original in table:
            table[call] = table[original]
    return call


def _swapping(swap: Callable[..., None]) -> Callable[..., None]:
    """`swap` of values that are computed, after which nothing is known of wrapped tensors."""

    def write(*tensors: Any, **named: Any) -> None:
        flush_all("swap_tensors")
        swap(*tensors, **named)

    @wraps(swap)
    def call(*tensors: Any, **named: Any) -> None:
        announced(write, *tensors, **named)
        for tensor in (*tensors, *named.values()):
            if tensor.__class__ is Tensor and tensor._af.__class__ is Meta:
                set_attribute(tensor, "_af", UNKNOWN)

    return call


def _asks_us(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch would do no more with these than ask our handler."""
    wrapped = False
    for x in (*args, *kwargs.values()) if kwargs else args:
        if x.__class__ is Tensor:
            wrapped = True
        elif id(x.__class__) not in SIMPLE and not _is_key(x):
            return False
    return wrapped and torch_functions_are_on() and not (function_modes() and looked_on())


def _is_key(x: Any) -> bool:
    """Whether it is an index of several."""
    return x.__class__ is tuple and all([id(item.__class__) in SIMPLE for item in x])


def _flush_readers_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    target = args[0] if args else kwargs.get("input")
    if isinstance(target, (list, tuple)) and target:  # torch._foreach_*_
        flush_all(name)
    elif target.__class__ is Tensor and not _goes(target) and _asks_us(args, kwargs):
        return
    elif isinstance(target, torch.Tensor):
        flush_readers(target, name)


def _goes(tensor: Any) -> bool:
    """Whether it may be plain by the time that torch looks, for others end what they lend."""
    return others_lend() and is_lent(tensor)


class _Attribute(property):
    """A property that says of itself what a C getter says; torch._dynamo asks."""

    __objclass__ = TensorBase


ATTRIBUTES = ("data", "grad", "requires_grad")


def patch_attributes() -> None:
    """`t.data = s` and `t.grad = s` hand a tensor to C++ without asking it.

    A gradient is another tensor's memory, which nobody writes to: `zero_grad` before `backward`
    ends no chain, and costs each parameter no look at what a pending loss reads.
    """
    for name in ATTRIBUTES:
        base, apart = getattr(torch.Tensor, name), name == "grad"

        def get(self: Any, base: Any = base) -> Any:
            return base.__get__(self)

        def set_(
            self: Any, value: Any, base: Any = base, name: str = name, apart: bool = apart
        ) -> None:
            if isinstance(value, Tensor):
                flush_tensor(value, name)
            if apart:
                base.__set__(self, value)
            else:
                announced(write_attribute, base, self, value, name)

        def delete(self: Any, base: Any = base) -> None:
            base.__delete__(self)

        HOT.extend([("taking", get, (base,)), ("placing", set_, (base, apart))])
        attribute = _Attribute(get, set_, delete)
        attribute.__name__ = name  # type: ignore[attr-defined]
        setattr(torch.Tensor, name, attribute)


def write_attribute(attribute: Any, tensor: torch.Tensor, value: Any, name: str) -> None:
    if _pending():
        flush_readers(tensor, name)
    attribute.__set__(tensor, value)


def _pending() -> bool:
    for known in _state.all_recorders.refs[:]:
        recorder = known()
        if recorder is not None and (recorder.chain or recorder.reading or not recorder.ident):
            return True
    return False

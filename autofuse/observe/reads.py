"""Reads: the methods of tensors that make the host wait for the device, and where they are called.

A wrapped tensor tells of its ops by itself. Of a plain one autofuse sees nothing, so that while
somebody listens these methods of torch.Tensor are replaced by ones that tell.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import hooks
from ..chain.shell import Tensor
from ..dispatch.methods import made_no_sequence
from ..lines import PACKAGE, TORCH, Position
from ..torch_private import TensorBase

# `ops_eager` counts them as ops too
_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal",
          "allclose", "is_nonzero", "argwhere", "__bool__", "__int__", "__float__", "__index__",
          "__complex__", "__array__", "__repr__", "__format__", "__contains__")  # fmt: skip
SYNCS = {*_READS, "_local_scalar_dense"}


def _to_host(x: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> bool:
    """Whether `x.to(...)` waits for a copy to the host."""
    if not x.is_cuda or non_blocking:
        return False
    places = (*args[:1], options.get("device"), options.get("other"))
    return any(
        place.device.type == "cpu" if isinstance(place, torch.Tensor)
        else torch.device(place).type == "cpu" if isinstance(place, (str, torch.device)) else False
        for place in places
    )  # fmt: skip


def _by_mask(x: torch.Tensor, index: Any) -> bool:
    """Whether `x[index]` has to count the elements of a mask."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts
    )


# methods that are reads for some arguments only, also of wrapped tensors
_AT_TIMES: dict[str, Callable[..., bool]] = {"to": _to_host, "__getitem__": _by_mask}
# reads inside one that is noted already
_INNER = (PACKAGE, *(TORCH + name for name in ("_tensor.py", "_tensor_str.py")))

_lock = threading.RLock()  # a finalizer may look too, in the middle of it
_listeners: list[Callable[[str], None]] = []  # called with the name of the method
_originals: dict[tuple[type, str], Any] = {}  # what stood in the class itself


def watch(listener: Callable[[str], None]) -> None:
    """Call `listener` at every read that is no event of an op, in any thread."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            for name in _READS:
                _replace(torch.Tensor, name, lambda x, *args, **options: x.__class__ is not Tensor)
            for name, waits in _AT_TIMES.items():
                for owner in (torch.Tensor, Tensor):
                    if name in owner.__dict__ or owner is torch.Tensor:
                        _replace(owner, name, waits)


def unwatch(listener: Callable[[str], None]) -> None:
    """Call it no more."""
    with _lock:
        _listeners.remove(listener)
        if not _listeners:
            for (owner, name), original in _originals.items():
                if original is None:  # it was inherited
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
                _keep_from_sequences(owner, name)
            _originals.clear()
            hooks.indexing_is_torchs()


def _replace(owner: type, name: str, waits: Callable[..., bool]) -> None:
    """Let the method `name` tell where `waits` says that it does."""
    method = getattr(owner, name, None)
    if method is None:
        return
    _originals[owner, name] = owner.__dict__.get(name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if waits(self, *args, **kwargs):
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith(_INNER):
                for listener in list(_listeners):
                    listener(name)
        return method(self, *args, **kwargs)

    call.__name__ = name
    setattr(owner, name, call)
    _keep_from_sequences(owner, name)


def _keep_from_sequences(owner: type, name: str) -> None:
    """After a change of `__getitem__`: C would take tensors for sequences from then on."""
    if name != "__getitem__":
        return
    for cls in (owner, *_subclasses(owner)):
        definer = next(base for base in cls.__mro__ if name in base.__dict__)
        if definer in (TensorBase, torch.Tensor, Tensor):  # and no class of the user's
            made_no_sequence(cls)


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def said(name: str, position: Position | None) -> str:
    """A read as the program says it: `loss.item()`."""
    line = linecache.getline(*position).strip() if position is not None else ""
    found = re.search(rf"([\w.]+(?:\[[^\]]*\])?)\.{re.escape(name)}\(", line)
    if found:
        return f"{found.group(1)}.{name}()"
    spoken = name.startswith("_") or f".{name}(" in line
    return line.rstrip(":") if spoken and line else f"{name.strip('_')}()"

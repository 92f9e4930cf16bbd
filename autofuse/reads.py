"""Reads: the methods of tensors that make the host wait for the device, and where they are called.

A wrapped tensor tells of its ops by itself. Of a plain one autofuse sees nothing, so that while
somebody listens these methods of torch.Tensor are replaced by ones that tell.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .position import PACKAGE, TORCH, Position
from .shell import Tensor

# `ops_eager` counts them as ops too
_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal",
          "allclose", "is_nonzero", "argwhere", "__bool__", "__int__", "__float__", "__index__",
          "__complex__", "__array__", "__repr__", "__format__", "__contains__")  # fmt: skip
SYNCS = {*_READS, "_local_scalar_dense"}
# reads inside one that is noted already
_INNER = (PACKAGE, *(TORCH + name for name in ("_tensor.py", "_tensor_str.py")))

_lock = threading.Lock()
_listeners: list[Callable[[str], None]] = []  # called with the name of the method
_originals: dict[str, Any] = {}  # what stood in torch.Tensor itself


def watch(listener: Callable[[str], None]) -> None:
    """Call `listener` at every read of a plain tensor, in any thread."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            for name in _READS:
                if hasattr(torch.Tensor, name):
                    _originals[name] = torch.Tensor.__dict__.get(name)
                    setattr(torch.Tensor, name, _telling(name, getattr(torch.Tensor, name)))


def unwatch(listener: Callable[[str], None]) -> None:
    """Call it no more."""
    with _lock:
        _listeners.remove(listener)
        if not _listeners:
            for name, original in _originals.items():
                if original is None:  # it was inherited
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, original)
            _originals.clear()


def _telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__class__ is not Tensor:
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith(_INNER):
                for listener in list(_listeners):
                    listener(name)
        return method(self, *args, **kwargs)

    call.__name__ = name
    return call


_AS_METHOD = r"([\w.]+(?:\[[^\]]*\])?)\.{name}\("


def said(name: str, position: Position | None) -> str:
    """A read as the program says it: `loss.item()`."""
    line = linecache.getline(*position).strip() if position is not None else ""
    found = re.search(_AS_METHOD.replace("{name}", re.escape(name)), line)
    if found:
        return f"{found.group(1)}.{name}()"
    return line.rstrip(":") if name.startswith("_") and line else f"{name.strip('_')}()"

"""Around: doing something before and after functions of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ..api import unwrap
from ..chain.shell import Tensor, set_class
from ..dispatch.eager import make_plain
from ..dispatch.nested import mapped
from ..lending import loans
from ..record.modes import close_thread, reopen_thread, run_closed


def around(
    owner: Any,
    name: str,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
    anyway: bool = False,
) -> None:
    """Replace `owner.name`, where there is one, by itself between `before` and `after`.

    after: also if it raises. anyway: it runs also if `before` raises, for it ends something.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if before is not None:
                before()
        except BaseException:
            if anyway:
                original(*args, **kwargs)
            raise
        try:
            return original(*args, **kwargs)
        finally:
            if after is not None:
                after()

    replace(owner, name, call)


def closed_between(owner: Any, start: str, end: str, reason: str) -> None:
    """Record nothing from `owner.start` to `owner.end`, where there are both."""
    if hasattr(owner, start) and hasattr(owner, end):
        around(owner, start, partial(close_thread, reason))
        around(owner, end, after=reopen_thread)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set `owner.name`; torch.jit, which knows its builtins by identity, learns the new one."""
    symbol = torch.jit._builtins._find_builtin(getattr(owner, name))
    setattr(owner, name, function)
    if symbol is not None:
        torch.jit._builtins._register_builtin(function, symbol)


def unwrapping(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function` of plain tensors, with nothing recorded while it runs."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        leaves: list[Any] = []  # which an alias would not be
        aliases: dict[int, Any] = {}  # one for each, for it may be asked whether they are the same

        def plain(tensor: Any) -> Any:
            if tensor.__class__ is not Tensor or not (tensor.is_leaf and tensor.requires_grad):
                if id(tensor) not in aliases:
                    aliases[id(tensor)] = unwrap(tensor)
                return aliases[id(tensor)]
            leaves.append(tensor)
            return tensor

        args, kwargs = mapped((args, kwargs), plain)
        lent = {id(leaf) for leaf in leaves if id(leaf) in loans}
        try:
            for leaf in leaves:
                make_plain(leaf, reason)  # it may have other contents afterwards
            return run_closed(reason, function, args, kwargs)
        finally:
            for leaf in leaves:  # one that is lent stays plain: its lenders may be gone by now
                if leaf.__class__ is torch.Tensor and id(leaf) not in lent:
                    set_class(leaf, Tensor)

    call._autofuse = True  # type: ignore[attr-defined]
    return call

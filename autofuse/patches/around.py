"""Around: doing something before and after functions of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ..api import unwrap
from ..chain.shell import Tensor
from ..chain.state import this_thread
from ..dispatch.eager import make_plain, whose_is, wrap_again
from ..dispatch.nested import mapped
from ..inside import whatever_interrupts
from ..record.modes import close_thread, end_closed, reopen_thread, run_closed


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


def closed_between(
    owner: Any,
    start: str,
    end: str,
    reason: str,
    ends_anyway: bool = False,
    goes_on: Callable[[], bool] | None = None,
) -> None:
    """Record nothing from `owner.start` to `owner.end`, where there are both.

    ends_anyway: torch calls `end` also if `start` has failed. goes_on: of what does not nest, and
    any thread may end, whether it is on after an `end`, which may have failed.
    """
    if not (hasattr(owner, start) and hasattr(owner, end)):
        return
    enter, leave = getattr(owner, start), getattr(owner, end)

    @wraps(enter)
    def begin(*args: Any, **kwargs: Any) -> Any:
        mine = this_thread.__dict__
        before = mine.get("closed", 0)
        try:
            close_thread(reason)
            result = enter(*args, **kwargs)
            mine[start] = True
            return result
        except BaseException:
            if not ends_anyway:
                mine["closed"] = before
                whatever_interrupts(end_closed)
            raise

    @wraps(leave)
    def finish(*args: Any, **kwargs: Any) -> Any:
        mine = this_thread.__dict__
        try:
            return leave(*args, **kwargs)
        finally:
            if goes_on is None:
                reopen_thread()
            elif mine.get(start) and not goes_on():
                mine[start] = False
                reopen_thread()

    replace(owner, start, begin)
    replace(owner, end, finish)


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
        whose = [whose_is(leaf, id(leaf)) for leaf in leaves]
        try:
            for leaf, owner in zip(leaves, whose, strict=True):
                if owner:
                    make_plain(leaf, reason)  # it may have other contents afterwards
            return run_closed(reason, function, args, kwargs)
        finally:
            try:
                wrap_again(leaves, whose)
            except BaseException:  # an interrupt
                whatever_interrupts(partial(wrap_again, leaves, whose))
                raise

    call._autofuse = True  # type: ignore[attr-defined]
    return call

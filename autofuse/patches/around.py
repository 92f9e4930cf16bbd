"""Around: doing something before and after functions of PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ClassMethodDescriptorType
from typing import Any

import torch

from ..api import unwrap
from ..chain.shell import Tensor
from ..fused import plain_arguments
from ..record.flush import flush_all, flush_thread
from ..record.modes import close_thread, closed, regrade, reopen_thread
from ..torch_private import set_grad_enabled


def flush_first(
    owner: Any, name: str, reason: str, flush: Callable[[str], None], anyway: bool = False
) -> None:
    """Replace `owner.name` by a function that flushes and then calls it.

    anyway: also if the flush fails, for what ends something.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            flush(reason)
        except BaseException:
            if anyway:
                original(*args, **kwargs)
            raise
        return original(*args, **kwargs)

    replace(owner, name, call)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set `owner.name`; torch.jit, which knows its builtins by identity, learns the new one."""
    symbol = torch.jit._builtins._find_builtin(getattr(owner, name))
    setattr(owner, name, function)
    if symbol is not None:
        torch.jit._builtins._register_builtin(function, symbol)


def flushed_when_called(owner: Any, name: str) -> None:
    """Flush before what `owner.name` makes, a function of tensors in C++, is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def make(*args: Any) -> Callable[..., Any]:
        function = original(*args)

        def call(*tensors: Any) -> Any:
            flush_thread(name)
            return function(*tensors)

        return call

    setattr(owner, name, make)


def regraded_after(owner: Any, name: str) -> None:
    """Grad mode may be another one after `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        was = torch.is_grad_enabled()
        result = original(*args, **kwargs)
        if was is not torch.is_grad_enabled():
            try:
                regrade()
            except BaseException:
                if name != "__exit__":  # the block is not entered
                    set_grad_enabled(was)
                raise
        return result

    setattr(owner, name, call)


def flushed_at_end(owner: Any) -> None:
    """Flush where a block ends with another grad mode; it ends also if that fails."""
    original = owner.__exit__

    @functools.wraps(original)
    def leave(self: Any, *args: Any) -> None:
        try:
            if self.prev is not torch.is_grad_enabled():
                flush_thread("grad mode")
        except BaseException:
            set_grad_enabled(self.prev)
            raise
        original(self, *args)

    owner.__exit__ = leave


def closed_during(owner: Any, name: str) -> None:
    """Record nothing while the class or instance method `owner.name` runs."""
    original = owner.__dict__[name]
    of_class = isinstance(original, (classmethod, ClassMethodDescriptorType))  # C's, torch 2.14

    @functools.wraps(getattr(original, "__func__", original))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with closed(name):
            bound = original.__get__(None, self) if of_class else original.__get__(self)
            return bound(*args, **kwargs)

    setattr(owner, name, classmethod(call) if of_class else call)


def plain_of(tensor: Tensor) -> torch.Tensor:
    return unwrap(tensor).detach()


def unwrapping(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function` of plain tensors, with nothing recorded while it runs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        args, kwargs = plain_arguments((args, kwargs))
        with closed(reason):
            return function(*args, **kwargs)

    call._autofuse = True  # type: ignore[attr-defined]
    return call


def reopened_after(
    owner: Any,
    name: str,
    reason: str,
    reopen: Callable[[str], None],
    flush: Callable[[str], None] = flush_all,
) -> None:
    """Flush before `owner.name`, and start new chains under the modes it leaves."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        flush(reason)
        try:
            return original(*args, **kwargs)
        finally:
            reopen(reason)

    setattr(owner, name, call)


def closed_between(module: Any, start: str, end: str) -> None:
    begin, finish = getattr(module, start, None), getattr(module, end, None)
    if begin is None or finish is None:
        return

    @functools.wraps(begin)
    def begun(*args: Any, **kwargs: Any) -> Any:
        close_thread("torch.func")
        return begin(*args, **kwargs)

    @functools.wraps(finish)
    def finished(*args: Any, **kwargs: Any) -> Any:
        try:
            return finish(*args, **kwargs)
        finally:
            reopen_thread()

    setattr(module, start, begun)
    setattr(module, end, finished)


def closed_inside(owner: Any, keep: type) -> None:
    enter, leave = owner.__enter__, owner.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if not isinstance(self, keep):
            close_thread("mode")
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *args: Any) -> Any:
        try:
            return leave(self, *args)
        finally:
            if not isinstance(self, keep):
                reopen_thread()

    owner.__enter__, owner.__exit__ = entered, left

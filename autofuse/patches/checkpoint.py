"""Checkpoints: what torch.utils.checkpoint runs twice is recorded in both runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..chain.meta import UNKNOWN, remember
from ..chain.shell import Tensor
from ..chain.state import this_thread
from ..dispatch.nested import mapped, tensors_in, wrapped_in
from ..fused import call_again, call_plain
from ..inside import whatever_interrupts
from ..lending import is_lent, lent_here
from ..record.flush import value_of
from ..record.modes import reopen


def patch_checkpoints() -> None:
    """The second run, in backward, gets plain tensors: it lends them as a fused call does.

    That is so where the first run was part of a fused call or had wrapped arguments.
    """
    from torch.utils import checkpoint

    reentrant = checkpoint.CheckpointFunction
    forward = reentrant.forward

    @wraps(forward)
    def first(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        result = forward(ctx, _recording(function), *args)
        ctx.run_function = _recording(_again(function, args))
        return result

    reentrant.forward = staticmethod(first)  # type: ignore[method-assign]
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # torch 2.15
        "_checkpoint_without_reentrant_generator",
    ):
        original = getattr(checkpoint, name, None)
        if original is not None:
            setattr(checkpoint, name, _lending(original))
            break
    save = getattr(checkpoint, "_make_saved_tensor", None)  # since torch 2.13
    if save is not None:
        checkpoint._make_saved_tensor = _of_values(save)  # type: ignore[attr-defined]


def _of_values(save: Callable[..., Any]) -> Callable[..., Any]:
    """`save`, which is C++'s and sees no gradient of what has its value beside it."""

    @wraps(save)
    def make(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        value = value_of(tensor, "checkpoint") if isinstance(tensor, Tensor) else tensor
        return save(value, *args, **kwargs)

    return make


def _lending(generator: Callable[..., Any]) -> Callable[..., Any]:
    """`generator`, whose first argument is what the second run calls."""

    @wraps(generator)
    def make(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return generator(function, *args, **kwargs)
        return generator(_again(function, (args, kwargs)), *args, **kwargs)

    return make


def _again(function: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """`function` as its second run is to call it, where the first is called with `args` now.

    It takes the way of the fused call that this is part of, and what that has lent is lent again:
    the function may have more at hand than its arguments.
    """
    wrapped = any(True for _ in wrapped_in(args))
    if this_thread.depth == 0 and not wrapped:
        return function
    again = call_plain
    if wrapped or not this_thread.plain:
        given = set(map(id, tensors_in(args)))
        lent = {id(x): TensorWeakRef(x) for x in lent_here() if id(x) not in given}
        again = partial(_lending_again, tuple(lent.values()))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return again(function, args, kwargs)

    return call


def _lending_again(
    lent: tuple[TensorWeakRef, ...], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call `function` where `lent` are lent, those of them that there still are."""
    others = tuple([x for known in lent if (x := known()) is not None and is_lent(x)])
    return call_again(function, args, kwargs, others)


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, recorded inside the `apply`s of Functions, where nothing is for other reasons.

    They are several where a checkpoint is part of another's second run.
    """

    def call(*args: Any) -> Any:
        applies = this_thread.applies
        if applies == 0 or this_thread.closed != applies:
            return function(*args)
        try:
            this_thread.closed = this_thread.applies = 0
            reopen("reopen")
            return mapped(function(*args), _settled)
        finally:
            this_thread.closed = this_thread.applies = applies
            whatever_interrupts(partial(reopen, "apply"))

    return call


def _settled(result: Any) -> Any:
    """`result` with its value, as C++ may take it; it is about to get another history."""
    if result.__class__ is Tensor:
        result = value_of(result, "apply")
        if result.__class__ is Tensor:
            remember(result, UNKNOWN)
    return result

"""Calls: functions that take tensors without asking, and those that ask by another protocol."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch.utils._device import _device_constructors

from ..chain.shell import Tensor
from ..chain.state import counts, is_alone, this_thread
from ..dispatch.eager import lifted, released, run_default, run_eager
from ..dispatch.nested import are_simple, mapped, wrapped_in
from ..dispatch.protocol import HOT, ask_overrides
from ..record.flush import flush, flush_thread, value_of
from ..record.modes import close_thread, reopen_thread, run_closed
from ..record.origins import ask
from ..settings.config import config
from ..torch_private import (
    function_modes,
    gpus_in_use,
    is_differentiating,
    is_multithreading_enabled,
    set_multithreading_enabled,
)
from .around import around, replace, unwrapping


def patch_calls() -> None:
    import torch._functorch.utils as functorch_utils
    from torch.autograd import function, graph

    for owner in (function.Function, function.BackwardCFunction):
        _close_during_apply(owner)
    for owner, name in (
        # every autograd.Function.apply passes its arguments through this module attribute
        (functorch_utils, "unwrap_dead_wrappers"),
        (torch._C.ScriptFunction, "__call__"),
        (torch._C.ScriptMethod, "__call__"),
        (torch.nn.parallel.DistributedDataParallel, "_post_forward"),
    ):
        _give_values(owner, name)
    for name in ("UndefinedGrad", "DelayedError"):  # which gradcheck calls
        _flush_when_called(torch._C._functions, name)  # type: ignore[attr-defined]
    for owner, name, reason in (
        (torch.jit, "trace", "jit"),
        (torch.jit, "trace_module", "jit"),
        (torch, "to_dlpack", "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack", "to_dlpack"),
    ):
        setattr(owner, name, unwrapping(getattr(owner, name), reason))
    # what the function returns, or has at hand, C++ will hold
    around(torch.jit, "fork", partial(close_thread, "jit"), reopen_thread)
    for owner in (graph, torch.autograd):
        owner._engine_run_backward = _in_chosen_thread(owner._engine_run_backward)

    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

    @wraps(default)
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Tensor in types:
            return run_default(default, cls, func, types, args, kwargs)
        return default(cls, func, types, args, kwargs)

    torch.Tensor.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]
    for module in (torch.nn.functional, torch.functional, torch._tensor, torch.autograd):
        # C calls it, so that Python 3.11 too runs its machine code
        module.handle_torch_function = partial(ask_overrides)  # type: ignore[attr-defined]

    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Tensor):
            return run_eager(make, (cls, data, *args), kwargs)
        return make(cls, data, *args, **kwargs)

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[assignment]
    variable = torch.autograd.Variable.__new__  # C, which makes a plain tensor of any
    torch.autograd.Variable.__new__ = staticmethod(_asking(variable))  # type: ignore[assignment]
    for name in _MAKERS:
        function = getattr(torch, name)
        replace(torch, name, _asking(function))
        _device_constructors().add(function)  # which C names to modes


def _give_values(owner: Any, name: str) -> None:
    """Let `owner.name`, behind which C++ holds what it is given, find nothing pending there."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        flush_thread(name)
        if not kwargs and are_simple(args):
            return original(*args)
        _compute_others(args, kwargs, name)
        args, kwargs = _released(args, kwargs)
        return original(*args, **kwargs)

    replace(owner, name, call if isinstance(owner, type) else _called(call))
    HOT.append(("giving", call, (original,)))


def _called(function: Any) -> Any:
    """`function` for who does not bind it, such that C calls it in Python 3.11, too, which runs
    those that it calls itself past their machine code."""
    if sys.version_info[:2] != (3, 11):
        return function
    return wraps(function)(partial(function))


def _released(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Both with values where these are beside what stands for them."""
    return released(args, {}), released(kwargs, {}) if kwargs else kwargs


def _compute_others(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
    """Compute what other threads have pending of these arguments."""
    if not is_alone():
        for tensor in [*wrapped_in((*args, *kwargs.values()))]:
            recorder = tensor._af.recorder
            if recorder is not None and recorder.ident != get_ident():
                flush(recorder, reason)


# functions of C that make a tensor of others, and ask no class
_MAKERS = ("asarray", "sparse_coo_tensor", "sparse_compressed_tensor", "sparse_csr_tensor",
           "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor")  # fmt: skip


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch lets no class override, as if wrapped tensors could."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(
            True for _ in wrapped_in((*args, *kwargs.values()))
        ):
            return function(*args, **kwargs)
        if function_modes():  # which torch asks; a default device has a say
            args, kwargs = mapped((args, kwargs), _value)
            return lifted(function(*args, **kwargs))
        return run_eager(function, args, kwargs)

    return call


def _value(tensor: Any) -> Any:
    return value_of(tensor) if tensor.__class__ is Tensor else tensor


def _in_chosen_thread(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """`run_backward`, once nothing is pending, in the thread that `config.backward_thread` says.

    That is the same for a fused call and for one that a contest leaves as it is.
    With multithreading off torch's engine queues the nodes of GPUs where it queues those of CPUs,
    for the thread that calls it (engine.cpp, `ready_queue`). All else is the same in its threads
    and here: of the nodes that are ready the one with the highest number runs, on its forward's
    stream and device, which a guard takes back (`evaluate_function`), in the modes of the call
    (`ThreadLocalStateGuard`); at the end the streams that were current at the call wait for those
    of the leaves (`exec_post_processing`). Inside another backward, as of a checkpoint, the thread
    that calls is that of the node.

    A backward that creates a graph is another matter: each thread counts the nodes that it makes
    (`at::sequence_number`), so that the numbers of these, and with them the order in which a later
    backward adds gradients up, depend on the thread. It is eager's, by choice of `auto`.
    """

    @wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        flush_thread("backward")
        _compute_others(args, kwargs, "backward")
        # functions are off: C asks no class
        if args and any([x.__class__ is Tensor for x in args[0]]):
            args, kwargs = _released(args, kwargs)
        if not is_differentiating():  # or it is part of one
            counts.backwards += 1  # no bool: torch 2.9 to 2.11, tracing this, cannot add and log it
        place = config.backward_thread
        if place == "auto":
            makes_nodes = args[3] if len(args) > 3 else kwargs.get("create_graph")
            fits = counts.in_use and not makes_nodes and _needs_no_threads()
            place = "caller" if fits else "engine"
        if place == "engine" or not is_multithreading_enabled():  # where the program says so
            return run_backward(*args, **kwargs)
        try:
            set_multithreading_enabled(False)  # of this thread
            return run_backward(*args, **kwargs)
        finally:
            set_multithreading_enabled(True)

    return run


def _needs_no_threads() -> bool:
    """Whether the engine's threads would do nothing that one thread does not.

    Those of several GPUs work at once. That of one GPU does so beside nodes of the CPU, which takes
    turns here: gradients add up in one of the orders in which the two may be done. Hooks of DDP and
    FSDP are left in the threads that they expect.
    """
    distributed = torch.distributed
    return gpus_in_use() == 1 and not (distributed.is_available() and distributed.is_initialized())


def _close_during_apply(owner: Any) -> None:
    """Record nothing while the class or instance method `apply` runs."""
    original = owner.__dict__["apply"]
    of_class = isinstance(original, (classmethod, ClassMethodDescriptorType))  # C's, torch 2.14

    @wraps(getattr(original, "__func__", original))
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, self) if of_class else original.__get__(self)
        simple = not kwargs and are_simple(args)
        if not simple:
            _compute_others(args, kwargs, "apply")
        mine = this_thread.__dict__
        before = mine.get("applies", 0)
        try:
            mine["applies"] = before + 1
            given = (args, kwargs) if simple else _released(args, kwargs)
            result = run_closed("apply", bound, *given)
        finally:
            mine["applies"] = before
        if simple or before or not [*wrapped_in((*args, *kwargs.values()))]:
            return result
        return lifted(result, ask(result))

    owner.apply = classmethod(_called(apply)) if of_class else apply
    HOT.append(("applying", apply, (getattr(original, "__func__", original),)))


def _flush_when_called(owner: Any, name: str) -> None:
    """Flush before what `owner.name` makes, a function of tensors in C++, is called."""
    original = getattr(owner, name)

    @wraps(original)
    def make(*args: Any) -> Callable[..., Any]:
        function = original(*args)

        def call(*tensors: Any) -> Any:
            flush_thread(name)
            return function(*tensors)

        return call

    setattr(owner, name, make)

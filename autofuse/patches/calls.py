"""Calls: functions that take tensors without asking, and those that ask by another protocol."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..chain.shell import Tensor
from ..dispatch.eager import run_default, run_eager
from ..dispatch.protocol import ask_overrides
from ..record.flush import flush_thread
from ..record.modes import regrade
from .around import (
    closed_between,
    closed_during,
    flush_first,
    flushed_at_end,
    flushed_when_called,
    plain_of,
    regraded_after,
    reopened_after,
    unwrapping,
)


def patch_calls() -> None:
    import torch._functorch.utils as functorch_utils
    from torch.autograd import forward_ad, function, graph

    closed_during(function.Function, "apply")
    closed_during(function.BackwardCFunction, "apply")
    for name in ("__init__", "__enter__", "__exit__"):
        regraded_after(torch.set_grad_enabled, name)  # which no_grad calls
    for name in ("__enter__", "__exit__"):
        regraded_after(torch.enable_grad, name)
    flushed_at_end(torch.no_grad)
    closed_between(forward_ad, "enter_dual_level", "exit_dual_level")
    # every autograd.Function.apply passes its arguments through this module attribute
    for owner, name in (
        (functorch_utils, "unwrap_dead_wrappers"),
        (torch._C.ScriptFunction, "__call__"),
        (torch._C.ScriptMethod, "__call__"),
        (torch.nn.parallel.DistributedDataParallel, "_post_forward"),
    ):
        flush_first(owner, name, name, flush_thread)
    for name in ("UndefinedGrad", "DelayedError"):  # which gradcheck calls
        flushed_when_called(torch._C._functions, name)  # type: ignore[attr-defined]
    for name in ("trace", "trace_module"):
        setattr(torch.jit, name, unwrapping(getattr(torch.jit, name), "jit"))
    for owner in (torch, torch.utils.dlpack):
        owner.to_dlpack = unwrapping(owner.to_dlpack, "to_dlpack")
    for owner in (graph, torch.autograd):  # hooks run in grad modes that the engine sets
        reopened_after(owner, "_engine_run_backward", "backward", lambda reason: regrade(),
                        flush=flush_thread)  # fmt: skip

    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

    @functools.wraps(default)
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Tensor in types:
            return run_default(default, cls, func, types, args, kwargs)
        return default(cls, func, types, args, kwargs)

    torch.Tensor.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]
    for module in (torch.nn.functional, torch.functional, torch._tensor, torch.autograd):
        module.handle_torch_function = ask_overrides  # type: ignore[attr-defined]

    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Tensor):
            data = plain_of(data)
        return make(cls, data, *args, **kwargs)

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[assignment]
    variable = torch.autograd.Variable.__new__  # C, which makes a plain tensor of any

    def new_variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            return variable(cls, *args, **kwargs)
        return run_eager(variable, (cls, *args), kwargs)

    torch.autograd.Variable.__new__ = staticmethod(new_variable)  # type: ignore[assignment]

"""Modes: places of PyTorch that change how a thread or the process computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from typing import Any

import torch

from ..chain.state import TOLD_LATER, UNREAD, all_recorders, is_alone
from ..dispatch.chosen import follow_cudnn
from ..inside import inside, is_foreign, whatever_interrupts
from ..record.flush import flush_all, flush_thread
from ..record.modes import look_away, look_on, reopen, reopen_all
from ..supply.kernels import capturing
from ..torch_private import in_functorch
from .around import around, closed_between


def patch_modes() -> None:
    """Inside most of these nothing is recorded: they see, or change, every single op.

    Modes of torch functions are told of each before it is recorded. A default device is one, which
    enters itself another way.
    """
    from torch._functorch import eager_transforms, vmap
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    closed_between(TorchDispatchMode, "__enter__", "__exit__", "mode")
    around(TorchFunctionMode, "__enter__", look_on)
    around(TorchFunctionMode, "__exit__", after=look_away)
    for module in (eager_transforms, vmap):  # a level of torch.func owns every new tensor
        for kind in ("grad", "jvp", "vmap", "func"):
            start, end = f"_{kind}_increment_nesting", f"_{kind}_decrement_nesting"
            closed_between(module, start, end, "torch.func", ends_anyway=True)
            if hasattr(module, start):
                around(module, start, _flush_others)
    closed_between(
        forward_ad, "enter_dual_level", "exit_dual_level", "torch.func",
        goes_on=lambda: forward_ad._current_level >= 0,
    )  # fmt: skip
    for owner, name, reason, flush, open_ in (
        (torch.inference_mode, "__enter__", "inference mode", flush_thread, reopen),
        (torch.inference_mode, "__exit__", "inference mode", flush_thread, reopen),
        (torch, "set_default_dtype", "default dtype", flush_all, reopen_all),
        (torch, "set_default_tensor_type", "default dtype", flush_all, reopen_all),
        (torch, "set_anomaly_enabled", "anomaly mode", flush_all, reopen_all),
    ):
        around(owner, name, partial(flush, reason), partial(open_, reason))
    enabled = vars(type(torch.backends.cudnn))["enabled"]  # which has kept the function
    for owner, name in ((torch._C, "_set_cudnn_enabled"), (enabled, "setter")):
        around(owner, name, after=follow_cudnn)
    _patch_saved_tensors_hooks()


def _flush_others() -> None:
    """Compute what other threads have pending, which in a level of torch.func has no graph.

    An error of that is told to who reads it: torch would end the level that has not begun.
    """
    if is_alone() or in_functorch() or any([capturing(x.device) for x in all_recorders]):
        return
    try:
        flush_all("torch.func")
    except Exception as error:
        if is_foreign(error):
            raise


def _patch_saved_tensors_hooks() -> None:
    """Recording goes on inside, where `grad.saves` says that it can.

    What is recorded under hooks is told to these, also if an interrupt comes as they go.
    """
    owner, reason = torch.autograd.graph.saved_tensors_hooks, "saved tensor hooks"
    enter, leave = owner.__enter__, owner.__exit__

    @wraps(enter)
    def begin(self: Any) -> None:
        flush_thread(reason)
        enter(self)
        try:
            reopen(reason)
        except BaseException:  # the block is not entered
            leave(self)
            raise

    @wraps(leave)
    def end(self: Any, *exc: Any) -> None:
        try:
            flush_thread(reason)
        finally:
            try:
                leave(self, *exc)
            finally:
                whatever_interrupts(partial(reopen, reason))

    owner.__init__ = _telling_in_order(owner.__init__)  # type: ignore[method-assign]
    owner.__enter__, owner.__exit__ = begin, end  # type: ignore[method-assign]


def _telling_in_order(init: Callable[..., None]) -> Callable[..., None]:
    """`saved_tensors_hooks.__init__`: torch's own are told first of what was recorded before.

    These cannot tell when they are called, see `grad.saves`.
    """
    from torch.utils import checkpoint

    first_run = checkpoint._checkpoint_hook
    own = torch.autograd.graph.save_on_cpu, first_run, checkpoint._recomputation_hook

    @wraps(init)
    def make(self: Any, pack_hook: Callable[..., Any], *args: Any) -> None:
        if type(self) not in own:
            init(self, pack_hook, *args)
            return

        def pack(tensor: torch.Tensor) -> Any:
            if get_ident() not in inside:
                flush_thread("saved tensor hooks")
            return pack_hook(tensor)

        setattr(pack, TOLD_LATER, pack_hook)
        if type(self) is first_run:
            setattr(pack, UNREAD, True)
        init(self, pack, *args)

    return make
